-- Operations: which request was first used for what, in what state it is, who owns it, and what is answered.
--
-- Times are whole milliseconds since 1970 UTC, by the database's clock.

-- One row for each (tenant, operation, key): claim, state, owner, and what is kept of the answer.
create table oncebox_idempotency_request (
    key_digest        blob not null primary key,       -- SHA-256 of tenant, operation and key, each behind its length: the identity
    tenant            blob not null,                   -- from authentication, compared on read; empty: the public scope
    operation         blob not null,                   -- name of the operation
    key               blob not null,                   -- the Idempotency-Key, byte for byte
    principal         text not null,                   -- keyed hash of the principal of the first request: kid:hex
    fingerprint       text not null,                   -- hash of the command: version:kid:hex
    mode              text not null,                   -- who claimed it; says what a claim without outcome means
    state             text not null,                   -- expiry is derived from expires_at
    epoch             integer not null default 1,      -- raised by every change of owner; a write of an older one changes nothing
    owner             blob,                            -- token of the process that runs it; null in same_tx and phased
    lease_until       integer,                         -- end of the lease
    lease_ms          integer,                         -- its length; one that ends later than now plus this counts as over
    generation        integer not null default 1,      -- raised when the key is used anew after its time was over
    operation_id      blob not null unique,            -- identity of the run of this generation; unique: serves operation resources
    attempts          integer not null default 1,      -- how often this generation was begun
    created_at        integer not null,                -- when it was claimed first, or first since it last had an outcome
    updated_at        integer not null,                -- when it last changed
    outcome_at        integer,                         -- when its outcome became known; every lifetime counts from here
    expires_at        integer,                         -- when its answer is no longer promised; null: it never expires
    answer_status     integer,                         -- HTTP status, or the code of gRPC
    schema_version    integer,                         -- version of the schema that the body was written in
    body              text,                            -- kept (until body_expires_at), reference, or why it is not kept
    body_expires_at   integer,                         -- after it, a kept body counts as purged
    kept_bytes        integer,                         -- how many bytes headers and body take until body_expires_at; null: none
    resource_kind     text,                            -- kind of the resource that was made
    resource_id       text,                            -- its id
    resource_location text,                            -- its URL
    error_code        text,                            -- code of the failure
    check (length(key_digest) = 32 and length(operation_id) = 16),
    check (mode in ('same_tx', 'bridged', 'edge', 'phased')),
    check (state in ('IN_PROGRESS', 'COMPLETED', 'FAILED_REPLAYABLE', 'FAILED_RETRYABLE', 'UNKNOWN_REQUIRES_RECOVERY')),
    check ((owner is null) = (lease_until is null) and (owner is null) = (lease_ms is null)),
    check ((owner is not null) = (state = 'IN_PROGRESS' and mode in ('bridged', 'edge'))),
    check ((outcome_at is not null) = (state in ('COMPLETED', 'FAILED_REPLAYABLE', 'FAILED_RETRYABLE'))
        and (outcome_at is null) = (expires_at is null) and (outcome_at is null or expires_at >= outcome_at)),
    check ((answer_status is null) = (schema_version is null) and (answer_status is null) = (body is null)
        and (answer_status is null or outcome_at is not null)
        and (answer_status is not null or state not in ('COMPLETED', 'FAILED_REPLAYABLE'))),
    check ((body is null or body in ('kept', 'reference', 'oversize', 'stream', 'withheld', 'purged'))
        and (body is 'kept') = (body_expires_at is not null)
        and (kept_bytes is null or kept_bytes >= 0 and body_expires_at is not null)),
    check ((resource_kind is null) = (resource_id is null) and (resource_kind is not null or resource_location is null)
        and (body is not 'reference' or resource_kind is not null)),
    check (error_code is null or state in ('FAILED_REPLAYABLE', 'FAILED_RETRYABLE')),
    check (epoch > 0 and generation > 0 and attempts > 0)
) without rowid;

-- Serves what has no outcome: counts, quotas of tenants, and what a sweep ends or asks for, the longest unchanged first.
create index oncebox_idempotency_request_open on oncebox_idempotency_request (operation, state, mode, updated_at) where outcome_at is null;
-- Serves quotas: what is kept for a tenant, from the index alone.
create index oncebox_idempotency_request_kept on oncebox_idempotency_request (tenant, body_expires_at, kept_bytes)
    where kept_bytes is not null;
-- Serves the purge: one operation, oldest outcome first.
create index oncebox_idempotency_request_purge on oncebox_idempotency_request (operation, outcome_at) where outcome_at is not null;

-- Headers and bytes of stored answers, until their own end.
create table oncebox_idempotency_body (
    key_digest blob not null,                          -- as in the request
    epoch      integer not null,                       -- epoch of the run that completed with it
    expires_at integer not null,                       -- end of its life: body_expires_at of the request
    headers    blob not null,                          -- names and values, each behind its length in four bytes; names may repeat
    bytes      blob not null,                          -- the body: plain, compressed or encrypted, as format says
    format     integer not null,                       -- how headers and bytes are written
    kid        text,                                   -- id of the key that encrypted it; null: not encrypted
    primary key (key_digest, epoch)
);

-- Serves the expiry, oldest end first.
create index oncebox_idempotency_body_expires_at on oncebox_idempotency_body (expires_at);

-- How far records of an operation were purged.
create table oncebox_idempotency_purge (
    operation    blob not null primary key,            -- name of the operation
    purged_below integer not null                      -- a key whose time lies below may have had a record; never lowered
) without rowid;

-- Operations in phases: where each stands, who drives it, and the command to go on with.
create table oncebox_operation (
    operation_id blob not null primary key,            -- provider keys and ids of messages are derived from it
    key_digest   blob not null,                        -- the idempotency record that it answers
    flow         text not null,                        -- name of the operation, under which its phases are registered
    flow_version integer not null,                     -- version of its phases; a worker takes only versions that it has
    point        text not null,                        -- recovery point that was reached last
    state        text not null,                        -- stage of that point
    command      blob not null,                        -- canonical bytes of the command, through the body cipher
    command_kid  text,                                 -- id of the key that encrypted it; null: not encrypted
    epoch        integer not null default 1,           -- raised by every change of owner; a phase of an older one changes nothing
    owner        blob,                                 -- token of the process that drives it; null: nobody
    lease_until  integer,                              -- end of the lease
    lease_ms     integer,                              -- its length; one that ends later than now plus this counts as over
    attempts     integer not null default 0,           -- recoveries counted; a provider that is away counts none
    due_at       integer,                              -- recovery may take it from then on; null: it has its outcome, or is parked
    parked       text,                                 -- why it waits for an operator; null: it does not
    created_at   integer not null,                     -- when its first phase was committed
    updated_at   integer not null,                     -- when it last changed
    outcome_at   integer,                              -- when its outcome became known
    expires_at   integer,                              -- as in the request
    check (length(operation_id) = 16 and length(key_digest) = 32),
    check (state in ('RECEIVED', 'LOCAL', 'OUTSTANDING', 'SETTLED', 'SUCCEEDED', 'FAILED', 'UNKNOWN')),
    check ((owner is null) = (lease_until is null) and (owner is null) = (lease_ms is null)),
    check ((outcome_at is not null) = (state in ('SUCCEEDED', 'FAILED')) and (outcome_at is null) = (expires_at is null)
        and (outcome_at is null or (owner is null and parked is null))),
    check ((due_at is not null) = (outcome_at is null and parked is null)),
    check (parked is null or owner is null),
    check (epoch > 0 and attempts >= 0 and flow_version >= 0)
);

-- Serves recovery: due operations of a flow.
create index oncebox_operation_due on oncebox_operation (flow, due_at) where due_at is not null;
-- Serves `operations list`: what waits for an operator, longest first.
create index oncebox_operation_parked on oncebox_operation (updated_at) where parked is not null;

-- Calls of outside providers, committed before the first send; the key of an effect never changes.
create table oncebox_operation_intent (
    operation_id    blob not null,                     -- operation
    effect          text not null,                     -- name of the effect inside the operation
    strategy        text not null,                     -- what may be done when no answer came
    provider_key    text not null,                     -- idempotency key for the provider, derived from the operation id
    request         blob not null,                     -- exact bytes of the request: every resend sends these
    request_kid     text,                              -- id of the key that encrypted them; null: not encrypted
    adapter         text not null,                     -- adapter of the provider
    adapter_version integer not null,                  -- its version when the bytes were made
    undoes          text,                              -- effect of the same operation that this one takes back
    first_sent_at   integer not null,                  -- when the first send was allowed; the provider's window counts from here
    last_sent_at    integer not null,                  -- when the last send was allowed
    sends           integer not null default 1,        -- sends that were begun
    outcome         text,                              -- what is proven; null: nothing
    settled_at      integer,                           -- when it was proven
    primary key (operation_id, effect),
    check (strategy in ('key', 'query', 'key_and_query', 'none', 'repeatable')),
    check ((outcome is null or outcome in ('succeeded', 'failed')) and (outcome is null) = (settled_at is null)),
    check (sends > 0 and last_sent_at >= first_sent_at)
);

-- Serves the promise that no two effects share a key.
create unique index oncebox_operation_intent_provider_key on oncebox_operation_intent (adapter, provider_key);

-- What was seen of providers and of runs that lost their lease; appended by anybody, never fenced, never changed; of the
-- answers that ask to wait, the last one.
create table oncebox_operation_evidence (
    evidence_id  integer primary key autoincrement,    -- order of arrival
    operation_id blob not null,                        -- operation
    effect       text not null,                        -- effect inside the operation; empty: the run itself
    epoch        integer not null,                     -- epoch of who saw it, perhaps no longer the owner
    send         integer not null,                     -- which send it answers; 0: none
    kind         text not null,                        -- answer, query, error, operator, run
    verdict      text not null,                        -- what it proves: success, failure, not-sent, mismatch, refused; the others nothing
    status       integer,                              -- status of the provider
    bytes        blob not null,                        -- what was seen
    bytes_kid    text,                                 -- id of the key that encrypted them; null: not encrypted
    observed_at  integer not null,                     -- when it was stored
    check (kind in ('answer', 'query', 'error', 'operator', 'run')),
    check (verdict in ('success', 'failure', 'refused', 'not-sent', 'waived', 'wait', 'mismatch', 'not-found', 'stored-error', 'indefinite'))
);

-- Serves recovery and resolve: the evidence of one operation.
create index oncebox_operation_evidence_operation_id on oncebox_operation_evidence (operation_id, evidence_id);

-- Which deployment this file belongs to; nothing is sent to providers where the configuration names another.
create table oncebox_deployment (
    only_row      integer not null primary key check (only_row = 1), -- there is one row
    deployment_id blob not null check (length(deployment_id) = 16),  -- stands in the configuration too
    created_at    integer not null                                   -- when it was made
);
insert into oncebox_deployment (only_row, deployment_id, created_at)
    values (1, randomblob(16), cast(round(unixepoch('subsec') * 1000) as integer));

-- Which fingerprints each live process of a service reads and writes, for `oncebox doctor`.
create table oncebox_operation_process (
    process_id    blob not null check (length(process_id) = 16), -- drawn when the process started
    operation     blob not null,                                 -- name of the operation
    oldest        integer not null check (oldest >= 0),          -- version that it can compute
    newest        integer not null,                              -- version that it can compute
    write_version integer not null,                              -- version that it writes
    kids          text not null,                                 -- key ids that it has, with commas between them
    write_kid     text not null,                                 -- key id that it writes with
    seen_at       integer not null,                              -- when it said so last; after a day it is forgotten
    primary key (process_id, operation),
    check (write_version between oldest and newest)
) without rowid;

-- What operators did, now also with keys and operations: a check cannot be changed, so the table is made anew.
create table oncebox_audit_4 (
    audit_id   integer primary key autoincrement,      -- order
    at         integer not null,                       -- when
    actor      text not null,                          -- who
    reason     text not null,                          -- why
    act        text not null,                          -- redrive, redrive-as, bury, discard; mend-sequence; release, purge, retry, resolve, judge; forget
    place      text not null,                          -- outbox, the name of the consumer, or of the operation
    number     text not null,                          -- its number in `dead list`; of a key the digits of its digest
    message_id text not null,                          -- its id before the act, or the operation
    new_id     text,                                   -- redrive-as: its id from then on
    detail     text not null,                          -- what it was dead for
    check (act in ('redrive', 'redrive-as', 'discard', 'mend-sequence', 'release', 'purge', 'retry', 'resolve', 'judge', 'forget', 'bury'))
);
insert into oncebox_audit_4 select * from oncebox_audit;
drop table oncebox_audit;
alter table oncebox_audit_4 rename to oncebox_audit;

-- Serves "what was done with this message".
create index oncebox_audit_message_id on oncebox_audit (message_id);
