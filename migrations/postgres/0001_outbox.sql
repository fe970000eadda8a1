-- oncebox on PostgreSQL 14 or later: the outbox, the shards that read it, and what could not be sent.
--
-- Everything lives in the schema `oncebox`, whose name is fixed. Rows of the outbox are immutable and insert-only: delivery
-- state stands beside them, so that a change data capture router can read the same table.

create schema if not exists oncebox;
comment on schema oncebox is 'oncebox: outbox, inbox, and the state of relays and consumers';

-- The role of applications. It may call the doors and nothing else.
do $$
begin
  if not exists (select 1 from pg_catalog.pg_roles where rolname = 'oncebox_app') then
    create role oncebox_app nologin;
  end if;
exception
  -- Another database of this server is being migrated at the same moment.
  when duplicate_object or unique_violation then null;
  when insufficient_privilege then
    raise exception 'oncebox: the role oncebox_app is missing and % may not create roles', current_user
      using errcode = 'insufficient_privilege',
            hint = 'Let an administrator run: create role oncebox_app nologin; then run `oncebox migrate up` again.';
end
$$;
grant usage on schema oncebox to oncebox_app;

-- Limits and settings ---------------------------------------------------------------------------------------------------------

create table oncebox.limits (
  name   text collate "C" not null primary key,
  value  bigint not null,
  note   text not null,
  -- The doors read all values in the order of their names: no name can be added, and a missing one is an error.
  constraint limits_names check (name in ('content_type_bytes_max', 'header_name_bytes_max', 'headers_bytes_max', 'headers_max',
    'id_skew_seconds', 'key_bytes_max', 'kind_bytes_max', 'message_bytes_max', 'topic_length_max')),
  constraint limits_values check (value >= 0 and value <= case name
    when 'content_type_bytes_max' then 255 when 'header_name_bytes_max' then 255 when 'headers_bytes_max' then 65536
    when 'kind_bytes_max' then 255 when 'topic_length_max' then 249 else 1073741824 end)
);
comment on table oncebox.limits is 'limits of a message, the same for every door';
comment on column oncebox.limits.name is 'name of the limit; an error names the limit or the field that breaks it';
comment on column oncebox.limits.value is 'its value';
comment on column oncebox.limits.note is 'what it means';
comment on index oncebox.limits_pkey is 'serves every door: all limits in the order of their names';

insert into oncebox.limits (name, value, note) values
  ('content_type_bytes_max', 255, 'bytes of a content type; at most 255, an AMQP short string'),
  ('header_name_bytes_max', 128, 'bytes of a header name; at most 255'),
  ('headers_bytes_max', 65536, 'names and values of headers together; at most 65,536, because an AMQP frame is 128 KiB'),
  ('headers_max', 64, 'number of headers'),
  ('id_skew_seconds', 3600, 'how far the time in a given UUID v7 may be from the clock of the database'),
  ('key_bytes_max', 1024, 'bytes of a key'),
  ('kind_bytes_max', 255, 'bytes of a kind; at most 255, an AMQP short string'),
  ('message_bytes_max', 900000, 'bytes of key, headers and payload together'),
  ('topic_length_max', 249, 'characters of a topic; at most 249, what Kafka takes');

create table oncebox.setting (
  name   text not null primary key,
  value  bigint not null,
  note   text not null,
  constraint setting_values check (value >= case when name in ('outbox_retention_seconds') then 0 else 1 end)
);
comment on table oncebox.setting is 'how partitions are made and freed; every relay and consumer of this database obeys';
comment on column oncebox.setting.name is 'name of the setting';
comment on column oncebox.setting.value is 'its value';
comment on column oncebox.setting.note is 'what it does, and why it has its default';
comment on index oncebox.setting_pkey is 'serves housekeeping: one setting by name';

insert into oncebox.setting (name, value, note) values
  ('outbox_range_rows', 1000000, 'positions of a new outbox partition: large enough that making one is rare, small enough to give space back'),
  ('outbox_ranges_ahead', 4, 'whole empty outbox partitions kept above the last position: what a relay that is down may miss'),
  ('outbox_retention_seconds', 86400, 'how long proven rows stay readable before their partition is emptied'),
  ('inbox_range_seconds', 86400, 'time span of a new inbox partition'),
  ('inbox_ranges_ahead', 7, 'whole empty inbox partitions kept above the database time: what a consumer that is down may miss');

-- The outbox ------------------------------------------------------------------------------------------------------------------

-- Not owned by the column and without a cache, so that positions are drawn in the order of time (R1).
create sequence oncebox.outbox_position_seq as bigint minvalue 1 start 1 cache 1 no cycle;
comment on sequence oncebox.outbox_position_seq is 'positions of the outbox; cache 1, never set back';

create table oncebox.outbox (
  -- The order of these two columns is the order in which their defaults are drawn: a position never has an owner without a
  -- transaction id (R1). Without that a gap could be closed while its writer runs.
  written_by    xid8 not null default pg_current_xact_id(),
  position      bigint not null default nextval('oncebox.outbox_position_seq'),
  bucket        smallint not null,
  message_id    uuid not null,
  topic         text not null,
  key           text,
  kind          text not null,
  headers       json,
  payload       bytea not null,
  content_type  text not null,
  traceparent   text,
  tracestate    text,
  created_at    timestamptz not null default clock_timestamp(),
  constraint outbox_pkey primary key (position)
) partition by range (position);
create index outbox_message_id on oncebox.outbox (message_id);
comment on table oncebox.outbox is 'messages, immutable and insert-only; written by the functions oncebox.enqueue*, read by the relay';
comment on column oncebox.outbox.written_by is 'transaction that wrote the row; drawn before the position';
comment on column oncebox.outbox.position is 'order; drawn when the row is inserted, visible when its transaction commits';
comment on column oncebox.outbox.bucket is 'first byte of SHA-256 of the key, or of the message id where there is no key; a shard is a range of buckets';
comment on column oncebox.outbox.message_id is 'UUID v7 unless given; the same id twice is published twice';
comment on column oncebox.outbox.topic is 'Kafka topic, routing key on RabbitMQ';
comment on column oncebox.outbox.key is 'order is kept per (topic, key); null: no order';
comment on column oncebox.outbox.kind is 'what happened, for example payment.created';
comment on column oncebox.outbox.headers is 'object of strings in the order given; null: none';
comment on column oncebox.outbox.payload is 'bytes, never looked into';
comment on column oncebox.outbox.content_type is 'content type of the payload';
comment on column oncebox.outbox.traceparent is 'W3C trace context';
comment on column oncebox.outbox.tracestate is 'W3C trace context, state of vendors';
comment on column oncebox.outbox.created_at is 'when it was enqueued, by the clock of the database';
comment on index oncebox.outbox_pkey is 'serves the read of the relay: gaps and tail in position order';
comment on index oncebox.outbox_message_id is 'serves explain and dead show: rows by message id';

-- Shards ----------------------------------------------------------------------------------------------------------------------

create table oncebox.shard (
  shard_id       integer not null primary key,
  bucket_from    smallint not null,
  bucket_to      smallint not null,
  scanned_to     bigint not null default 0,
  gaps           int8multirange not null default '{}',
  epoch          bigint not null default 0,
  revision       bigint not null default 0,
  owner          text,
  lease_until    timestamptz,
  lease_seconds  double precision,
  updated_at     timestamptz not null default clock_timestamp(),
  constraint shard_buckets check (bucket_from >= 0 and bucket_to <= 255 and bucket_from <= bucket_to),
  constraint shard_positions check (scanned_to >= 0),
  constraint shard_gaps check (isempty(gaps) or upper(gaps) <= scanned_to + 1),
  constraint shard_lease check ((owner is null) = (lease_until is null) and (owner is null) = (lease_seconds is null))
  -- Rewritten twice a batch: room in the page keeps every update in it (HOT), so the index is never touched and vacuum has
  -- next to nothing to do.
) with (fillfactor = 10, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 10000);
comment on table oncebox.shard is 'one row per shard: a range of buckets, its cursor, and who owns it';
comment on column oncebox.shard.shard_id is 'number of the shard';
comment on column oncebox.shard.bucket_from is 'first bucket';
comment on column oncebox.shard.bucket_to is 'last bucket';
comment on column oncebox.shard.scanned_to is 'every committed position up to here is proven, dead, held, decided, or in gaps';
comment on column oncebox.shard.gaps is 'positions up to scanned_to that may still appear, or are not proven yet';
comment on column oncebox.shard.epoch is 'raised by every new ownership; a write of an older one changes nothing';
comment on column oncebox.shard.revision is 'raised by every write of the owner; another one than it wrote last ends its session';
comment on column oncebox.shard.owner is 'who holds the lease; null: nobody';
comment on column oncebox.shard.lease_until is 'end of the lease, by the clock of the database';
comment on column oncebox.shard.lease_seconds is 'length of the lease; one that ends later than now plus this counts as expired, for the clock went back';
comment on column oncebox.shard.updated_at is 'when the owner last wrote the cursor';
comment on index oncebox.shard_pkey is 'serves lease, read, checkpoint and mark: one shard by its number';

insert into oncebox.shard (shard_id, bucket_from, bucket_to) values (0, 0, 255);

-- How tables of this schema are vacuumed ---------------------------------------------------------------------------------------

-- A plan that is kept for a session is right for the size that its table had. One that is made for a table of a few pages reads it
-- from end to end, also when it has grown, until it is analysed again. So tables that every batch looks rows up in get statistics
-- when they are large only (until then PostgreSQL takes them for ten pages), and their files are not cut short when their rows go.

-- Dead, held, decided ---------------------------------------------------------------------------------------------------------

create table oncebox.outbox_dead (
  position           bigint not null primary key,
  bucket             smallint not null,
  message_id         uuid not null,
  topic              text not null,
  key                text,
  kind               text not null,
  headers            json,
  payload            bytea not null,
  content_type       text not null,
  traceparent        text,
  tracestate         text,
  created_at         timestamptz not null,
  state              text not null,
  cause              text not null,
  reason             text,
  holds              boolean not null default false,
  attempts           integer not null default 1,
  history            jsonb not null default '[]',
  diverted_at        timestamptz not null default clock_timestamp(),
  requested          text,
  requested_at       timestamptz,
  requested_by       text,
  edited             boolean not null default false,
  constraint outbox_dead_state check (state in ('dead', 'held')),
  constraint outbox_dead_cause check (case state when 'dead' then cause = 'refused' else cause in ('behind', 'destination') end),
  constraint outbox_dead_holds check (state = 'dead' or not holds),
  constraint outbox_dead_reason check ((reason is null) = (cause = 'behind')),
  constraint outbox_dead_requested check (case when requested is null
    then requested_at is null and requested_by is null
    else (requested = 'discard' or (state = 'dead' and requested = 'redrive')) and requested_at is not null and requested_by is not null end)
) with (autovacuum_vacuum_threshold = 5000, autovacuum_vacuum_insert_threshold = 5000, autovacuum_analyze_threshold = 5000, vacuum_truncate = off);
-- A key may be longer than an index entry.
create index outbox_dead_key on oncebox.outbox_dead (topic, left(key, 512), position);
create index outbox_dead_state on oncebox.outbox_dead (state, cause, position);
create index outbox_dead_requested on oncebox.outbox_dead (position) where requested is not null;
create index outbox_dead_message_id on oncebox.outbox_dead (message_id);
comment on table oncebox.outbox_dead is 'outbox rows that could not be sent, and those they hold back, whole';
comment on column oncebox.outbox_dead.position is 'position it had in the outbox: its place in the order of its key';
comment on column oncebox.outbox_dead.bucket is 'as in the outbox';
comment on column oncebox.outbox_dead.message_id is 'as in the outbox, or as an operator edited it';
comment on column oncebox.outbox_dead.topic is 'as in the outbox';
comment on column oncebox.outbox_dead.key is 'as in the outbox';
comment on column oncebox.outbox_dead.kind is 'as in the outbox';
comment on column oncebox.outbox_dead.headers is 'as in the outbox, or as an operator edited it';
comment on column oncebox.outbox_dead.payload is 'as in the outbox, or as an operator edited it';
comment on column oncebox.outbox_dead.content_type is 'as in the outbox';
comment on column oncebox.outbox_dead.traceparent is 'as in the outbox';
comment on column oncebox.outbox_dead.tracestate is 'as in the outbox';
comment on column oncebox.outbox_dead.created_at is 'as in the outbox';
comment on column oncebox.outbox_dead.state is 'dead: refused for what it is; held: waits until it is released';
comment on column oncebox.outbox_dead.cause is 'refused: by the broker; behind: stands behind a dead or held row of its key; destination: its topic is not there, not routed or denied';
comment on column oncebox.outbox_dead.reason is 'what the broker said; null behind another row';
comment on column oncebox.outbox_dead.holds is 'later rows of its key are held behind it (policy hold)';
comment on column oncebox.outbox_dead.attempts is 'how often it was diverted: once, and again after each release that was refused';
comment on column oncebox.outbox_dead.history is 'array of {at, attempt, error}, oldest first';
comment on column oncebox.outbox_dead.diverted_at is 'when it came here, or its state last changed';
comment on column oncebox.outbox_dead.requested is 'what an operator asked for; only the owner of the shard acts on it';
comment on column oncebox.outbox_dead.requested_at is 'when';
comment on column oncebox.outbox_dead.requested_by is 'who';
comment on column oncebox.outbox_dead.edited is 'an operator gave it a new message id, and perhaps a new payload';
comment on index oncebox.outbox_dead_pkey is 'serves diversion, release and consultation: one row by its position';
comment on index oncebox.outbox_dead_key is 'serves the release of one key in position order, and how many stand behind a dead row';
comment on index oncebox.outbox_dead_state is 'serves the release of a topic, dead list, and counts';
comment on index oncebox.outbox_dead_requested is 'serves the question of the relay for requests';
comment on index oncebox.outbox_dead_message_id is 'serves explain and dead show: rows by message id';

create table oncebox.decision (
  position    bigint not null primary key,
  decision    text not null,
  decided_at  timestamptz not null default clock_timestamp(),
  constraint decision_known check (decision in ('skipped', 'discarded', 'edited', 'released'))
) with (autovacuum_vacuum_threshold = 5000, autovacuum_vacuum_insert_threshold = 5000, autovacuum_analyze_threshold = 5000, vacuum_truncate = off);
comment on table oncebox.decision is 'what was decided about a position, kept until its partition is freed: a cursor that is set back does not undo it (R18)';
comment on column oncebox.decision.position is 'position in the outbox';
comment on column oncebox.decision.decision is 'skipped: dead under policy skip; discarded: by an operator; edited: published with another id or payload; released: published after it was dead or held';
comment on column oncebox.decision.decided_at is 'when';
comment on index oncebox.decision_pkey is 'serves a read below the last decision: one decision by position';

-- Partitions ------------------------------------------------------------------------------------------------------------------

-- Stands on the parent and on every partition: on the parent alone it does not fire for a partition (R7).
create function oncebox.refuse_truncate() returns trigger
language plpgsql volatile set search_path = oncebox, pg_temp as $$
declare
  unproven boolean;
begin
  -- Index lookups, never a scan: TRUNCATE holds its lock already.
  execute format($query$
    select exists (select 1 from %1$I.%2$I o where o.position > (select min(s.scanned_to) from oncebox.shard s))
        or exists (select 1 from oncebox.shard s, unnest(s.gaps) g
                    where exists (select 1 from %1$I.%2$I o where o.position >= lower(g) and o.position < upper(g)))
  $query$, tg_table_schema, tg_table_name) into unproven;
  if unproven then
    raise exception 'oncebox: % holds messages that are not proven by the broker', tg_table_name
      using errcode = 'object_not_in_prerequisite_state',
            hint = 'Let the publisher send them; it empties proven partitions by itself.';
  end if;
  return null;
end
$$;
comment on function oncebox.refuse_truncate() is 'refuses TRUNCATE while unproven rows stand in the table';

-- A separate table, then ATTACH: this takes no lock that a writer or a reader of the other partitions waits for. The range needs no
-- CHECK of its own, which every row would pay for: the ATTACH has nothing to scan.
-- `create table .. partition of` would queue every writer behind one open reader (R8). A statement that began before the ATTACH
-- has its rows routed to DEFAULT until it ends: when the lock is there, the range must still be `distance` above what was drawn.
create function oncebox.attach_outbox_range(range_from bigint, range_to bigint, distance bigint) returns text
language plpgsql volatile set search_path = oncebox, pg_temp as $$
declare
  made text := format('outbox_p%s', range_from);
begin
  execute format('create table oncebox.%I (like oncebox.outbox including defaults including constraints including indexes including storage)', made);
  execute format('comment on table oncebox.%I is %L', made, format('outbox positions from %s to below %s', range_from, range_to));
  execute format('create trigger refuse_truncate before truncate on oncebox.%I for each statement execute function oncebox.refuse_truncate()', made);
  execute format('alter table oncebox.outbox attach partition oncebox.%I for values from (%s) to (%s)', made, range_from, range_to);
  if (select q.last_value from oncebox.outbox_position_seq q) + distance >= range_from then
    raise exception 'oncebox: position % is near, the range from it is not attached', range_from
      using errcode = 'object_not_in_prerequisite_state';
  end if;
  return made;
end
$$;
comment on function oncebox.attach_outbox_range(bigint, bigint, bigint) is 'makes an outbox partition for positions from the first to below the second';

create trigger refuse_truncate before truncate on oncebox.outbox for each statement execute function oncebox.refuse_truncate();
-- Takes what outruns the partitions made ahead: an insert never fails for want of one.
create table oncebox.outbox_default (like oncebox.outbox including defaults including constraints including indexes including storage);
comment on table oncebox.outbox_default is 'outbox positions for which no partition was made in time';
create trigger refuse_truncate before truncate on oncebox.outbox_default for each statement execute function oncebox.refuse_truncate();
alter table oncebox.outbox attach partition oncebox.outbox_default default;
select oncebox.attach_outbox_range(1 + 1000000 * (i - 1), 1 + 1000000 * i, -1) from generate_series(1, 5) i;
