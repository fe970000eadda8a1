//! Checks settings of server and schema that the promises need, when a program starts and in
//! `doctor` (R1, R7).
//!
//! Guarantee: a setting that loses, doubles or reorders messages is `Refused`; one that weakens a
//! promise or will cost time is a warning.

use sqlx::Postgres;

use super::PostgresStore;
use crate::error::StoreError;
use crate::observe::Finding;
use crate::store::bounded::{Ask, Bounded};
use crate::store::schema::LOST_AT_FAILOVER;

pub(super) async fn findings(store: &PostgresStore) -> Result<Vec<Finding>, StoreError> {
    let mut connection = store.pool.dedicated().await?;
    let mut findings = vec![server_version(&mut connection).await?];
    findings.extend(server_settings(&mut connection).await?);
    findings.push(standbys(&mut connection).await?);
    findings.push(pooler(store, &mut connection).await?);
    let has_tables: bool =
        sqlx::query_scalar("select to_regclass('oncebox.outbox') is not null").one(&mut connection).await?;
    if has_tables {
        findings.push(sequence(&mut connection).await?);
        findings.push(columns(&mut connection).await?);
        findings.push(default_partitions(&mut connection).await?);
        findings.push(truncate_triggers(&mut connection).await?);
        findings.push(record_trigger(&mut connection).await?);
        findings.push(privileges(&mut connection).await?);
        findings.push(doors(&mut connection).await?);
        findings.push(cursor(&mut connection).await?);
        findings.push(ownership(&mut connection).await?);
    }
    Ok(findings)
}

async fn server_version(connection: &mut Bounded<Postgres>) -> Result<Finding, StoreError> {
    let number: i32 =
        sqlx::query_scalar("select current_setting('server_version_num')::int").one(&mut *connection).await?;
    let shown: String = sqlx::query_scalar("select current_setting('server_version')").one(connection).await?;
    Ok(match number {
        140_000.. => Finding::ok("server version", shown),
        _ => Finding::refused("server version", shown, "use PostgreSQL 14 or later"),
    })
}

async fn server_settings(connection: &mut Bounded<Postgres>) -> Result<Vec<Finding>, StoreError> {
    let (encoding, fsync, full_pages, is_standby): (String, bool, bool, bool) = sqlx::query_as(
        "select current_setting('server_encoding'), current_setting('fsync')::boolean,
                current_setting('full_page_writes')::boolean, pg_is_in_recovery()",
    )
    .one(connection)
    .await?;
    let mut findings = vec![match encoding.as_str() {
        "UTF8" => Finding::ok("encoding", encoding),
        _ => Finding::refused("encoding", encoding, "create the database with `encoding 'UTF8'`"),
    }];
    if !fsync || !full_pages {
        findings.push(Finding::warning(
            "durability",
            "fsync or full_page_writes is off: a crash of the machine may lose what was acknowledged",
            "set both to on and restart the server",
        ));
    }
    if is_standby {
        findings.push(Finding::waits(
            "primary",
            "this server is a standby: nothing can be written until it is promoted",
            "promote it, or connect to the primary: with `target_session_attrs` of your proxy, or another host name",
        ));
    }
    Ok(findings)
}

/// Asynchronous standbys: one that is promoted lacks the primary's last commits. Readers of logical
/// changes and copies under way are none. Our own sessions raise `synchronous_commit`, so it is
/// read as the sessions of applications get it.
async fn standbys(connection: &mut Bounded<Postgres>) -> Result<Finding, StoreError> {
    let (standbys, names, commit): (i64, String, String) = sqlx::query_as(
        "select (select count(*) from pg_stat_replication r
                  where r.state is distinct from 'backup' and r.application_name is distinct from 'pg_basebackup'
                    and not exists (select 1 from pg_replication_slots s where s.active_pid = r.pid and s.slot_type = 'logical')),
                current_setting('synchronous_standby_names'),
                (select reset_val from pg_settings where name = 'synchronous_commit')",
    )
    .one(connection)
    .await?;
    Ok(synchronous(standbys, &names, &commit))
}

fn synchronous(standbys: i64, names: &str, commit: &str) -> Finding {
    let waits = !names.is_empty() && !matches!(commit, "off" | "local");
    match standbys {
        _ if waits => Finding::ok("standbys", format!("synchronous: {names}")),
        0 => Finding::ok("standbys", "none is connected"),
        count => Finding::warning(
            "standbys",
            format!("{count} connected, asynchronous: {LOST_AT_FAILOVER}"),
            "set synchronous_standby_names, and leave synchronous_commit on",
        ),
    }
}

/// Detects a pooler that changes servers between statements: there one client sees a session
/// setting of another.
async fn pooler(store: &PostgresStore, connection: &mut Bounded<Postgres>) -> Result<Finding, StoreError> {
    let mark = uuid::Uuid::now_v7().to_string();
    let remedy = "connect to the server directly, or to a pooler in session mode";
    let mut other = store.pool.dedicated().await?;
    for _ in 0..3 {
        sqlx::query("select set_config('oncebox.probe', $1, false)").bind(&mark).run(&mut *connection).await?;
        let probe = "select current_setting('oncebox.probe', true)";
        let seen: Option<String> = sqlx::query_scalar(probe).one(&mut other).await?;
        let own: Option<String> = sqlx::query_scalar(probe).one(&mut *connection).await?;
        if seen.as_deref() == Some(mark.as_str()) || own.as_deref() != Some(mark.as_str()) {
            let detail = "a transaction-mode pooler stands in between: sessions share servers";
            return Ok(Finding::refused("pooler", detail, remedy));
        }
    }
    Ok(Finding::ok("pooler", "sessions keep their server"))
}

/// The sequence must have no cache: with one, positions are not drawn in the order of time (R1). It
/// must not be owned by a column: it would be dropped together with that column.
async fn sequence(connection: &mut Bounded<Postgres>) -> Result<Finding, StoreError> {
    let (cache, increment, cycles, is_owned): (i64, i64, bool, bool) = sqlx::query_as(
        "select s.seqcache, s.seqincrement, s.seqcycle,
                exists (select 1 from pg_depend d where d.classid = 'pg_class'::regclass and d.objid = s.seqrelid
                           and d.refclassid = 'pg_class'::regclass and d.refobjsubid > 0 and d.deptype in ('a', 'i'))
           from pg_sequence s where s.seqrelid = 'oncebox.outbox_position_seq'::regclass",
    )
    .one(connection)
    .await?;
    Ok(match (cache, increment, cycles, is_owned) {
        (1, 1, false, false) => Finding::ok("outbox sequence", "cache 1, increment 1, not owned by a column"),
        _ => Finding::refused(
            "outbox sequence",
            format!(
                "cache {cache}, increment {increment}, cycle {cycles}, owned by a column: {is_owned}: positions are not drawn in the \
                 order of time, or the sequence goes with its column"
            ),
            "alter sequence oncebox.outbox_position_seq increment 1 cache 1 no cycle owned by none",
        ),
    })
}

/// The order of the columns and their defaults must draw the transaction id before the position
/// (R1). A trigger or rule on inserts could change that.
async fn columns(connection: &mut Bounded<Postgres>) -> Result<Finding, StoreError> {
    // What is on the path is printed without its schema, and compared with what a migration wrote.
    sqlx::raw_sql("set search_path = pg_catalog, pg_temp").run(connection).await?;
    let holds: bool = sqlx::query_scalar(
        "select coalesce(bool_and(
             case a.attname when 'written_by' then pg_get_expr(d.adbin, d.adrelid) = 'pg_current_xact_id()'
                            else pg_get_expr(d.adbin, d.adrelid) = 'nextval(''oncebox.outbox_position_seq''::regclass)' end), false)
           and count(*) = 2
           and min(a.attnum) filter (where a.attname = 'written_by') < min(a.attnum) filter (where a.attname = 'position')
           and not exists (select 1 from pg_trigger t where t.tgrelid = 'oncebox.outbox'::regclass and not t.tgisinternal and t.tgtype & 4 = 4)
           and not exists (select 1 from pg_rewrite r where r.ev_class = 'oncebox.outbox'::regclass)
           from pg_attribute a join pg_attrdef d on d.adrelid = a.attrelid and d.adnum = a.attnum
          where a.attrelid = 'oncebox.outbox'::regclass and a.attname in ('written_by', 'position')",
    )
    .one(connection)
    .await?;
    Ok(match holds {
        true => Finding::ok("outbox columns", "the transaction id is drawn before the position"),
        false => Finding::refused(
            "outbox columns",
            "the defaults of written_by and position, their order, or the absence of insert triggers and rules was changed: an open \
             transaction could be taken for an aborted one",
            "put back what `oncebox migrate print` shows for oncebox.outbox",
        ),
    })
}

async fn default_partitions(connection: &mut Bounded<Postgres>) -> Result<Finding, StoreError> {
    let (there, outran): (bool, i64) = sqlx::query_as(
        "select count(*) >= 2 and bool_and(p.partdefid <> 0), coalesce(sum(pg_relation_size(nullif(p.partdefid, 0))), 0)::bigint
           from pg_partitioned_table p
          where p.partrelid in ('oncebox.outbox'::regclass, 'oncebox.inbox_timed'::regclass, to_regclass('oncebox.idempotency_body'))",
    )
    .one(connection)
    .await?;
    Ok(match (there, outran) {
        (false, _) => Finding::refused(
            "partitions",
            "a DEFAULT partition is missing: inserts fail when they outrun the ranges made ahead",
            "put back the DEFAULT partition that `oncebox migrate print` shows",
        ),
        (true, 0) => Finding::ok("partitions", "ranges stand ahead of what is written"),
        (true, bytes) => Finding::warning(
            "partitions",
            format!(
                "{bytes} bytes stand in DEFAULT partitions: no range was made in time, or ids lie outside of all ranges"
            ),
            "let publisher, consumer and services with operations run as the owner of the schema oncebox; they make ranges ahead",
        ),
    })
}

/// Each partition needs its own trigger: one on the parent does not fire for a partition (R7).
async fn truncate_triggers(connection: &mut Bounded<Postgres>) -> Result<Finding, StoreError> {
    let without: Vec<String> = sqlx::query_scalar(
        "select coalesce(array_agg(p.relid::text order by 1), '{}') from pg_partition_tree('oncebox.outbox') p
          where not exists (select 1 from pg_trigger t where t.tgrelid = p.relid and t.tgenabled in ('O', 'A') and t.tgtype & 34 = 34
                               and t.tgfoid = to_regproc('oncebox.refuse_truncate'))",
    )
    .one(connection)
    .await?;
    Ok(match without.as_slice() {
        [] => Finding::ok("truncate", "refused while unproven messages stand"),
        tables => Finding::refused(
            "truncate",
            format!("no trigger refuses TRUNCATE of {}", tables.join(", ")),
            format!(
                "drop trigger if exists refuse_truncate on {0}; create trigger refuse_truncate before truncate on {0} \
                 for each statement execute function oncebox.refuse_truncate()",
                tables[0]
            ),
        ),
    })
}

/// For updates this trigger does the work of the CHECK constraints of records. Unlike a constraint,
/// a trigger can be switched off.
async fn record_trigger(connection: &mut Bounded<Postgres>) -> Result<Finding, StoreError> {
    let there: bool = sqlx::query_scalar(
        "select to_regclass('oncebox.idempotency_request') is null or exists (
           select 1 from pg_trigger t where t.tgrelid = to_regclass('oncebox.idempotency_request')
                           and t.tgname = 'idempotency_request_sound' and t.tgenabled = 'A')",
    )
    .one(connection)
    .await?;
    Ok(if there {
        Finding::ok("records", "a change after which columns contradict each other is refused")
    } else {
        Finding::refused(
            "records",
            "the trigger that refuses contradictory changes of idempotency records is off",
            "alter table oncebox.idempotency_request enable always trigger idempotency_request_sound",
        )
    })
}

/// A role that may insert without the functions could choose positions, buckets and sizes (R1).
async fn privileges(connection: &mut Bounded<Postgres>) -> Result<Finding, StoreError> {
    let granted: Vec<String> = sqlx::query_scalar(
        "select coalesce(array_agg(distinct format('%s to %s on %s', acl.privilege_type,
                           case acl.grantee when 0 then 'public' else acl.grantee::regrole::text end, p.relid)), '{}')
           from pg_partition_tree('oncebox.outbox') p join pg_class c on c.oid = p.relid, aclexplode(c.relacl) acl
          where acl.grantee <> c.relowner and acl.privilege_type in ('INSERT', 'UPDATE', 'DELETE', 'TRUNCATE', 'TRIGGER')",
    )
    .one(connection)
    .await?;
    Ok(match granted.as_slice() {
        [] => Finding::ok("privileges", "only the owner may write the outbox; applications use the functions"),
        granted => Finding::refused(
            "privileges",
            format!("granted: {}", granted.join("; ")),
            "revoke all on all tables in schema oncebox from those roles; grant them the role oncebox_app instead",
        ),
    })
}

async fn doors(connection: &mut Bounded<Postgres>) -> Result<Finding, StoreError> {
    let (role, safe, open, triggers): (bool, i64, i64, i64) = sqlx::query_as(
        "select exists (select 1 from pg_roles where rolname = 'oncebox_app'),
                count(*) filter (where p.prosecdef and (p.proname <> 'enqueue_all' or p.proconfig @> array['search_path=oncebox, pg_temp'])),
                count(*) filter (where p.proacl is null
                  or exists (select 1 from aclexplode(p.proacl) acl where acl.grantee = 0 and acl.privilege_type = 'EXECUTE')),
                (select count(*) from pg_trigger t where t.tgrelid = 'oncebox.limits'::regclass and t.tgenabled = 'A'
                    and t.tgfoid = to_regproc('oncebox.compile_limits'))
           from pg_proc p where p.pronamespace = 'oncebox'::regnamespace and p.proname in ('enqueue', 'enqueue_message', 'enqueue_all')",
    )
    .one(connection)
    .await?;
    Ok(match (role, safe, open) {
        _ if triggers != 2 => Finding::refused(
            "doors",
            "a change of oncebox.limits does not reach the doors: its triggers are off",
            "alter table oncebox.limits enable always trigger compile_limits, enable always trigger compile_no_limits; then write one \
             of its rows again",
        ),
        (true, 6, 0) => Finding::ok("doors", "six functions, for the role oncebox_app"),
        (false, _, _) => Finding::warning(
            "doors",
            "the role oncebox_app is missing: only the owner can enqueue",
            "create role oncebox_app nologin; then grant usage on schema oncebox and execute on the functions oncebox.enqueue* to it",
        ),
        _ => Finding::refused(
            "doors",
            format!("{safe} of 6 functions are as they were made, {open} may be called by everybody"),
            "put back the functions oncebox.enqueue* that `oncebox migrate print` shows",
        ),
    })
}

/// A sequence behind the cursor would give new messages positions that count as scanned (R7).
async fn cursor(connection: &mut Bounded<Postgres>) -> Result<Finding, StoreError> {
    let (last_value, scanned_to): (i64, Option<i64>) = sqlx::query_as(
        "select (select last_value from oncebox.outbox_position_seq), (select max(scanned_to) from oncebox.shard)",
    )
    .one(connection)
    .await?;
    let Some(scanned_to) = scanned_to else {
        let remedy = "insert into oncebox.shard (shard_id, bucket_from, bucket_to) values (0, 0, 255)";
        return Ok(Finding::refused("cursor", "there is no shard: nothing is ever read", remedy));
    };
    Ok(if last_value < scanned_to {
        Finding::refused(
            "cursor",
            format!(
                "sequence behind cursor: the last position drawn is {last_value}, {scanned_to} is scanned; new messages would never be read"
            ),
            "run `oncebox doctor --fix`",
        )
    } else {
        Finding::ok("cursor", format!("scanned to {scanned_to} of {last_value}"))
    })
}

/// Only the owner can make partitions, and row security would hide rows from other roles. A
/// partition that another role made belongs to that role, and only that role can empty it.
async fn ownership(connection: &mut Bounded<Postgres>) -> Result<Finding, StoreError> {
    let (is_as_owner, has_row_security, owner, of_others): (bool, bool, String, Vec<String>) = sqlx::query_as(
        "select pg_has_role(c.relowner, 'usage'), c.relrowsecurity, c.relowner::regrole::text,
                array(select p.oid::regclass::text
                        from pg_inherits i join pg_class p on p.oid = i.inhrelid
                       where i.inhparent in ('oncebox.outbox'::regclass, 'oncebox.inbox_timed'::regclass)
                         and not pg_has_role(p.relowner, 'usage')
                       order by 1)
           from pg_class c where c.oid = 'oncebox.outbox'::regclass",
    )
    .one(connection)
    .await?;
    Ok(if has_row_security {
        Finding::refused(
            "ownership",
            "row security is enabled on oncebox.outbox: a relay could be shown fewer rows than there are",
            "alter table oncebox.outbox disable row level security",
        )
    } else if is_as_owner && of_others.is_empty() {
        Finding::ok("ownership", format!("this role acts as {owner}, the owner"))
    } else if is_as_owner {
        Finding::warning(
            "ownership",
            format!(
                "{} partitions belong to other roles, so this role cannot empty them: {}",
                of_others.len(),
                of_others.join(", ")
            ),
            format!("as an administrator, for each of them: alter table {} owner to {owner}", of_others[0]),
        )
    } else {
        Finding::warning(
            "ownership",
            format!(
                "this role is not {owner}, the owner: it can make no partitions, so rows go to the DEFAULT partitions"
            ),
            format!("let publisher and consumer connect as {owner}: what a member of it makes belongs to that member"),
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::observe::Severity;

    #[test]
    fn asynchronous_standbys_are_told_with_what_a_failover_costs() {
        for (standbys, names, commit, severity) in [
            (0, "", "on", Severity::Ok),
            (2, "any 1 (a, b)", "on", Severity::Ok),
            (2, "", "on", Severity::Warning),
            (2, "any 1 (a, b)", "local", Severity::Warning),
        ] {
            assert_eq!(synchronous(standbys, names, commit).severity, severity, "{standbys} {names} {commit}");
        }
    }
}
