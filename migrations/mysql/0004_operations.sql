-- Operations: which request was first used for what, in what state it is, who owns it, and what is answered.
--
-- Every statement can be run twice, as in the first migration. What is compared is binary.

set session sql_mode = 'STRICT_ALL_TABLES,ERROR_FOR_DIVISION_BY_ZERO,NO_ENGINE_SUBSTITUTION';
set names utf8mb4;

create table if not exists oncebox_idempotency_request (
  key_digest        binary(32)      not null comment 'SHA-256 of tenant, operation and key, each behind its length: the identity',
  tenant            varbinary(255)  not null comment 'tenant from authentication, compared on read; empty: the public scope',
  operation         varbinary(128)  not null comment 'name of the operation',
  `key`             varbinary(255)  not null comment 'the Idempotency-Key, byte for byte',
  principal         varchar(160) character set ascii collate ascii_bin not null comment 'keyed hash of the principal of the first request: kid:hex',
  fingerprint       varchar(176) character set ascii collate ascii_bin not null comment 'hash of the command: version:kid:hex',
  mode              varchar(16) character set ascii collate ascii_bin not null comment 'who claimed it: same_tx, bridged, edge or phased; says what a claim without outcome means',
  state             varchar(32) character set ascii collate ascii_bin not null comment 'IN_PROGRESS, COMPLETED, FAILED_REPLAYABLE, FAILED_RETRYABLE or UNKNOWN_REQUIRES_RECOVERY; expiry is derived from expires_at',
  epoch             bigint          not null comment 'raised by every change of owner; a write of an older one changes nothing',
  owner             binary(16)      null     comment 'token of the process that runs it; null in modes same_tx (its transaction owns it) and phased (the operation row has the lease)',
  lease_until       datetime(6)     null     comment 'end of the lease, UTC by the clock of the database',
  lease_seconds     double          null     comment 'length of the lease; one that ends later than now plus this counts as over, for the clock went back',
  generation        bigint          not null comment 'raised when the key is used anew after its time was over',
  operation_id      binary(16)      not null comment 'identity of the run of this generation; every downstream identity is derived from it',
  attempts          int             not null comment 'how often this generation was begun',
  created_at        datetime(6)     not null comment 'when it was claimed first, or first since it last had an outcome, UTC',
  updated_at        datetime(6)     not null comment 'when it last changed, UTC',
  outcome_at        datetime(6)     null     comment 'when its outcome became known, UTC; every lifetime counts from here',
  expires_at        datetime(6)     null     comment 'when its answer is no longer promised, UTC; null while there is no outcome: such a row never expires',
  answer_status     int             null     comment 'HTTP status, or the code of gRPC',
  schema_version    bigint          null     comment 'version of the schema that the body was written in',
  body              varchar(16) character set ascii collate ascii_bin null comment 'kept: here or in oncebox_idempotency_body until body_expires_at; reference: the resource; oversize, stream, withheld, purged: not kept, and never made by a second run',
  body_expires_at   datetime(6)     null     comment 'until when the body is kept, UTC; after it, the body counts as purged',
  body_headers      blob            null     comment 'headers of a small answer, as in oncebox_idempotency_body: one read replays it',
  body_bytes        blob            null     comment 'bytes of a small answer',
  body_format       int             null     comment 'how both are written; null: the body is in oncebox_idempotency_body, or its life is over, or there is none',
  body_kid          varchar(64) character set ascii collate ascii_bin null comment 'id of the key that encrypted it; null: not encrypted',
  kept_bytes        bigint          null     comment 'how many bytes headers and body take, here or in oncebox_idempotency_body, until body_expires_at; null: there are none, or they are gone',
  resource_kind     text character set utf8mb4 collate utf8mb4_bin null comment 'kind of the resource that was made',
  resource_id       text character set utf8mb4 collate utf8mb4_bin null comment 'its id',
  resource_location text character set utf8mb4 collate utf8mb4_bin null comment 'its URL',
  error_code        varchar(128) character set ascii collate ascii_bin null comment 'code of the failure',
  body_end          datetime(6)     as (if(body_format is null, null, body_expires_at)) stored comment 'body_expires_at while the body stands here: keeps the index below small',
  open_since        datetime(6)     as (if(outcome_at is null, created_at, null)) stored comment 'created_at while there is no outcome: keeps the index below small',
  primary key (key_digest) comment 'serves: every claim, look and fenced write; the unique key is the arbiter',
  unique key idempotency_request_operation_id (operation_id) comment 'serves: operation resources and resolve',
  key idempotency_request_open (open_since, state, tenant, body_expires_at, kept_bytes) comment 'serves: counts and the oldest of what has no outcome; quotas of tenants: what is open, and what is kept of what has its outcome',
  key idempotency_request_body (body_end) comment 'serves: the expiry of small bodies, oldest end first',
  key idempotency_request_purge (operation, outcome_at, state, mode, updated_at) comment 'serves: the purge, one operation, oldest outcome first; what a sweep ends or asks for, the longest unchanged first',
  constraint oncebox_idempotency_request_mode check (mode in ('same_tx', 'bridged', 'edge', 'phased')),
  constraint oncebox_idempotency_request_state check
    (state in ('IN_PROGRESS', 'COMPLETED', 'FAILED_REPLAYABLE', 'FAILED_RETRYABLE', 'UNKNOWN_REQUIRES_RECOVERY')),
  constraint oncebox_idempotency_request_lease check ((owner is null) = (lease_until is null) and (owner is null) = (lease_seconds is null)),
  constraint oncebox_idempotency_request_owned check ((owner is not null) = (state = 'IN_PROGRESS' and mode in ('bridged', 'edge'))),
  constraint oncebox_idempotency_request_outcome check
    ((outcome_at is not null) = (state in ('COMPLETED', 'FAILED_REPLAYABLE', 'FAILED_RETRYABLE'))
     and (outcome_at is null) = (expires_at is null) and (outcome_at is null or expires_at >= outcome_at)),
  constraint oncebox_idempotency_request_answer check
    ((answer_status is null) = (schema_version is null) and (answer_status is null) = (body is null)
     and (answer_status is null or outcome_at is not null)
     and (answer_status is not null or state not in ('COMPLETED', 'FAILED_REPLAYABLE'))),
  constraint oncebox_idempotency_request_body check
    ((body is null or body in ('kept', 'reference', 'oversize', 'stream', 'withheld', 'purged'))
     and (body <=> 'kept') = (body_expires_at is not null)
     and (body_format is null) = (body_headers is null) and (body_format is null) = (body_bytes is null)
     and (body_format is not null or body_kid is null) and (body_format is null or body_expires_at is not null)
     and (kept_bytes is null or kept_bytes >= 0 and body_expires_at is not null)),
  constraint oncebox_idempotency_request_resource check
    ((resource_kind is null) = (resource_id is null) and (resource_kind is not null or resource_location is null)
     and (not body <=> 'reference' or resource_kind is not null)),
  constraint oncebox_idempotency_request_error check (error_code is null or state in ('FAILED_REPLAYABLE', 'FAILED_RETRYABLE')),
  constraint oncebox_idempotency_request_counted check (epoch > 0 and generation > 0 and attempts > 0)
) engine = InnoDB default charset = utf8mb4
  comment = 'oncebox: one row per (tenant, operation, key): claim, state, owner, and what is kept of the answer';

create table if not exists oncebox_idempotency_body (
  key_digest binary(32)   not null comment 'as in oncebox_idempotency_request',
  epoch      bigint       not null comment 'epoch of the run that completed with it',
  expires_at datetime(6)  not null comment 'end of its life, UTC: body_expires_at of the request',
  headers    mediumblob   not null comment 'list of names and values, each behind its length in four bytes, in order; names may repeat',
  bytes      longblob     not null comment 'the body: plain, compressed or encrypted, as format says',
  format     int          not null comment 'how headers and bytes are written',
  kid        varchar(64) character set ascii collate ascii_bin null comment 'id of the key that encrypted it; null: not encrypted',
  primary key (key_digest, epoch) comment 'serves: the replay, the body of one completion',
  key idempotency_body_expires_at (expires_at) comment 'serves: the expiry, oldest end first'
) engine = InnoDB default charset = utf8mb4 comment = 'oncebox: headers and bytes of stored answers beyond 2 KiB, until their own end';

create table if not exists oncebox_idempotency_purge (
  operation    varbinary(128) not null comment 'name of the operation',
  purged_below datetime(6)    not null comment 'a key whose time lies below may have had a record that was purged, UTC; never lowered',
  primary key (operation) comment 'serves: every look, the bound of one operation'
) engine = InnoDB default charset = utf8mb4 comment = 'oncebox: how far records of an operation were purged';

create table if not exists oncebox_operation (
  operation_id  binary(16)     not null comment 'identity of the operation; provider keys and ids of messages are derived from it',
  key_digest    binary(32)     not null comment 'the idempotency record that it answers',
  flow          varbinary(128) not null comment 'name of the operation, under which its phases are registered',
  flow_version  int            not null comment 'version of its phases; a worker takes only versions that it has',
  point         varbinary(128) not null comment 'recovery point that was reached last',
  state         varchar(16) character set ascii collate ascii_bin not null comment 'stage of that point: RECEIVED, LOCAL, OUTSTANDING, SETTLED, SUCCEEDED, FAILED or UNKNOWN',
  command       longblob       not null comment 'canonical bytes of the command, through the body cipher',
  command_kid   varchar(64) character set ascii collate ascii_bin null comment 'id of the key that encrypted it; null: not encrypted',
  epoch         bigint         not null comment 'raised by every change of owner; a phase of an older one changes nothing',
  owner         binary(16)     null     comment 'token of the process that drives it; null: nobody',
  lease_until   datetime(6)    null     comment 'end of the lease, UTC by the clock of the database',
  lease_seconds double         null     comment 'length of the lease; one that ends later than now plus this counts as over, for the clock went back',
  attempts      int            not null comment 'recoveries counted; a provider that is away counts none',
  due_at        datetime(6)    null     comment 'recovery may take it from then on, UTC, when nobody holds the lease; null: it has its outcome, or is parked',
  parked        text character set utf8mb4 collate utf8mb4_bin null comment 'why it waits for an operator; null: it does not',
  created_at    datetime(6)    not null comment 'when its first phase was committed, UTC',
  updated_at    datetime(6)    not null comment 'when it last changed, UTC',
  outcome_at    datetime(6)    null     comment 'when its outcome became known, UTC',
  expires_at    datetime(6)    null     comment 'as in oncebox_idempotency_request',
  primary key (operation_id) comment 'serves: phases, resources and resolve',
  key operation_due (flow, due_at) comment 'serves: recovery, due operations of a flow',
  constraint oncebox_operation_state check
    (state in ('RECEIVED', 'LOCAL', 'OUTSTANDING', 'SETTLED', 'SUCCEEDED', 'FAILED', 'UNKNOWN')),
  constraint oncebox_operation_lease check ((owner is null) = (lease_until is null) and (owner is null) = (lease_seconds is null)),
  constraint oncebox_operation_outcome check
    ((outcome_at is not null) = (state in ('SUCCEEDED', 'FAILED')) and (outcome_at is null) = (expires_at is null)
     and (outcome_at is null or (owner is null and parked is null))),
  constraint oncebox_operation_is_due check ((due_at is not null) = (outcome_at is null and parked is null)),
  constraint oncebox_operation_is_parked check (parked is null or owner is null),
  constraint oncebox_operation_counted check (epoch > 0 and attempts >= 0 and flow_version >= 0)
) engine = InnoDB default charset = utf8mb4
  comment = 'oncebox: operations in phases: where each stands, who drives it, and the command to go on with';

create table if not exists oncebox_operation_phase (
  operation_id binary(16)  not null comment 'operation',
  epoch        bigint      not null comment 'epoch of who ran it',
  began_at     datetime(6) not null comment 'when it began, UTC',
  primary key (operation_id) comment 'serves: the beginning of a phase, a second run waits for the first one'
) engine = InnoDB default charset = utf8mb4
  comment = 'oncebox: marks, inserted when a later phase begins, deleted when it moves on, both in its own transaction; one that is seen is of a phase that somebody else committed, and it is not run again';

create table if not exists oncebox_operation_intent (
  operation_id    binary(16)     not null comment 'operation',
  effect          varbinary(128) not null comment 'name of the effect inside the operation',
  strategy        varchar(16) character set ascii collate ascii_bin not null comment 'what may be done when no answer came: key, query, key_and_query, none or repeatable',
  provider_key    varbinary(255) not null comment 'idempotency key for the provider, derived from the operation id',
  request         longblob       not null comment 'exact bytes of the request: every resend sends these',
  request_kid     varchar(64) character set ascii collate ascii_bin null comment 'id of the key that encrypted them; null: not encrypted',
  adapter         varbinary(128) not null comment 'adapter of the provider',
  adapter_version int            not null comment 'its version when the bytes were made',
  undoes          varbinary(128) null     comment 'effect of the same operation that this one takes back; null: none',
  first_sent_at   datetime(6)    not null comment 'when the first send was allowed, UTC; the provider window counts from here',
  last_sent_at    datetime(6)    not null comment 'when the last send was allowed, UTC',
  sends           int            not null comment 'sends that were begun',
  outcome         varchar(16) character set ascii collate ascii_bin null comment 'what is proven: succeeded or failed; null: nothing',
  settled_at      datetime(6)    null     comment 'when it was proven, UTC',
  primary key (operation_id, effect) comment 'serves: phases and recovery, the intents of one operation',
  unique key operation_intent_provider_key (adapter, provider_key) comment 'serves: no two effects share a key',
  constraint oncebox_operation_intent_strategy check (strategy in ('key', 'query', 'key_and_query', 'none', 'repeatable')),
  constraint oncebox_operation_intent_outcome check
    ((outcome is null or outcome in ('succeeded', 'failed')) and (outcome is null) = (settled_at is null)),
  constraint oncebox_operation_intent_sends check (sends > 0 and last_sent_at >= first_sent_at)
) engine = InnoDB default charset = utf8mb4
  comment = 'oncebox: calls of outside providers, committed before the first send; the key of an effect never changes';

create table if not exists oncebox_operation_evidence (
  evidence_id  bigint         not null auto_increment comment 'order of arrival',
  operation_id binary(16)     not null comment 'operation',
  effect       varbinary(128) not null comment 'effect inside the operation; empty: the run itself',
  epoch        bigint         not null comment 'epoch of who saw it, perhaps no longer the owner',
  send         int            not null comment 'which send it answers; 0: none',
  kind         varchar(16) character set ascii collate ascii_bin not null comment 'answer, query, error, operator, or run: the result of a handler that lost its lease',
  verdict      varchar(16) character set ascii collate ascii_bin not null comment 'what it proves: success, failure, not-sent; mismatch: it happened otherwise; refused: a failure if nothing else was sent; waived: an operator lets it be repeated; wait, not-found, stored-error, indefinite: nothing',
  status       int            null     comment 'status of the provider',
  bytes        longblob       not null comment 'what was seen',
  bytes_kid    varchar(64) character set ascii collate ascii_bin null comment 'id of the key that encrypted them; null: not encrypted',
  observed_at  datetime(6)    not null comment 'when it was stored, UTC',
  primary key (evidence_id) comment 'serves: evidence in order of arrival',
  key operation_evidence_operation_id (operation_id, evidence_id) comment 'serves: recovery and resolve, the evidence of one operation',
  constraint oncebox_operation_evidence_kind check (kind in ('answer', 'query', 'error', 'operator', 'run')),
  constraint oncebox_operation_evidence_verdict check (verdict in ('success', 'failure', 'refused', 'not-sent', 'waived', 'wait', 'mismatch', 'not-found', 'stored-error', 'indefinite'))
) engine = InnoDB default charset = utf8mb4
  comment = 'oncebox: what was seen of providers and of runs that lost their lease; appended by anybody, never changed; of the answers that ask to wait, the last one';

create table if not exists oncebox_deployment (
  only_row      int         not null comment 'always 1: there is one row',
  deployment_id binary(16)  not null comment 'id that stands in the configuration too',
  created_at    datetime(6) not null comment 'when it was made, UTC',
  primary key (only_row) comment 'serves: the check before sending, the only row',
  constraint oncebox_deployment_only_row check (only_row = 1)
) engine = InnoDB default charset = utf8mb4
  comment = 'oncebox: which deployment this database belongs to; nothing is sent to providers where the configuration names another';

insert ignore into oncebox_deployment (only_row, deployment_id, created_at) values (1, unhex(replace(uuid(), '-', '')), utc_timestamp(6));

create table if not exists oncebox_operation_process (
  process_id    binary(16)     not null comment 'id that the process drew when it started',
  operation     varbinary(255) not null comment 'name of the operation',
  oldest        bigint         not null comment 'oldest version that it can compute',
  newest        bigint         not null comment 'newest version that it can compute',
  write_version bigint         not null comment 'version that it writes',
  kids          text character set ascii collate ascii_bin not null comment 'key ids that it has, with commas between them',
  write_kid     varchar(32) character set ascii collate ascii_bin not null comment 'key id that it writes with',
  seen_at       datetime(6)    not null comment 'when it said so last, UTC; after a day it is forgotten',
  primary key (process_id, operation) comment 'serves: what a process says again',
  constraint oncebox_operation_process_versions check (oldest >= 0 and write_version between oldest and newest)
) engine = InnoDB default charset = utf8mb4
  comment = 'oncebox: which fingerprints each live process of a service reads and writes, for doctor';

alter table oncebox_audit
  modify act varchar(32) character set ascii collate ascii_bin not null comment 'redrive, redrive-as, bury or discard; mend-sequence; of keys and operations: release, purge, retry, resolve or judge; of a consumer: forget',
  modify place varbinary(255) not null comment 'outbox, the name of the consumer, or of the operation',
  modify number varchar(64) character set ascii collate ascii_bin not null comment 'its number in dead list: o<position> or c<sequence>; of a key the hexadecimal digits of its digest; the name of the sequence',
  modify message_id binary(16) not null comment 'its id before the act, or the operation; zeros where a sequence was mended',
  drop constraint oncebox_audit_act,
  add constraint oncebox_audit_act check (act in ('redrive', 'redrive-as', 'discard', 'mend-sequence', 'release', 'purge', 'retry', 'resolve', 'judge', 'forget', 'bury'));

insert ignore into oncebox_migration (version, description, serves_from, applied_at) values (4, 'operations', 4, utc_timestamp(6));
