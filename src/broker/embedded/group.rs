//! Groups in the file: members, leases with epochs, committed offsets. Every function runs in the
//! caller's write transaction.
//!
//! Guarantees: an offset moves only forward, and only under the epoch and member of its lease row
//! (G9). Taking a lease and giving it up raise its epoch. A member counts as dead when its time is
//! over, or when it ends later than now plus its length because the clock went back (R22). The
//! leases of a dead member become free in the same transaction.

use std::time::Duration;

use sqlx::sqlite::SqliteConnection;

use super::topology::Topic;
use crate::broker::share::{Seat, share};

/// Reads the time in milliseconds, by the clock of this connection.
const NOW: &str = "select cast(unixepoch('subsec') * 1000 as integer)";

/// A joined member: the ids of group and member, how many topics it reads, and how long it lives
/// without a heartbeat.
#[derive(Debug, Clone)]
pub(super) struct Membership {
    pub(super) group_id: i64,
    pub(super) member_id: i64,
    topics: i64,
    session: Duration,
}

/// A partition that this member owns.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Lease {
    pub(super) partition_id: i64,
    pub(super) epoch: i64,
    /// The next offset to be handled.
    pub(super) committed: i64,
    /// The first offset that still exists.
    pub(super) first: i64,
    /// The next offset to be written.
    pub(super) end: i64,
}

/// An offset to commit, or a lease to release, under its epoch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Fenced {
    pub(super) partition_id: i64,
    pub(super) epoch: i64,
    /// The next offset to be handled.
    pub(super) committed: Option<i64>,
    pub(super) release: bool,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct GroupState {
    pub(super) leases: Vec<Lease>,
    /// Partitions above this member's quota.
    pub(super) give_up: Vec<i64>,
    /// True where every partition of its topics has a live owner.
    pub(super) complete: bool,
    pub(super) generation: i64,
}

pub(super) async fn join(
    tx: &mut SqliteConnection,
    group: &str,
    topics: &[Topic],
    session: Duration,
) -> Result<Membership, sqlx::Error> {
    let group_id: i64 = sqlx::query_scalar(
        "insert into consumer_group (name) values (?) on conflict (name) do update set generation = generation + 1 \
         returning group_id",
    )
    .bind(group)
    .fetch_one(&mut *tx)
    .await?;
    let session_ms = millis(session);
    let member_id: i64 = sqlx::query_scalar(
        "insert into member (group_id, process, session_ms, expires_at) \
         values (?1, ?2, ?3, cast(unixepoch('subsec') * 1000 as integer) + ?3) returning member_id",
    )
    .bind(group_id)
    .bind(i64::from(std::process::id()))
    .bind(session_ms)
    .fetch_one(&mut *tx)
    .await?;
    for topic in topics {
        sqlx::query("insert or ignore into member_topic (member_id, topic_id) values (?, ?)")
            .bind(member_id)
            .bind(topic.topic_id)
            .execute(&mut *tx)
            .await?;
        sqlx::query(
            "insert into lease (group_id, partition_id, committed) \
             select ?, partition_id, first_offset from topic_partition where topic_id = ? on conflict do nothing",
        )
        .bind(group_id)
        .bind(topic.topic_id)
        .execute(&mut *tx)
        .await?;
    }
    let topics = i64::try_from(topics.len()).unwrap_or(i64::MAX);
    Ok(Membership { group_id, member_id, topics, session })
}

/// Renews this member's time, removes dead members, and takes the free partitions of its share.
/// Returns `None` where this member, or a topic that it reads, was removed: leave, and join again.
pub(super) async fn heartbeat(tx: &mut SqliteConnection, me: &Membership) -> Result<Option<GroupState>, sqlx::Error> {
    let now: i64 = sqlx::query_scalar(NOW).fetch_one(&mut *tx).await?;
    // A topic that was removed and made anew has no row here.
    let alive = sqlx::query(
        "update member set expires_at = ?1 where member_id = ?2 \
         and (select count(*) from member_topic where member_id = ?2) = ?3",
    )
    .bind(now + millis(me.session))
    .bind(me.member_id)
    .bind(me.topics)
    .execute(&mut *tx)
    .await?;
    if alive.rows_affected() == 0 {
        return Ok(None);
    }
    let mut changed = false;
    let dead: Vec<i64> = sqlx::query_scalar(
        "select member_id from member where group_id = ?1 and (expires_at <= ?2 or expires_at > ?2 + session_ms)",
    )
    .bind(me.group_id)
    .bind(now)
    .fetch_all(&mut *tx)
    .await?;
    for member_id in dead {
        remove_member(tx, me.group_id, member_id).await?;
        changed = true;
    }

    let members = members(tx, me.group_id).await?;
    let seats: Vec<(i64, i64, Option<i64>)> = sqlx::query_as(
        "select p.topic_id, l.partition_id, l.member_id from lease l join topic_partition p using (partition_id) \
         where l.group_id = ? order by l.partition_id",
    )
    .bind(me.group_id)
    .fetch_all(&mut *tx)
    .await?;
    let seats: Vec<Seat> =
        seats.into_iter().map(|(topic_id, partition_id, owner)| Seat { topic_id, partition_id, owner }).collect();
    let share = share(me.member_id, &members, &seats);
    for partition_id in share.take {
        sqlx::query("update lease set member_id = ?, epoch = epoch + 1 where group_id = ? and partition_id = ?")
            .bind(me.member_id)
            .bind(me.group_id)
            .bind(partition_id)
            .execute(&mut *tx)
            .await?;
        changed = true;
    }
    let generation: i64 = sqlx::query_scalar(
        "update consumer_group set generation = generation + ? where group_id = ? returning generation",
    )
    .bind(i64::from(changed))
    .bind(me.group_id)
    .fetch_one(&mut *tx)
    .await?;
    let (_, leases) = look(tx, me).await?;
    Ok(Some(GroupState { leases, give_up: share.give_up, complete: share.complete, generation }))
}

/// Reads the group's generation and this member's leases in one statement, for a poll.
pub(super) async fn look(connection: &mut SqliteConnection, me: &Membership) -> Result<(i64, Vec<Lease>), sqlx::Error> {
    type Row = (i64, Option<i64>, Option<i64>, Option<i64>, Option<i64>, Option<i64>);
    let rows: Vec<Row> = sqlx::query_as(
        "select g.generation, l.partition_id, l.epoch, l.committed, p.first_offset, p.next_offset \
         from consumer_group g left join lease l on l.group_id = g.group_id and l.member_id = ?2 \
         left join topic_partition p on p.partition_id = l.partition_id where g.group_id = ?1",
    )
    .bind(me.group_id)
    .bind(me.member_id)
    .fetch_all(connection)
    .await?;
    let generation = rows.first().map_or(0, |row| row.0);
    let leases = rows.into_iter().filter_map(|(_, partition_id, epoch, committed, first, end)| {
        Some(Lease { partition_id: partition_id?, epoch: epoch?, committed: committed?, first: first?, end: end? })
    });
    Ok((generation, leases.collect()))
}

/// Commits offsets and releases leases, where the epochs still hold.
pub(super) async fn settle(tx: &mut SqliteConnection, me: &Membership, fenced: &[Fenced]) -> Result<(), sqlx::Error> {
    let mut released = false;
    for Fenced { partition_id, epoch, committed, release } in fenced {
        // Where the epoch has changed, no row is updated: the next look shows the loss.
        let done = sqlx::query(
            "update lease set committed = max(committed, coalesce(?1, committed)), epoch = epoch + ?2, \
             member_id = case when ?2 then null else member_id end \
             where group_id = ?3 and partition_id = ?4 and member_id = ?5 and epoch = ?6",
        )
        .bind(committed)
        .bind(i64::from(*release))
        .bind(me.group_id)
        .bind(partition_id)
        .bind(me.member_id)
        .bind(epoch)
        .execute(&mut *tx)
        .await?;
        released |= *release && done.rows_affected() > 0;
    }
    if released {
        raise(tx, me.group_id).await?;
    }
    Ok(())
}

/// Leaves the group: all its partitions are free at once.
pub(super) async fn leave(tx: &mut SqliteConnection, me: &Membership) -> Result<(), sqlx::Error> {
    remove_member(tx, me.group_id, me.member_id).await?;
    raise(tx, me.group_id).await
}

async fn remove_member(tx: &mut SqliteConnection, group_id: i64, member_id: i64) -> Result<(), sqlx::Error> {
    sqlx::query("update lease set member_id = null, epoch = epoch + 1 where group_id = ? and member_id = ?")
        .bind(group_id)
        .bind(member_id)
        .execute(&mut *tx)
        .await?;
    sqlx::query("delete from member where member_id = ?").bind(member_id).execute(&mut *tx).await?;
    Ok(())
}

/// Raises the generation, so that the other members look at the group.
async fn raise(tx: &mut SqliteConnection, group_id: i64) -> Result<(), sqlx::Error> {
    sqlx::query("update consumer_group set generation = generation + 1 where group_id = ?")
        .bind(group_id)
        .execute(&mut *tx)
        .await?;
    Ok(())
}

/// The live members with their topics, in the order in which they joined.
async fn members(tx: &mut SqliteConnection, group_id: i64) -> Result<Vec<(i64, Vec<i64>)>, sqlx::Error> {
    let rows: Vec<(i64, i64)> = sqlx::query_as(
        "select m.member_id, t.topic_id from member m join member_topic t using (member_id) \
         where m.group_id = ? order by m.member_id, t.topic_id",
    )
    .bind(group_id)
    .fetch_all(&mut *tx)
    .await?;
    let mut members: Vec<(i64, Vec<i64>)> = Vec::new();
    for (member_id, topic_id) in rows {
        match members.last_mut() {
            Some((last, topics)) if *last == member_id => topics.push(topic_id),
            _ => members.push((member_id, vec![topic_id])),
        }
    }
    Ok(members)
}

fn millis(duration: Duration) -> i64 {
    i64::try_from(duration.as_millis()).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use sqlx::Connection;

    use super::super::topology;
    use super::*;

    const SESSION: Duration = Duration::from_secs(6);

    async fn file() -> (SqliteConnection, Topic) {
        let mut connection = SqliteConnection::connect("sqlite::memory:").await.unwrap();
        sqlx::raw_sql(include_str!("schema.sql")).execute(&mut connection).await.unwrap();
        let topic = topology::ensure(&mut connection, "t", 2).await.unwrap();
        (connection, topic)
    }

    async fn committed(connection: &mut SqliteConnection, partition_id: i64) -> i64 {
        let sql = "select committed from lease where partition_id = ?";
        sqlx::query_scalar(sql).bind(partition_id).fetch_one(connection).await.unwrap()
    }

    // Shown by leaving epoch or member out of the update in `settle`.
    #[tokio::test]
    async fn g9_an_offset_is_committed_only_under_the_epoch_and_member_of_its_lease() {
        let (mut file, topic) = file().await;
        let topics = [topic];
        let old = join(&mut file, "g", &topics, SESSION).await.unwrap();
        let lease = heartbeat(&mut file, &old).await.unwrap().unwrap().leases[0];
        let fenced = |committed, epoch, release| Fenced {
            partition_id: lease.partition_id,
            epoch,
            committed: Some(committed),
            release,
        };
        settle(&mut file, &old, &[fenced(5, lease.epoch, false)]).await.unwrap();
        assert_eq!(committed(&mut file, lease.partition_id).await, 5);
        settle(&mut file, &old, &[fenced(3, lease.epoch, false)]).await.unwrap();
        assert_eq!(committed(&mut file, lease.partition_id).await, 5, "offsets move only forward");
        settle(&mut file, &old, &[fenced(9, lease.epoch + 1, false), fenced(9, lease.epoch - 1, true)]).await.unwrap();
        assert_eq!(committed(&mut file, lease.partition_id).await, 5, "another epoch commits and frees nothing");

        leave(&mut file, &old).await.unwrap();
        let new = join(&mut file, "g", &topics, SESSION).await.unwrap();
        let taken = heartbeat(&mut file, &new).await.unwrap().unwrap().leases[0];
        assert!(taken.epoch > lease.epoch && taken.committed == 5);
        settle(&mut file, &old, &[fenced(9, taken.epoch, true)]).await.unwrap();
        assert_eq!(committed(&mut file, lease.partition_id).await, 5, "another member commits and frees nothing");
        assert_eq!(look(&mut file, &new).await.unwrap().1.len(), 2);
        assert_eq!(heartbeat(&mut file, &old).await.unwrap(), None, "who was removed knows it");
    }

    #[tokio::test]
    async fn what_is_given_back_is_taken_by_the_one_who_lacks_it_from_where_it_was_committed() {
        let (mut file, topic) = file().await;
        let topics = [topic];
        let first = join(&mut file, "g", &topics, SESSION).await.unwrap();
        assert_eq!(heartbeat(&mut file, &first).await.unwrap().unwrap().leases.len(), 2);
        let second = join(&mut file, "g", &topics, SESSION).await.unwrap();
        let state = heartbeat(&mut file, &second).await.unwrap().unwrap();
        assert!(state.leases.is_empty() && state.complete, "others hold them all");
        let state = heartbeat(&mut file, &first).await.unwrap().unwrap();
        let [surplus] = state.give_up[..] else { panic!("{state:?}") };
        let epoch = state.leases.iter().find(|lease| lease.partition_id == surplus).unwrap().epoch;
        let back = Fenced { partition_id: surplus, epoch, committed: Some(7), release: true };
        settle(&mut file, &first, &[back]).await.unwrap();
        let (generation, _) = look(&mut file, &second).await.unwrap();
        assert_ne!(generation, state.generation, "the others are told to look");
        let state = heartbeat(&mut file, &second).await.unwrap().unwrap();
        assert_eq!(state.leases.len(), 1);
        assert_eq!((state.leases[0].partition_id, state.leases[0].committed), (surplus, 7));
    }
}
