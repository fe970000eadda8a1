//! Creates topics, at the first publish or subscribe or when they are declared; deletes, checks and
//! reads whole topics.

use std::sync::Arc;

use sqlx::sqlite::SqliteConnection;

use super::log::Log;
use super::record::{self, Range};
use crate::broker::{BETWEEN_LOOKS, STANDS_STILL, Subscription};
use crate::error::BrokerError;
use crate::message::Arrived;
use crate::observe::Finding;

/// Most rows of one read in [`read_all`].
const READ_ROWS: usize = 2_000;

/// A topic and the ids of its partitions, by number.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Topic {
    pub(super) topic_id: i64,
    /// Identifies this creation of the topic. After a deletion its number alone may be used again.
    pub(super) made: String,
    pub(super) name: Arc<str>,
    pub(super) partitions: Vec<i64>,
}

pub(super) async fn find(connection: &mut SqliteConnection, name: &str) -> Result<Option<Topic>, sqlx::Error> {
    let found: Option<(i64, String)> =
        sqlx::query_as("select topic_id, topic_id || '-' || created_at from topic where name = ?")
            .bind(name)
            .fetch_optional(&mut *connection)
            .await?;
    let Some((topic_id, made)) = found else { return Ok(None) };
    let partitions = sqlx::query_scalar("select partition_id from topic_partition where topic_id = ? order by number")
        .bind(topic_id)
        .fetch_all(&mut *connection)
        .await?;
    Ok(Some(Topic { topic_id, made, name: name.into(), partitions }))
}

/// Finds a topic, or creates it, in the caller's transaction.
pub(super) async fn ensure(
    connection: &mut SqliteConnection,
    name: &str,
    partitions: u32,
) -> Result<Topic, sqlx::Error> {
    if let Some(topic) = find(connection, name).await? {
        return Ok(topic);
    }
    let (topic_id, made): (i64, String) = sqlx::query_as(
        "insert into topic (name, partitions, created_at) \
         values (?, ?, cast(unixepoch('subsec') * 1000 as integer)) returning topic_id, topic_id || '-' || created_at",
    )
    .bind(name)
    .bind(partitions)
    .fetch_one(&mut *connection)
    .await?;
    let mut ids = Vec::new();
    for number in 0..partitions {
        let id =
            sqlx::query_scalar("insert into topic_partition (topic_id, number) values (?, ?) returning partition_id")
                .bind(topic_id)
                .bind(number)
                .fetch_one(&mut *connection)
                .await?;
        ids.push(id);
    }
    Ok(Topic { topic_id, made, name: name.into(), partitions: ids })
}

pub(super) async fn declare(log: &Log, topics: &[String]) -> Result<(), BrokerError> {
    let mut connection = log.connect().await?;
    let failed = |error: sqlx::Error| log.failed("make topics in", &error);
    let mut write = log.begin(&mut connection).await?;
    for name in topics {
        ensure(&mut write.tx, name, log.config.partitions).await.map_err(failed)?;
    }
    log.commit(write).await?;
    connection.close().await.map_err(failed)
}

pub(super) async fn remove(log: &Log, subscriptions: &[Subscription]) -> Result<(), BrokerError> {
    let mut connection = log.connect().await?;
    let failed = |error: sqlx::Error| log.failed("delete topics from", &error);
    let mut write = log.begin(&mut connection).await?;
    for subscription in subscriptions {
        for topic in &subscription.topics {
            let Some(topic) = find(&mut write.tx, topic).await.map_err(failed)? else { continue };
            for partition_id in &topic.partitions {
                sqlx::query("delete from record where position >= ? and position < ?")
                    .bind(record::position(*partition_id, 0))
                    .bind(record::position(partition_id + 1, 0))
                    .execute(&mut *write.tx)
                    .await
                    .map_err(failed)?;
                for sql in
                    ["delete from lease where partition_id = ?", "delete from topic_partition where partition_id = ?"]
                {
                    sqlx::query(sql).bind(partition_id).execute(&mut *write.tx).await.map_err(failed)?;
                }
            }
            for sql in ["delete from member_topic where topic_id = ?", "delete from topic where topic_id = ?"] {
                sqlx::query(sql).bind(topic.topic_id).execute(&mut *write.tx).await.map_err(failed)?;
            }
        }
        for sql in [
            "delete from lease where group_id = (select group_id from consumer_group where name = ?)",
            "delete from member where group_id = (select group_id from consumer_group where name = ?)",
            "delete from consumer_group where name = ?",
        ] {
            sqlx::query(sql).bind(subscription.group()).execute(&mut *write.tx).await.map_err(failed)?;
        }
    }
    log.commit(write).await?;
    connection.close().await.map_err(failed)
}

pub(super) async fn read_all(log: &Log, topic: &str) -> Result<Vec<Arrived>, BrokerError> {
    let mut connection = log.connect().await?;
    let failed = |error: sqlx::Error| log.failed("read", &error);
    let mut arrived: Vec<Arrived> = Vec::new();
    let found = find(&mut connection.sqlite, topic).await.map_err(failed)?;
    for (number, partition_id) in (0_i32..).zip(found.map(|topic| topic.partitions).unwrap_or_default()) {
        let (mut from, to): (i64, i64) =
            sqlx::query_as("select first_offset, next_offset from topic_partition where partition_id = ?")
                .bind(partition_id)
                .fetch_one(&mut connection.sqlite)
                .await
                .map_err(failed)?;
        while from < to {
            let range = Range { topic, partition_id, number, from, to };
            let rows = record::read(&mut connection.sqlite, range, READ_ROWS, usize::MAX).await.map_err(failed)?;
            match rows.last() {
                Some(last) => from = last.coordinates.offset + 1,
                None => break,
            }
            arrived.extend(rows);
        }
    }
    connection.close().await.map_err(failed)?;
    Ok(arrived)
}

pub(super) async fn check(log: &Log, subscriptions: &[Subscription]) -> Result<Vec<Finding>, BrokerError> {
    let mut connection = log.connect().await?;
    let failed = |error: sqlx::Error| log.failed("check", &error);
    let path = log.config.path.display();
    let mut findings = Vec::new();

    let sound: String =
        sqlx::query_scalar("pragma quick_check(1)").fetch_one(&mut connection.sqlite).await.map_err(failed)?;
    let detail = format!("`{path}`: {sound}");
    findings.push(match sound.as_str() {
        "ok" => Finding::ok("file", detail),
        _ => {
            let remedy = "restore the broker file, or save what `.recover` of sqlite3 finds";
            Finding::refused("file", detail, remedy)
        }
    });
    let journal: String =
        sqlx::query_scalar("pragma journal_mode").fetch_one(&mut connection.sqlite).await.map_err(failed)?;
    let detail = format!("journal mode is `{journal}`; rows are synced to disk before they are settled");
    findings.push(match journal.as_str() {
        "wal" => Finding::ok("journal", detail),
        _ => Finding::refused("journal", detail, "keep the file on a local disk: WAL needs shared memory"),
    });
    let mut waiting = Vec::new();
    for subscription in subscriptions {
        let group = look(&mut connection.sqlite, subscription).await.map_err(failed)?;
        let Group { members, lag, .. } = group;
        if members > 0 && lag > 0 {
            waiting.push((findings.len(), subscription, group));
        }
        let name = format!("group {}", subscription.group());
        let detail = format!("members: {members}, rows not acknowledged: {lag}");
        findings.push(match members {
            0 if lag > 0 => Finding::stuck(name, detail, format!("start the consumer `{}`", subscription.consumer)),
            _ => Finding::ok(name, detail),
        });
    }
    if !waiting.is_empty() {
        tokio::time::sleep(BETWEEN_LOOKS).await;
    }
    for (at, subscription, before) in waiting {
        let after = look(&mut connection.sqlite, subscription).await.map_err(failed)?;
        if after.members == 0 || after.committed > before.committed {
            continue;
        }
        let Group { members, lag, .. } = after;
        let detail = format!(
            "members: {members}, rows not acknowledged: {lag}, and none was in {BETWEEN_LOOKS:?}: it stands still"
        );
        findings[at] = Finding::stuck(findings[at].name.clone(), detail, STANDS_STILL);
    }
    findings.extend(keepers(log, &mut connection.sqlite, subscriptions).await.map_err(failed)?);
    connection.close().await.map_err(failed)?;
    Ok(findings)
}

/// The findings for topics of a group that no live member of it reads, that no subscription names,
/// and that retention keeps rows of for the group.
async fn keepers(
    log: &Log,
    connection: &mut SqliteConnection,
    subscriptions: &[Subscription],
) -> Result<Vec<Finding>, sqlx::Error> {
    if log.config.retention.is_none() {
        return Ok(Vec::new());
    }
    let kept: Vec<(String, String, i64)> = sqlx::query_as(
        "select g.name, t.name, sum(p.next_offset - max(l.committed, p.first_offset)) as kept \
         from consumer_group g join lease l using (group_id) join topic_partition p using (partition_id) \
         join topic t using (topic_id) \
         where not exists (select 1 from member m join member_topic r using (member_id) \
           where m.group_id = g.group_id and r.topic_id = t.topic_id \
           and m.expires_at > cast(unixepoch('subsec') * 1000 as integer)) \
         group by g.group_id, t.topic_id having kept > 0 order by g.name, t.name",
    )
    .fetch_all(connection)
    .await?;
    let names = |group: &str, topic: &String| {
        subscriptions.iter().any(|subscription| subscription.group() == group && subscription.topics.contains(topic))
    };
    let kept = kept.into_iter().filter(|(group, topic, _)| !names(group, topic));
    let tell = |(group, topic, kept): (String, String, i64)| {
        let path = log.config.path.display().to_string().replace('\'', r"'\''");
        let quoted = |name: &str| name.replace('\'', "''");
        Finding::warning(
            format!("group {group}"),
            format!("nobody in it reads topic `{topic}`, and {kept} rows are kept for it whatever their age"),
            format!(
                "start a consumer of the topic in this group; if there is none any more: `sqlite3 '{path}' \"delete from \
                 lease where group_id = (select group_id from consumer_group where name = '{}') and partition_id in \
                 (select partition_id from topic_partition join topic using (topic_id) where name = '{}')\"`",
                quoted(&group),
                quoted(&topic)
            ),
        )
    };
    Ok(kept.map(tell).collect())
}

#[derive(Debug, Clone, Copy, Default)]
struct Group {
    members: i64,
    /// Rows that are not acknowledged.
    lag: i64,
    /// The sum of its offsets.
    committed: i64,
}

async fn look(connection: &mut SqliteConnection, subscription: &Subscription) -> Result<Group, sqlx::Error> {
    let members = sqlx::query_scalar(
        "select count(*) from member m join consumer_group g using (group_id) \
          where g.name = ? and m.expires_at > cast(unixepoch('subsec') * 1000 as integer)",
    )
    .bind(subscription.group())
    .fetch_one(&mut *connection)
    .await?;
    let mut group = Group { members, ..Group::default() };
    for topic in &subscription.topics {
        let (lag, committed): (i64, i64) = sqlx::query_as(
            "select coalesce(sum(p.next_offset - max(coalesce(l.committed, 0), p.first_offset)), 0), \
               coalesce(sum(l.committed), 0) \
             from topic t join topic_partition p using (topic_id) \
             left join lease l on l.partition_id = p.partition_id \
               and l.group_id = (select group_id from consumer_group where name = ?) \
             where t.name = ?",
        )
        .bind(subscription.group())
        .bind(topic)
        .fetch_one(&mut *connection)
        .await?;
        group.lag += lag;
        group.committed += committed;
    }
    Ok(group)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::time::Duration;

    use super::super::config::EmbeddedConfig;
    use super::*;
    use crate::observe::Severity;

    /// Shown by: looking only at the groups of subscriptions (the file grew, and all was well).
    /// A group with a member or a subscription may still have topics that nobody in it reads.
    #[tokio::test]
    async fn g11_a_topic_that_nobody_in_a_group_reads_and_whose_rows_retention_keeps_for_it_is_told() {
        let directory = tempfile::tempdir().unwrap();
        let config = EmbeddedConfig::new(directory.path().join("the broker's.db"));
        let log = Log::open(EmbeddedConfig { retention: Some(Duration::ZERO), ..config }).await.unwrap();
        declare(&log, &["t".to_owned(), "dropped".to_owned()]).await.unwrap();
        let mut connection = log.connect().await.unwrap();
        let gone = "update topic_partition set next_offset = 5; insert into consumer_group (name) values ('gone'), ('c'); \
                    insert into lease (group_id, partition_id, committed) \
                    select group_id, partition_id, 2 from topic_partition, consumer_group where name = 'c' or topic_id = 1; \
                    insert into member (group_id, process, session_ms, expires_at) values (2, 1, 1, 1 << 60); \
                    insert into member_topic values (1, 1)";
        sqlx::raw_sql(gone).execute(&mut connection.sqlite).await.unwrap();
        // A member of the group reads `t`, and a consumer that is known but does not run.
        for known in [Vec::new(), vec![Subscription::new("c", vec!["t".to_owned()])]] {
            let told = check(&log, &known).await.unwrap();
            let told: Vec<_> = told.iter().filter(|one| one.severity == Severity::Warning).collect();
            assert_eq!(told.iter().map(|one| &*one.name).collect::<Vec<_>>(), ["group c", "group gone"], "{told:?}");
            assert!(told[0].detail.contains("`dropped`, and 12 rows") && told[1].detail.contains("`t`, and 12 rows"));
            sqlx::raw_sql("delete from member").execute(&mut connection.sqlite).await.unwrap();
        }
        // The remedy is a statement that works, and leaves the topic that is read alone.
        let found = check(&log, &[Subscription::new("c", vec!["t".to_owned()])]).await.unwrap();
        for remedy in found.into_iter().filter(|one| one.severity == Severity::Warning).filter_map(|one| one.remedy) {
            assert!(remedy.contains(r"/the broker'\''s.db' "), "{remedy}");
            let sql = remedy.split('"').nth(1).unwrap().to_owned();
            sqlx::raw_sql(sqlx::AssertSqlSafe(sql)).execute(&mut connection.sqlite).await.unwrap();
        }
        let found = check(&log, &[Subscription::new("c", vec!["t".to_owned()])]).await.unwrap();
        assert!(found.iter().all(|one| one.severity != Severity::Warning), "{found:?}");
        let left = "select count(*) from lease where group_id = 2 and partition_id in \
                    (select partition_id from topic_partition where topic_id = 1)";
        assert_eq!(sqlx::query_scalar::<_, i64>(left).fetch_one(&mut connection.sqlite).await.unwrap(), 4);
    }
}
