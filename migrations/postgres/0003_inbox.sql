-- The inbox: which messages had their effects, which wait for a retry, which are dead. And e-mails, acts, assignments.

create table oncebox.consumer (
  consumer_id    integer not null generated always as identity primary key,
  name           text not null,
  id_rule        text not null,
  registered_at  timestamptz not null default clock_timestamp(),
  seen_at        timestamptz not null default clock_timestamp(),
  purged_below   timestamptz,
  constraint consumer_name unique (name)
);
comment on table oncebox.consumer is 'consumers that ever started on this database';
comment on column oncebox.consumer.consumer_id is 'number of the consumer in this database';
comment on column oncebox.consumer.name is 'its name';
comment on column oncebox.consumer.id_rule is 'where the id of a message stands; another one is refused unless accepted (R31)';
comment on column oncebox.consumer.registered_at is 'first start';
comment on column oncebox.consumer.seen_at is 'when one of its processes was last there; written every ten seconds';
comment on column oncebox.consumer.purged_below is 'ids with an earlier time were purged since the first start and are too old; null: never purged';
comment on index oncebox.consumer_pkey is 'serves names of consumers';
comment on index oncebox.consumer_name is 'serves registration: one number per name';

-- Timed ids (UUID v7), range-partitioned by the id so that old ones go whole. The DEFAULT partition takes ids whose range is
-- gone or not yet made; an id stands in exactly one partition, so the key is unique over all of them.
create table oncebox.inbox_timed (
  message_id    uuid not null,
  content_hash  uuid not null,
  received_at   timestamptz not null default clock_timestamp(),
  consumer_id   integer not null,
  constraint inbox_timed_pkey primary key (consumer_id, message_id)
) partition by range (message_id);
comment on table oncebox.inbox_timed is 'messages with a timed id whose effects are committed, or which wait or are dead';
comment on column oncebox.inbox_timed.message_id is 'identity of the message: UUID v7';
comment on column oncebox.inbox_timed.content_hash is 'first 16 bytes of SHA-256 of the content: the same id with another one is an alarm';
comment on column oncebox.inbox_timed.received_at is 'when it was admitted';
comment on column oncebox.inbox_timed.consumer_id is 'consumer';
comment on index oncebox.inbox_timed_pkey is 'serves every decision whether a message is new';

create table oncebox.inbox_untimed (
  message_id    uuid not null,
  content_hash  uuid not null,
  received_at   timestamptz not null default clock_timestamp(),
  consumer_id   integer not null,
  constraint inbox_untimed_pkey primary key (consumer_id, message_id)
) with (autovacuum_vacuum_threshold = 5000, autovacuum_vacuum_insert_threshold = 5000, autovacuum_analyze_threshold = 5000, vacuum_truncate = off);
-- The purge reads what was received first; ids without time cannot go with a partition. Rows come in its order, so that an
-- insert writes its last page only.
create index inbox_untimed_received_at on oncebox.inbox_untimed (consumer_id, received_at, message_id);
comment on table oncebox.inbox_untimed is 'messages with an id that carries no time whose effects are committed, or which wait or are dead';
comment on column oncebox.inbox_untimed.message_id is 'identity of the message: a UUID other than v7, or SHA-256 of source and id stamped version 8';
comment on column oncebox.inbox_untimed.content_hash is 'first 16 bytes of SHA-256 of the content: the same id with another one is an alarm';
comment on column oncebox.inbox_untimed.received_at is 'when it was admitted';
comment on column oncebox.inbox_untimed.consumer_id is 'consumer';
comment on index oncebox.inbox_untimed_pkey is 'serves every decision whether a message is new';
comment on index oncebox.inbox_untimed_received_at is 'serves the purge: what a consumer received first';

create view oncebox.inbox as
  select consumer_id, message_id, content_hash, received_at from oncebox.inbox_timed
  union all
  select consumer_id, message_id, content_hash, received_at from oncebox.inbox_untimed;
comment on view oncebox.inbox is 'all inbox rows';
comment on column oncebox.inbox.consumer_id is 'consumer';
comment on column oncebox.inbox.message_id is 'identity of the message';
comment on column oncebox.inbox.content_hash is 'first 16 bytes of SHA-256 of the content';
comment on column oncebox.inbox.received_at is 'when it was admitted';

-- The lowest UUID v7 of a moment: a bound between partitions.
create function oncebox.uuid_bound(at timestamptz) returns uuid
language sql immutable strict parallel safe as $$
  select encode(substring(int8send(floor(extract(epoch from at) * 1000)::bigint) from 3) || '\x00000000000000000000'::bytea, 'hex')::uuid
$$;
comment on function oncebox.uuid_bound(timestamptz) is 'the lowest id of that moment: a bound between inbox partitions';

-- As oncebox.attach_outbox_range, but with a CHECK: a separate table, then ATTACH (R8).
create function oncebox.attach_inbox_range(range_from timestamptz, range_to timestamptz) returns text
language plpgsql volatile set search_path = oncebox, pg_temp as $$
declare
  id_from uuid := oncebox.uuid_bound(range_from);
  id_to uuid := oncebox.uuid_bound(range_to);
  made text := format('inbox_timed_p%s', to_char(range_from at time zone 'UTC', 'YYYYMMDDHH24MISS'));
begin
  execute format('create table oncebox.%I (like oncebox.inbox_timed including defaults including constraints including indexes including storage) with (autovacuum_vacuum_threshold = 5000, autovacuum_analyze_threshold = 5000)', made);
  execute format('alter table oncebox.%I add constraint %I check (message_id >= %L and message_id < %L)', made, made || '_range', id_from, id_to);
  execute format('comment on table oncebox.%I is %L', made, format('inbox ids from %s to before %s', range_from at time zone 'UTC', range_to at time zone 'UTC'));
  execute format('alter table oncebox.inbox_timed attach partition oncebox.%I for values from (%L) to (%L)', made, id_from, id_to);
  return made;
end
$$;
comment on function oncebox.attach_inbox_range(timestamptz, timestamptz) is 'makes an inbox partition for ids of that time span';

create table oncebox.inbox_timed_default (like oncebox.inbox_timed including defaults including constraints including indexes including storage)
  with (autovacuum_vacuum_threshold = 5000, autovacuum_analyze_threshold = 5000);
comment on table oncebox.inbox_timed_default is 'timed ids whose partition is gone or not yet made';
alter table oncebox.inbox_timed attach partition oncebox.inbox_timed_default default;
-- Nobody writes here yet, so the first ranges may begin in the past.
select oncebox.attach_inbox_range(day, day + interval '1 day')
  from generate_series(date_trunc('day', now() at time zone 'UTC') at time zone 'UTC' - interval '1 day',
                       date_trunc('day', now() at time zone 'UTC') at time zone 'UTC' + interval '8 days', interval '1 day') day;

-- Tries -----------------------------------------------------------------------------------------------------------------------

create table oncebox.attempt (
  consumer_id  integer not null,
  message_id   uuid not null,
  attempts     integer not null,
  history      jsonb not null default '[]',
  updated_at   timestamptz not null default clock_timestamp(),
  constraint attempt_pkey primary key (consumer_id, message_id),
  constraint attempt_counted check (attempts >= 0)
) with (autovacuum_vacuum_threshold = 5000, autovacuum_vacuum_insert_threshold = 5000, autovacuum_analyze_threshold = 5000, vacuum_truncate = off);
comment on table oncebox.attempt is 'tries of messages under suspicion, written in transactions of their own; gone with success';
comment on column oncebox.attempt.consumer_id is 'consumer';
comment on column oncebox.attempt.message_id is 'identity of the message';
comment on column oncebox.attempt.attempts is 'tries counted';
comment on column oncebox.attempt.history is 'array of {at, attempt, error}, oldest first';
comment on column oncebox.attempt.updated_at is 'last try';
comment on index oncebox.attempt_pkey is 'serves counting on suspicion: one message of a consumer';

create table oncebox.assignment (
  consumer_id  integer not null,
  topic        text not null,
  partition_no integer not null,
  state        text not null,
  owner        uuid,
  topic_id     text,
  next_offset  bigint,
  id_rule      text,
  changed_at   timestamptz not null default clock_timestamp(),
  constraint assignment_pkey primary key (consumer_id, topic, partition_no),
  constraint assignment_state check (state in ('open', 'closed'))
);
comment on table oncebox.assignment is 'partitions that a process handles, and up to where they are done: one found open did not end cleanly, so its first messages are under suspicion; one whose broker remembers more than this is read again from here';
comment on column oncebox.assignment.consumer_id is 'consumer';
comment on column oncebox.assignment.topic is 'topic';
comment on column oncebox.assignment.partition_no is 'partition';
comment on column oncebox.assignment.state is 'open at assignment, closed at a clean end';
comment on column oncebox.assignment.owner is 'token of the assignment that holds it; none after a clean end';
comment on column oncebox.assignment.topic_id is 'which topic of this name it was, where the broker tells: one made anew has another';
comment on column oncebox.assignment.next_offset is 'everything before this offset is done; written soon after, never before';
comment on column oncebox.assignment.id_rule is 'the id rule of the consumer when next_offset was written: offsets of a topic made anew are no new ids under the same rule by coordinates';
comment on column oncebox.assignment.changed_at is 'when the row was last written';
comment on index oncebox.assignment_pkey is 'serves assignment and clean end: one partition of a consumer';

-- Waiting and dead ------------------------------------------------------------------------------------------------------------

create table oncebox.waiting (
  sequence      bigint not null generated always as identity primary key,
  consumer_id   integer not null,
  lane_id       uuid,
  state         text not null,
  due_at        timestamptz,
  lease         uuid,
  holds         boolean not null default false,
  attempts      integer not null default 0,
  reason        text,
  error         text,
  history       jsonb not null default '[]',
  message_id    uuid not null,
  content_hash  uuid not null,
  id_text       text not null,
  topic         text not null,
  key           bytea,
  kind          text not null,
  header_names  text[] not null default '{}',
  header_values bytea[] not null default '{}',
  payload       bytea not null,
  tombstone     boolean not null default false,
  content_type  text,
  source        text not null,
  message_time  timestamptz,
  traceparent   text,
  tracestate    text,
  place         text not null,
  partition_no  integer not null,
  offset_no     bigint not null,
  stored_at     timestamptz not null default clock_timestamp(),
  dead_at       timestamptz,
  constraint waiting_state check (state in ('waiting', 'dead')),
  constraint waiting_dead check ((state = 'dead') = (reason is not null) and (state = 'dead') = (dead_at is not null)
    and (state = 'waiting' or due_at is null)),
  constraint waiting_holds check (not holds or (state = 'dead' and lane_id is not null)),
  constraint waiting_lease check (lease is null or due_at is not null),
  constraint waiting_behind check (state = 'dead' or due_at is not null or lane_id is not null),
  constraint waiting_lane check (lane_id is null or key is not null),
  constraint waiting_headers check (cardinality(header_names) = cardinality(header_values)),
  constraint waiting_attempts check (attempts >= 0)
) with (autovacuum_vacuum_threshold = 5000, autovacuum_vacuum_insert_threshold = 5000, autovacuum_analyze_threshold = 5000, vacuum_truncate = off);
create index waiting_due on oncebox.waiting (consumer_id, due_at) where due_at is not null;
create index waiting_lane on oncebox.waiting (consumer_id, lane_id, sequence) where state = 'waiting' or holds;
create index waiting_first on oncebox.waiting (consumer_id, sequence) where state = 'waiting';
create unique index waiting_dead_once on oncebox.waiting (consumer_id, message_id, content_hash) where state = 'dead';
create index waiting_dead on oncebox.waiting (sequence) where state = 'dead';
create index waiting_message_id on oncebox.waiting (message_id);
comment on table oncebox.waiting is 'messages that wait for a retry, or behind one of their key, and dead ones';
comment on column oncebox.waiting.sequence is 'order within a key';
comment on column oncebox.waiting.consumer_id is 'consumer';
comment on column oncebox.waiting.lane_id is '16 bytes that stand for (topic, key); null: no key, no order';
comment on column oncebox.waiting.state is 'waiting or dead';
comment on column oncebox.waiting.due_at is 'a head is tried from then on, and a lease ends then; null: stands behind another one, or is dead (R25)';
comment on column oncebox.waiting.lease is 'token of the process that tries it now; ends at due_at';
comment on column oncebox.waiting.holds is 'dead, and later messages of its key wait behind it (policy hold)';
comment on column oncebox.waiting.attempts is 'tries counted';
comment on column oncebox.waiting.reason is 'why it is dead';
comment on column oncebox.waiting.error is 'what the last try said';
comment on column oncebox.waiting.history is 'array of {at, attempt, error}, oldest first';
comment on column oncebox.waiting.message_id is 'identity of the message';
comment on column oncebox.waiting.content_hash is 'as in the inbox';
comment on column oncebox.waiting.id_text is 'the id as it stood in the message';
comment on column oncebox.waiting.topic is 'topic';
comment on column oncebox.waiting.key is 'key, any bytes';
comment on column oncebox.waiting.kind is 'kind; empty where the message has none';
comment on column oncebox.waiting.header_names is 'names of headers, in order';
comment on column oncebox.waiting.header_values is 'values of headers, in the same order';
comment on column oncebox.waiting.payload is 'bytes';
comment on column oncebox.waiting.tombstone is 'a Kafka record with a null value';
comment on column oncebox.waiting.content_type is 'content type';
comment on column oncebox.waiting.source is 'source';
comment on column oncebox.waiting.message_time is 'when it was enqueued, or the record time of the broker';
comment on column oncebox.waiting.traceparent is 'W3C trace context';
comment on column oncebox.waiting.tracestate is 'W3C trace context, state of vendors';
comment on column oncebox.waiting.place is 'topic or queue it was delivered from';
comment on column oncebox.waiting.partition_no is 'partition; 0 on RabbitMQ';
comment on column oncebox.waiting.offset_no is 'offset; delivery tag on RabbitMQ';
comment on column oncebox.waiting.stored_at is 'when it was stored';
comment on column oncebox.waiting.dead_at is 'when it became dead';
comment on index oncebox.waiting_pkey is 'serves finish, postpone, bury: one row by its number';
comment on index oncebox.waiting_due is 'serves leasing due heads, and when the next one is due; rows behind have no due time and are not in it';
comment on index oncebox.waiting_lane is 'serves which keys are blocked, whether a row is a head, the next of a key, and the sweep (loose scan)';
comment on index oncebox.waiting_first is 'serves dead list, the age of the oldest waiting message, and counts';
comment on index oncebox.waiting_dead_once is 'serves a dead delivery that comes again: it is the same one';
comment on index oncebox.waiting_dead is 'serves dead list, oldest first';
comment on index oncebox.waiting_message_id is 'serves explain and dead show: rows by message id';

-- E-mails and acts ------------------------------------------------------------------------------------------------------------

create table oncebox.email (
  email_id    bigint not null generated always as identity primary key,
  unique_key  text not null,
  recipient   text not null,
  subject     text not null,
  body        text not null,
  state       text not null default 'pending',
  attempts    integer not null default 0,
  possibly_sent integer not null default 0,
  due_at      timestamptz default clock_timestamp(),
  lease       uuid,
  error       text,
  created_at  timestamptz not null default clock_timestamp(),
  settled_at  timestamptz,
  has_content boolean not null default true,
  constraint email_unique_key unique (unique_key),
  constraint email_state check (state in ('pending', 'sent', 'failed')),
  constraint email_settled check ((state = 'pending') = (settled_at is null) and (state = 'pending') = (due_at is not null)),
  constraint email_lease check (lease is null or state = 'pending')
) with (autovacuum_vacuum_threshold = 5000, autovacuum_vacuum_insert_threshold = 5000, autovacuum_analyze_threshold = 5000, vacuum_truncate = off);
create index email_due on oncebox.email (due_at) where state = 'pending';
create index email_settled on oncebox.email (has_content, settled_at) where state <> 'pending';
comment on table oncebox.email is 'e-mails, one row per effect, sent by a sender process';
comment on column oncebox.email.email_id is 'number of the row';
comment on column oncebox.email.unique_key is 'one row per effect; the Message-ID is made from it';
comment on column oncebox.email.recipient is 'recipient address';
comment on column oncebox.email.subject is 'subject line';
comment on column oncebox.email.body is 'plain text body';
comment on column oncebox.email.state is 'pending, sent, or failed: refused for good';
comment on column oncebox.email.attempts is 'tries counted';
comment on column oncebox.email.possibly_sent is 'tries that may each have arrived: their answer was lost, or their sender died';
comment on column oncebox.email.due_at is 'tried from then on, and a lease ends then; null once settled';
comment on column oncebox.email.lease is 'token of the sender that tries it now';
comment on column oncebox.email.error is 'what the server last said';
comment on column oncebox.email.created_at is 'when it was queued';
comment on column oncebox.email.settled_at is 'when it was sent or failed';
comment on column oncebox.email.has_content is 'false: its time is over, and recipient, subject, body and error are blank';
comment on index oncebox.email_pkey is 'serves settling: one row by its number';
comment on index oncebox.email_unique_key is 'serves queueing: one row per effect';
comment on index oncebox.email_due is 'serves leasing due e-mails, and how many are pending';
comment on index oncebox.email_settled is 'serves blanking, and then deleting, what was settled first';

create table oncebox.audit (
  audit_id    bigint not null generated always as identity primary key,
  at          timestamptz not null default clock_timestamp(),
  actor       text not null,
  act         text not null,
  reason      text not null,
  number      text not null,
  message_id  uuid not null,
  topic       text not null,
  detail      jsonb not null default '{}',
  constraint audit_act check (act in ('redrive', 'redrive-as', 'discard'))
);
create index audit_message_id on oncebox.audit (message_id);
comment on table oncebox.audit is 'what operators did with dead messages';
comment on column oncebox.audit.audit_id is 'number of the row';
comment on column oncebox.audit.at is 'when';
comment on column oncebox.audit.actor is 'who';
comment on column oncebox.audit.act is 'redrive, redrive-as (a new id), discard';
comment on column oncebox.audit.reason is 'why';
comment on column oncebox.audit.number is 'the number that dead list showed: o and a position, or c and a consumer row';
comment on column oncebox.audit.message_id is 'the message';
comment on column oncebox.audit.topic is 'its topic';
comment on column oncebox.audit.detail is 'what else the act was given';
comment on index oncebox.audit_pkey is 'serves the list of acts, newest first';
comment on index oncebox.audit_message_id is 'serves explain: acts by message id';

-- Batches ---------------------------------------------------------------------------------------------------------------------

-- Which of some timed ids have a row. They come sorted. The bounds leave out partitions, and the plan is made for them each time: a
-- plan for all values would lock each partition and its index, in every batch, and there are more of them every day where no row is
-- ever purged. That would fill the server's table of locks. Each id is one index lookup.
create function oncebox.timed_rows(consumer integer, ids uuid[]) returns table (message_id uuid, content_hash uuid)
language plpgsql volatile set plan_cache_mode = force_custom_plan set enable_seqscan = off set search_path = pg_catalog, pg_temp as $$
declare
  lowest uuid := ids[1];
  highest uuid := ids[cardinality(ids)];
begin
  return query
    select i.message_id, i.content_hash from unnest(ids) g (id) cross join lateral (
      select t.message_id, t.content_hash from oncebox.inbox_timed t
       where t.consumer_id = consumer and t.message_id = g.id and t.message_id between lowest and highest limit 1) i;
end
$$;
comment on function oncebox.timed_rows(integer, uuid[]) is 'the inbox rows of some timed ids, which come sorted';

-- What every batch asks first, in one call: which ids are new, and what stands in their way. The insert is the first statement;
-- each later one sees what a transaction has committed for which the insert waited. Ids come sorted. No plan depends on the values,
-- so none is made for them; and each looks rows up by an index, also one that was made while the tables were empty.
create function oncebox.admit(consumer integer, timed uuid[], timed_hashes uuid[], untimed uuid[], untimed_hashes uuid[], lanes uuid[],
  out old_ids uuid[], out old_hashes uuid[], out blocked uuid[], out purged_until bigint, out began_at bigint, out id_skew bigint,
  out witness text)
language plpgsql volatile set plan_cache_mode = force_generic_plan set enable_seqscan = off set search_path = pg_catalog, pg_temp as $$
declare
  new_timed uuid[] := '{}';
  new_untimed uuid[] := '{}';
begin
  if cardinality(timed) > 0 then
    with new as (
      insert into oncebox.inbox_timed (message_id, content_hash, consumer_id)
      select g.id, g.hash, consumer from unnest(timed, timed_hashes) g (id, hash)
      on conflict do nothing returning message_id)
    select coalesce(array_agg(new.message_id), '{}') into new_timed from new;
  end if;
  if cardinality(untimed) > 0 then
    with new as (
      insert into oncebox.inbox_untimed (message_id, content_hash, consumer_id)
      select g.id, g.hash, consumer from unnest(untimed, untimed_hashes) g (id, hash)
      on conflict do nothing returning message_id)
    select coalesce(array_agg(new.message_id), '{}') into new_untimed from new;
  end if;
  if cardinality(new_timed) < cardinality(timed) then
    select array_agg(g.id), array_agg(i.content_hash) into old_ids, old_hashes
      from unnest(timed) g (id) left join oncebox.timed_rows(consumer, timed) i on i.message_id = g.id
     where g.id <> all (new_timed);
  end if;
  -- Each id is one index lookup: a plan for `= any` that was made while the table was empty, or without statistics, reads all of
  -- it when it is large.
  if cardinality(new_untimed) < cardinality(untimed) then
    select old_ids || array_agg(g.id), old_hashes || array_agg(i.content_hash) into old_ids, old_hashes
      from unnest(untimed) g (id) left join lateral (
        select u.content_hash from oncebox.inbox_untimed u where u.consumer_id = consumer and u.message_id = g.id limit 1) i on true
     where g.id <> all (new_untimed);
  end if;
  if cardinality(new_timed) + cardinality(new_untimed) > 0 then
    -- Each lane is one index lookup, however many rows it has. The `order by` is needed: without it the plan for a lane without
    -- rows reads the whole table. `now()` is when the transaction began, before any row of it was received.
    select case when (select w.sequence from oncebox.waiting w
                        where w.consumer_id = consumer and w.lane_id is not null and (w.state = 'waiting' or w.holds)
                        order by w.lane_id, w.sequence limit 1) is null then '{}' else
             array(select l.lane_id from unnest(lanes) l (lane_id)
                    cross join lateral (select 1 from oncebox.waiting w
                      where w.consumer_id = consumer and w.lane_id between l.lane_id and l.lane_id and (w.state = 'waiting' or w.holds)
                      order by w.lane_id limit 1) stands) end,
           (extract(epoch from c.purged_below) * 1000000)::bigint, (extract(epoch from now()) * 1000000)::bigint,
           (select l.value from oncebox.limits l where l.name = 'id_skew_seconds'),
           pg_current_xact_id() || ' ' || pg_backend_pid() || ' ' || (extract(epoch from pg_postmaster_start_time()) * 1000000)::bigint
      into blocked, purged_until, began_at, id_skew, witness
      from oncebox.consumer c where c.consumer_id = consumer;
  end if;
end
$$;
comment on function oncebox.admit(integer, uuid[], uuid[], uuid[], uuid[], uuid[]) is 'inserts the ids of a batch, and tells which were known and what is in the way of the rest';

-- A block takes no parameters, so the values stand in settings of the transaction, `oncebox.values_0` and so on. With
-- `array_nulls = off` a null in an array would come back as the text `NULL`. Without `set search_path`: the block is the team's.
create function oncebox.run_block(block text, given text[]) returns void
language plpgsql volatile as $$
begin
  perform pg_catalog.set_config('array_nulls', 'on', true);
  for number in 1 .. pg_catalog.cardinality(given) loop
    perform pg_catalog.set_config(pg_catalog.concat('oncebox.values_', number - 1), given[number], true);
  end loop;
  execute block;
end
$$;
comment on function oncebox.run_block(text, text[]) is 'hands values over to a DO block, and runs it';

-- A handler that commits would leave inbox rows without the rest of the batch. Every batch opens the cursor `oncebox_open` WITH HOLD
-- over `refuse_commit`: the server runs such a query at COMMIT, before anything is committed, so that COMMIT becomes a rollback.
-- A handler that closed all cursors has closed this one too; the proof then judges its transaction without the guard.
-- Both without `set search_path`, which would cost every batch: they look up nothing but a type.
create function oncebox.refuse_commit() returns void
language plpgsql volatile as $$
begin
  raise exception using errcode = '2D000', message = 'a handler must not commit: the transaction is the consumer''s, and nothing of it stays';
end
$$;
comment on function oncebox.refuse_commit() is 'makes a COMMIT a rollback, as the query of a held cursor';

create function oncebox.permit_commit() returns void
language plpgsql volatile as $$
declare
  ours pg_catalog.refcursor := 'oncebox_open';
begin
  close ours;
exception when invalid_cursor_name then
  null;
end
$$;
comment on function oncebox.permit_commit() is 'closes that cursor before the COMMIT of the consumer, where it is still open';

revoke execute on all functions in schema oncebox from public;
