-- Operations: which request was first used for what, in what state it is, who owns it, and what is answered (O1 to O29).

-- Claims and metadata ---------------------------------------------------------------------------------------------------------

create table oncebox.idempotency_request (
  key_digest         bytea not null,
  tenant             bytea not null,
  operation          bytea not null,
  key                bytea not null,
  principal          text not null,
  fingerprint        text not null,
  mode               text not null,
  state              text not null,
  epoch              bigint not null default 1,
  owner              uuid,
  lease_until        timestamptz,
  lease_seconds      double precision,
  generation         bigint not null default 1,
  operation_id       uuid not null,
  attempts           integer not null default 1,
  created_at         timestamptz not null default clock_timestamp(),
  updated_at         timestamptz not null default clock_timestamp(),
  outcome_at         timestamptz,
  expires_at         timestamptz,
  answer_status      integer,
  schema_version     bigint,
  body               text,
  body_expires_at    timestamptz,
  body_headers       bytea,
  body_bytes         bytea,
  body_format        integer,
  body_kid           text,
  kept_bytes         bigint,
  resource_kind      text,
  resource_id        text,
  resource_location  text,
  error_code         text,
  constraint idempotency_request_pkey primary key (key_digest)
) with (autovacuum_vacuum_threshold = 5000, autovacuum_vacuum_insert_threshold = 5000, autovacuum_analyze_threshold = 5000, vacuum_truncate = off);
-- Every statement that writes a row reads the text of its CHECK constraints anew, which took longer than all else it did; the body of
-- a function is read once a session, and its operators are set up once a transaction. So a trigger stands for them.
create function oncebox.is_sound_request(r oncebox.idempotency_request) returns boolean
language plpgsql immutable parallel safe as $$
begin
  return octet_length(r.key_digest) = 32 and least(r.epoch, r.generation, r.attempts) > 0
    and r.mode in ('same_tx', 'bridged', 'edge', 'phased')
    -- what it refers to
    and num_nonnulls(r.resource_kind, r.resource_id) in (0, 2) and (r.resource_kind is not null or r.resource_location is null)
    and case
      when r.state in ('IN_PROGRESS', 'UNKNOWN_REQUIRES_RECOVERY') then
        -- no outcome and no answer; a lease, where its owner is a process
        num_nonnulls(r.outcome_at, r.expires_at, r.error_code, r.answer_status, r.schema_version, r.body, r.body_expires_at, r.body_headers, r.body_bytes,
          r.body_format, r.body_kid, r.kept_bytes, r.resource_kind, r.resource_id, r.resource_location) = 0
        and num_nonnulls(r.owner, r.lease_until, r.lease_seconds) = case when r.state = 'IN_PROGRESS' and r.mode in ('bridged', 'edge') then 3 else 0 end
      else
        r.state in ('COMPLETED', 'FAILED_REPLAYABLE', 'FAILED_RETRYABLE')
        and num_nonnulls(r.owner, r.lease_until, r.lease_seconds) = 0 and coalesce(r.expires_at >= r.outcome_at, false)
        and (r.error_code is null or r.state <> 'COMPLETED')
        -- the answer
        and num_nonnulls(r.answer_status, r.schema_version, r.body) in (0, 3) and (r.body is not null or r.state = 'FAILED_RETRYABLE')
        and coalesce(r.body in ('kept', 'reference', 'oversize', 'stream', 'withheld', 'purged'), true)
        and (r.body is distinct from 'reference' or r.resource_kind is not null)
        -- its body
        and (r.body_expires_at is null) = (r.body is distinct from 'kept')
        and num_nonnulls(r.body_headers, r.body_bytes, r.body_format) in (0, 3) and (r.body_format is not null or r.body_kid is null)
        and (r.body_expires_at is not null or num_nonnulls(r.body_format, r.kept_bytes) = 0) and coalesce(r.kept_bytes >= 0, true)
    end;
end
$$;
comment on function oncebox.is_sound_request is 'whether the columns of a row of idempotency_request agree with each other';
-- Asked of every change, not of an insert: that is a claim, whose statements name no column of an outcome. Most changes are the answer of
-- door A, which is told at half the price; what is let through is sound by the function too.
create function oncebox.refuse_unsound_request() returns trigger
language plpgsql as $$
begin
  if new.state = 'COMPLETED' and new.mode = 'same_tx' and octet_length(new.key_digest) = 32
    and least(new.epoch, new.generation, new.attempts) > 0
    and num_nonnulls(new.owner, new.lease_until, new.lease_seconds, new.error_code) = 0
    and num_nonnulls(new.resource_kind, new.resource_id) in (0, 2) and (new.resource_kind is not null or new.resource_location is null)
    and num_nulls(new.outcome_at, new.expires_at, new.answer_status, new.schema_version, new.body_expires_at, new.body_headers,
      new.body_bytes, new.body_format) = 0
    and new.body = 'kept' and new.expires_at >= new.outcome_at and new.kept_bytes >= 0 then
    return new;
  end if;
  if not oncebox.is_sound_request(new) then
    raise exception 'oncebox: the columns of an idempotency record contradict each other'
      using errcode = 'check_violation', schema = 'oncebox', table = 'idempotency_request', constraint = 'idempotency_request_sound';
  end if;
  return new;
end
$$;
comment on function oncebox.refuse_unsound_request is 'refuses a change of a row of idempotency_request after which it is not sound';
create trigger idempotency_request_sound before update on oncebox.idempotency_request
  for each row execute function oncebox.refuse_unsound_request();
-- As a CHECK, also for the changes that a replica applies.
alter table oncebox.idempotency_request enable always trigger idempotency_request_sound;
create index idempotency_request_body on oncebox.idempotency_request (body_expires_at) where body_format is not null;
create index idempotency_request_kept on oncebox.idempotency_request (tenant, body_expires_at) include (kept_bytes)
  where kept_bytes is not null;
create index idempotency_request_operation on oncebox.idempotency_request (operation, outcome_at, state, mode, updated_at);
comment on table oncebox.idempotency_request is 'one row per (tenant, operation, key): claim, state, owner, and what is kept of the answer; the body has a life of its own, and beyond 2 KiB a table';
comment on column oncebox.idempotency_request.key_digest is 'SHA-256 of tenant, operation and key, each behind its length: the identity (O16)';
comment on column oncebox.idempotency_request.tenant is 'tenant from authentication, compared on read; empty: the public scope';
comment on column oncebox.idempotency_request.operation is 'name of the operation';
comment on column oncebox.idempotency_request.key is 'the Idempotency-Key, byte for byte';
comment on column oncebox.idempotency_request.principal is 'keyed hash of the principal of the first request: kid:hex (O20)';
comment on column oncebox.idempotency_request.fingerprint is 'hash of the command: version:kid:hex (O21)';
comment on column oncebox.idempotency_request.mode is 'who claimed it: same_tx, bridged, edge or phased; says what a claim without outcome means (O2)';
comment on column oncebox.idempotency_request.state is 'IN_PROGRESS, COMPLETED, FAILED_REPLAYABLE, FAILED_RETRYABLE or UNKNOWN_REQUIRES_RECOVERY; expiry is derived from expires_at';
comment on column oncebox.idempotency_request.epoch is 'raised by every change of owner; a write of an older one changes nothing';
comment on column oncebox.idempotency_request.owner is 'token of the process that runs it; null in modes same_tx (its transaction owns it) and phased (the operation row has the lease)';
comment on column oncebox.idempotency_request.lease_until is 'end of the lease, by the clock of the database';
comment on column oncebox.idempotency_request.lease_seconds is 'length of the lease; one that ends later than now plus this counts as over, for the clock went back';
comment on column oncebox.idempotency_request.generation is 'raised when the key is used anew after its time was over (O4)';
comment on column oncebox.idempotency_request.operation_id is 'identity of the run of this generation; every downstream identity is derived from it; no index: a record of phases is found by it through oncebox.operation, which has the digest';
comment on column oncebox.idempotency_request.attempts is 'how often this generation was begun';
comment on column oncebox.idempotency_request.created_at is 'when it was claimed first, or first since it last had an outcome';
comment on column oncebox.idempotency_request.updated_at is 'when it last changed';
comment on column oncebox.idempotency_request.outcome_at is 'when its outcome became known; every lifetime counts from here (O3)';
comment on column oncebox.idempotency_request.expires_at is 'when its answer is no longer promised; null while there is no outcome: such a row never expires';
comment on column oncebox.idempotency_request.answer_status is 'HTTP status, or the code of gRPC';
comment on column oncebox.idempotency_request.schema_version is 'version of the schema that the body was written in';
comment on column oncebox.idempotency_request.body is 'kept: here or in idempotency_body until body_expires_at; reference: the resource; oversize, stream, withheld, purged: not kept, and never made by a second run';
comment on column oncebox.idempotency_request.body_expires_at is 'until when the body is kept; after it, the body counts as purged';
comment on column oncebox.idempotency_request.body_headers is 'headers of an answer that is small, or kept for more than 32 days, as in idempotency_body: one read replays it';
comment on column oncebox.idempotency_request.body_bytes is 'bytes of such an answer';
comment on column oncebox.idempotency_request.body_format is 'how both are written; null: the body is in idempotency_body, or its life is over, or there is none';
comment on column oncebox.idempotency_request.body_kid is 'id of the key that encrypted it; null: not encrypted';
comment on column oncebox.idempotency_request.kept_bytes is 'how many bytes headers and body take, here or in idempotency_body, until body_expires_at; null: there are none, or they are gone';
comment on column oncebox.idempotency_request.resource_kind is 'kind of the resource that was made';
comment on column oncebox.idempotency_request.resource_id is 'its id';
comment on column oncebox.idempotency_request.resource_location is 'its URL';
comment on column oncebox.idempotency_request.error_code is 'code of the failure';
comment on index oncebox.idempotency_request_pkey is 'serves every claim, look and fenced write: the unique key is the arbiter';
comment on index oncebox.idempotency_request_body is 'serves the expiry of bodies in this row, oldest end first';
comment on index oncebox.idempotency_request_kept is 'serves quotas: what is kept for a tenant, from the index alone';
comment on index oncebox.idempotency_request_operation is 'serves the purge: one operation, oldest outcome first; and what has no outcome, which stands behind each operation: counts, lists, quotas of tenants, and what a sweep ends or asks for, the longest unchanged first';

-- Bodies of answers that are too large for the row of their claim, range-partitioned by the end of their life so that old ones go whole. Its own life: the claim, which stays
-- unique, cannot be partitioned by time. The DEFAULT partition takes bodies for whose end no range was made in time; those kept for more than 32 days are in the row of their claim.
create table oncebox.idempotency_body (
  key_digest  bytea not null,
  epoch       bigint not null,
  expires_at  timestamptz not null,
  headers     bytea not null,
  bytes       bytea not null,
  format      integer not null,
  kid         text,
  constraint idempotency_body_pkey primary key (key_digest, epoch, expires_at)
) partition by range (expires_at);
create index idempotency_body_expires_at on oncebox.idempotency_body (expires_at);
comment on table oncebox.idempotency_body is 'headers and bytes of stored answers beyond 2 KiB that are kept for up to 32 days, until their own end';
comment on column oncebox.idempotency_body.key_digest is 'as in idempotency_request';
comment on column oncebox.idempotency_body.epoch is 'epoch of the run that completed with it';
comment on column oncebox.idempotency_body.expires_at is 'end of its life: body_expires_at of the request';
comment on column oncebox.idempotency_body.headers is 'list of names and values, each behind its length in four bytes, in order; names may repeat';
comment on column oncebox.idempotency_body.bytes is 'the body: plain, compressed or encrypted, as format says';
comment on column oncebox.idempotency_body.format is 'how headers and bytes are written';
comment on column oncebox.idempotency_body.kid is 'id of the key that encrypted it; null: not encrypted';
comment on index oncebox.idempotency_body_pkey is 'serves the replay: the body of one completion, in one partition';
comment on index oncebox.idempotency_body_expires_at is 'serves the expiry of what stands in the DEFAULT partition';

-- As oncebox.attach_inbox_range: a separate table with a CHECK, then ATTACH (R8).
create function oncebox.attach_body_range(range_from timestamptz, range_to timestamptz) returns text
language plpgsql volatile set search_path = oncebox, pg_temp as $$
declare
  made text := format('idempotency_body_p%s', to_char(range_from at time zone 'UTC', 'YYYYMMDDHH24MISS'));
begin
  execute format('create table oncebox.%I (like oncebox.idempotency_body including defaults including constraints including indexes including storage) with (autovacuum_vacuum_threshold = 5000, autovacuum_analyze_threshold = 5000)', made);
  execute format('alter table oncebox.%I add constraint %I check (expires_at >= %L and expires_at < %L)', made, made || '_range', range_from, range_to);
  execute format('comment on table oncebox.%I is %L', made, format('bodies that end from %s to before %s', range_from at time zone 'UTC', range_to at time zone 'UTC'));
  execute format('alter table oncebox.idempotency_body attach partition oncebox.%I for values from (%L) to (%L)', made, range_from, range_to);
  return made;
end
$$;
comment on function oncebox.attach_body_range(timestamptz, timestamptz) is 'makes a partition for bodies whose life ends in that time span';

create table oncebox.idempotency_body_default (like oncebox.idempotency_body including defaults including constraints including indexes including storage)
  with (autovacuum_vacuum_threshold = 5000, autovacuum_analyze_threshold = 5000);
comment on table oncebox.idempotency_body_default is 'bodies for whose end no partition was made';
alter table oncebox.idempotency_body attach partition oncebox.idempotency_body_default default;
-- Nobody writes here yet, so the first ranges may begin in the past.
select oncebox.attach_body_range(day, day + interval '1 day')
  from generate_series(date_trunc('day', now() at time zone 'UTC') at time zone 'UTC' - interval '1 day',
                       date_trunc('day', now() at time zone 'UTC') at time zone 'UTC' + interval '34 days', interval '1 day') day;

create table oncebox.idempotency_purge (
  operation     bytea not null,
  purged_below  timestamptz not null,
  constraint idempotency_purge_pkey primary key (operation)
);
comment on table oncebox.idempotency_purge is 'how far records of an operation were purged: a key whose time lies below may have had one (O23)';
comment on column oncebox.idempotency_purge.operation is 'name of the operation';
comment on column oncebox.idempotency_purge.purged_below is 'bound of the purge; never lowered';
comment on index oncebox.idempotency_purge_pkey is 'serves every look: the bound of one operation';

-- Phased operations -----------------------------------------------------------------------------------------------------------

create table oncebox.operation (
  operation_id   uuid not null,
  key_digest     bytea not null,
  flow           text not null,
  flow_version   integer not null,
  point          text not null,
  state          text not null,
  command        bytea not null,
  command_kid    text,
  epoch          bigint not null default 1,
  owner          uuid,
  lease_until    timestamptz,
  lease_seconds  double precision,
  attempts       integer not null default 0,
  due_at         timestamptz,
  parked         text,
  created_at     timestamptz not null default clock_timestamp(),
  updated_at     timestamptz not null default clock_timestamp(),
  outcome_at     timestamptz,
  expires_at     timestamptz,
  constraint operation_pkey primary key (operation_id),
  constraint operation_digest check (octet_length(key_digest) = 32),
  constraint operation_state check
    (state in ('RECEIVED', 'LOCAL', 'OUTSTANDING', 'SETTLED', 'SUCCEEDED', 'FAILED', 'UNKNOWN')),
  constraint operation_lease check ((owner is null) = (lease_until is null) and (owner is null) = (lease_seconds is null)),
  constraint operation_outcome check
    ((outcome_at is not null) = (state in ('SUCCEEDED', 'FAILED')) and (outcome_at is null) = (expires_at is null)
     and (outcome_at is null or (owner is null and parked is null))),
  constraint operation_due check ((due_at is not null) = (outcome_at is null and parked is null)),
  constraint operation_parked check (parked is null or owner is null),
  constraint operation_counted check (epoch > 0 and attempts >= 0 and flow_version >= 0)
) with (autovacuum_vacuum_threshold = 5000, autovacuum_vacuum_insert_threshold = 5000, autovacuum_analyze_threshold = 5000, vacuum_truncate = off);
create index operation_due on oncebox.operation (flow, due_at) where due_at is not null;
create index operation_parked on oncebox.operation (updated_at) where parked is not null;
comment on table oncebox.operation is 'operations in phases: where each stands, who drives it, and the command to go on with; no provider is called inside a transaction';
comment on column oncebox.operation.operation_id is 'identity of the operation; provider keys and ids of messages are derived from it';
comment on column oncebox.operation.key_digest is 'the idempotency record that it answers';
comment on column oncebox.operation.flow is 'name of the operation, under which its phases are registered';
comment on column oncebox.operation.flow_version is 'version of its phases; a worker takes only versions that it has';
comment on column oncebox.operation.point is 'recovery point that was reached last';
comment on column oncebox.operation.state is 'stage of that point: RECEIVED, LOCAL, OUTSTANDING, SETTLED, SUCCEEDED, FAILED or UNKNOWN';
comment on column oncebox.operation.command is 'canonical bytes of the command, through the body cipher';
comment on column oncebox.operation.command_kid is 'id of the key that encrypted it; null: not encrypted';
comment on column oncebox.operation.epoch is 'raised by every change of owner; a phase of an older one changes nothing';
comment on column oncebox.operation.owner is 'token of the process that drives it; null: nobody';
comment on column oncebox.operation.lease_until is 'end of the lease, by the clock of the database';
comment on column oncebox.operation.lease_seconds is 'length of the lease; one that ends later than now plus this counts as over, for the clock went back';
comment on column oncebox.operation.attempts is 'recoveries counted; a provider that is away counts none';
comment on column oncebox.operation.due_at is 'recovery may take it from then on, when nobody holds the lease; null: it has its outcome, or is parked';
comment on column oncebox.operation.parked is 'why it waits for an operator; null: it does not';
comment on column oncebox.operation.created_at is 'when its first phase was committed';
comment on column oncebox.operation.updated_at is 'when it last changed';
comment on column oncebox.operation.outcome_at is 'when its outcome became known';
comment on column oncebox.operation.expires_at is 'as in idempotency_request';
comment on index oncebox.operation_pkey is 'serves phases, resources and resolve: one operation';
comment on index oncebox.operation_due is 'serves recovery: due operations of a flow';
comment on index oncebox.operation_parked is 'serves operations list: what waits for an operator, longest first';

create table oncebox.operation_phase (
  operation_id  uuid not null,
  epoch         bigint not null,
  began_at      timestamptz not null default clock_timestamp(),
  constraint operation_phase_pkey primary key (operation_id)
) with (autovacuum_vacuum_threshold = 5000, autovacuum_vacuum_insert_threshold = 5000, autovacuum_analyze_threshold = 5000, vacuum_truncate = off);
comment on table oncebox.operation_phase is 'marks: inserted when a later phase begins, deleted when it moves on, both in its own transaction; one that is seen is of a phase that somebody else committed, and it is not run again (O1)';
comment on column oncebox.operation_phase.operation_id is 'operation';
comment on column oncebox.operation_phase.epoch is 'epoch of who ran it';
comment on column oncebox.operation_phase.began_at is 'when it began';
comment on index oncebox.operation_phase_pkey is 'serves the beginning of a phase: a second run waits for the first one';

create table oncebox.operation_intent (
  operation_id     uuid not null,
  effect           text not null,
  strategy         text not null,
  provider_key     text not null,
  request          bytea not null,
  request_kid      text,
  adapter          text not null,
  adapter_version  integer not null,
  undoes           text,
  first_sent_at    timestamptz not null default clock_timestamp(),
  last_sent_at     timestamptz not null default clock_timestamp(),
  sends            integer not null default 1,
  outcome          text,
  settled_at       timestamptz,
  constraint operation_intent_pkey primary key (operation_id, effect),
  constraint operation_intent_provider_key unique (adapter, provider_key),
  constraint operation_intent_strategy check (strategy in ('key', 'query', 'key_and_query', 'none', 'repeatable')),
  constraint operation_intent_outcome check
    ((outcome is null or outcome in ('succeeded', 'failed')) and (outcome is null) = (settled_at is null)),
  constraint operation_intent_sends check (sends > 0 and last_sent_at >= first_sent_at)
) with (autovacuum_vacuum_threshold = 5000, autovacuum_vacuum_insert_threshold = 5000, autovacuum_analyze_threshold = 5000, vacuum_truncate = off);
comment on table oncebox.operation_intent is 'calls of outside providers, committed before the first send; the key of an effect never changes (O5, O7)';
comment on column oncebox.operation_intent.operation_id is 'operation';
comment on column oncebox.operation_intent.effect is 'name of the effect inside the operation';
comment on column oncebox.operation_intent.strategy is 'what may be done when no answer came: key, query, key_and_query, none or repeatable (O6)';
comment on column oncebox.operation_intent.provider_key is 'idempotency key for the provider, derived from the operation id';
comment on column oncebox.operation_intent.request is 'exact bytes of the request: every resend sends these';
comment on column oncebox.operation_intent.request_kid is 'id of the key that encrypted them; null: not encrypted';
comment on column oncebox.operation_intent.adapter is 'adapter of the provider';
comment on column oncebox.operation_intent.adapter_version is 'its version when the bytes were made';
comment on column oncebox.operation_intent.undoes is 'effect of the same operation that this one takes back; null: none';
comment on column oncebox.operation_intent.first_sent_at is 'when the first send was allowed; the provider window counts from here';
comment on column oncebox.operation_intent.last_sent_at is 'when the last send was allowed';
comment on column oncebox.operation_intent.sends is 'sends that were begun';
comment on column oncebox.operation_intent.outcome is 'what is proven: succeeded or failed; null: nothing';
comment on column oncebox.operation_intent.settled_at is 'when it was proven';
comment on index oncebox.operation_intent_pkey is 'serves phases and recovery: the intents of one operation';
comment on index oncebox.operation_intent_provider_key is 'serves the promise that no two effects share a key';

create table oncebox.operation_evidence (
  evidence_id   bigint not null generated always as identity,
  operation_id  uuid not null,
  effect        text not null,
  epoch         bigint not null,
  send          integer not null,
  kind          text not null,
  verdict       text not null,
  status        integer,
  bytes         bytea not null,
  bytes_kid     text,
  observed_at   timestamptz not null default clock_timestamp(),
  constraint operation_evidence_pkey primary key (evidence_id),
  constraint operation_evidence_kind check (kind in ('answer', 'query', 'error', 'operator', 'run')),
  constraint operation_evidence_verdict check (verdict in ('success', 'failure', 'refused', 'not-sent', 'waived', 'wait', 'mismatch', 'not-found', 'stored-error', 'indefinite'))
) with (autovacuum_vacuum_threshold = 5000, autovacuum_vacuum_insert_threshold = 5000, autovacuum_analyze_threshold = 5000, vacuum_truncate = off);
create index operation_evidence_operation_id on oncebox.operation_evidence (operation_id, evidence_id);
comment on table oncebox.operation_evidence is 'what was seen of providers and of runs that lost their lease; appended by anybody, never fenced, never changed (O8); of the answers that ask to wait, the last one';
comment on column oncebox.operation_evidence.evidence_id is 'order of arrival';
comment on column oncebox.operation_evidence.operation_id is 'operation';
comment on column oncebox.operation_evidence.effect is 'effect inside the operation; empty: the run itself';
comment on column oncebox.operation_evidence.epoch is 'epoch of who saw it, perhaps no longer the owner';
comment on column oncebox.operation_evidence.send is 'which send it answers; 0: none';
comment on column oncebox.operation_evidence.kind is 'answer, query, error, operator, or run: the result of a handler that lost its lease';
comment on column oncebox.operation_evidence.verdict is 'what it proves by O7: success, failure, not-sent; mismatch: it happened otherwise; refused: a failure if nothing else was sent; waived: an operator lets it be repeated; wait, not-found, stored-error, indefinite: nothing';
comment on column oncebox.operation_evidence.status is 'status of the provider';
comment on column oncebox.operation_evidence.bytes is 'what was seen';
comment on column oncebox.operation_evidence.bytes_kid is 'id of the key that encrypted them; null: not encrypted';
comment on column oncebox.operation_evidence.observed_at is 'when it was stored';
comment on index oncebox.operation_evidence_pkey is 'serves evidence in order of arrival';
comment on index oncebox.operation_evidence_operation_id is 'serves recovery and resolve: the evidence of one operation';

create table oncebox.deployment (
  only_row       boolean not null default true,
  deployment_id  uuid not null,
  created_at     timestamptz not null default clock_timestamp(),
  constraint deployment_pkey primary key (only_row),
  constraint deployment_only_row check (only_row)
);
comment on table oncebox.deployment is 'which deployment this database belongs to; nothing is sent to providers where the configuration names another: a copy must not charge (O22)';
comment on column oncebox.deployment.only_row is 'always true: there is one row';
comment on column oncebox.deployment.deployment_id is 'id that stands in the configuration too';
comment on column oncebox.deployment.created_at is 'when it was made';
comment on index oncebox.deployment_pkey is 'serves the check before sending: the only row';
insert into oncebox.deployment (deployment_id) values (gen_random_uuid());

create table oncebox.operation_process (
  process_id     uuid not null,
  operation      bytea not null,
  oldest         bigint not null,
  newest         bigint not null,
  write_version  bigint not null,
  kids           text not null,
  write_kid      text not null,
  seen_at        timestamptz not null default clock_timestamp(),
  constraint operation_process_pkey primary key (process_id, operation),
  constraint operation_process_versions check (oldest >= 0 and write_version between oldest and newest)
);
comment on table oncebox.operation_process is 'which fingerprints each live process of a service reads and writes, for doctor (O21)';
comment on column oncebox.operation_process.process_id is 'id that the process drew when it started';
comment on column oncebox.operation_process.operation is 'name of the operation';
comment on column oncebox.operation_process.oldest is 'oldest version that it can compute';
comment on column oncebox.operation_process.newest is 'newest version that it can compute';
comment on column oncebox.operation_process.write_version is 'version that it writes';
comment on column oncebox.operation_process.kids is 'key ids that it has, with commas between them';
comment on column oncebox.operation_process.write_kid is 'key id that it writes with';
comment on column oncebox.operation_process.seen_at is 'when it said so last; after a day it is forgotten';
comment on index oncebox.operation_process_pkey is 'serves what a process says again';

-- What operators do with keys and operations.
alter table oncebox.audit drop constraint audit_act;
alter table oncebox.audit add constraint audit_act check (act in ('redrive', 'redrive-as', 'discard', 'mend-sequence', 'release', 'purge', 'retry', 'resolve', 'judge', 'forget', 'bury'));
comment on table oncebox.audit is 'what operators did with dead messages, keys, operations and the sequence of positions';
comment on column oncebox.audit.act is 'redrive, redrive-as (a new id), bury, discard; mend-sequence; of keys and operations: release, purge, retry, resolve, judge; of a consumer: forget';
comment on column oncebox.audit.number is 'the number that dead list showed: o and a position, or c and a consumer row; of a key the hexadecimal digits of its digest; the name of the sequence';
comment on column oncebox.audit.message_id is 'the message, or the operation; zeros where a sequence was mended';
comment on column oncebox.audit.topic is 'its topic, or the name of the operation; empty where a sequence was mended';

revoke execute on all functions in schema oncebox from public;
-- It runs as whoever writes the row, and looks at nothing but what it is given.
grant execute on function oncebox.is_sound_request to public;
