-- The inbox: consumers, what they have handled, tries, assignments, and messages that wait or are dead.
--
-- Times are whole milliseconds since 1970 UTC, by the database's clock.

-- Consumers, by name.
create table oncebox_consumer (
    consumer_id   integer primary key autoincrement,   -- its number
    name          text not null unique,                -- as in the configuration
    id_rule       text not null,                       -- where a message's id is found; changed only by the operator's word
    registered_at integer not null,                    -- its first start
    seen_at       integer not null,                    -- when one of its processes was last there; written every ten seconds
    purged_below  integer,                             -- inbox rows older than this were purged; null: never since its start
    check (length(name) > 0)
);

-- What was handled, or is stored below: one row for each (consumer, message id). The unique key decides what is new (R24).
create table oncebox_inbox (
    consumer_id integer not null,                      -- the consumer
    message_id  blob not null,                         -- 16 bytes, see `message::identity`
    content_hash blob not null,                        -- 16 bytes of SHA-256 of the content: another one is an alarm
    received_at integer not null,                      -- when
    primary key (consumer_id, message_id),
    check (length(message_id) = 16 and length(content_hash) = 16)
) without rowid;
-- Serves the purge: of the ids that carry no time, what a consumer received first.
create index oncebox_inbox_untimed on oncebox_inbox (consumer_id, received_at, message_id)
    where (substr(message_id, 7, 1) not between x'70' and x'7f' or substr(message_id, 9, 1) not between x'80' and x'bf');

-- Tries of messages under suspicion, counted outside the handler's transaction (R26). Success deletes the row.
create table oncebox_attempt (
    consumer_id integer not null,                      -- the consumer
    message_id  blob not null,                         -- the message
    attempts    integer not null,                      -- tries counted so far
    history     text not null default '[]',            -- JSON array of {at, attempt, error}, the last 50
    updated_at  integer not null,                      -- when it last changed
    primary key (consumer_id, message_id),
    check (attempts >= 0 and length(message_id) = 16)
) without rowid;

-- Partitions that were assigned; one found open was not closed cleanly by its last owner (R26).
create table oncebox_assignment (
    consumer_id integer not null,                      -- the consumer
    topic       text not null,                         -- the topic
    partition_no integer not null,                     -- the partition
    state       text not null,                         -- open at assignment, closed at a clean end
    owner       blob,                                  -- token of the assignment that holds it; none after a clean end
    topic_id    text,                                  -- which topic of this name it was, where the broker tells
    next_offset integer,                               -- everything before it is done; written soon after, never before
    id_rule     text,                                  -- the consumer's id rule when next_offset was written
    changed_at  integer not null,                      -- when the row was last written
    primary key (consumer_id, topic, partition_no),
    check (state in ('open', 'closed'))
) without rowid;

-- Messages that wait for a retry, or behind another one of their key, and dead ones; whole, as they arrived.
create table oncebox_waiting (
    sequence     integer primary key autoincrement,    -- order within a key
    consumer_id  integer not null,                     -- the consumer
    message_id   blob not null,                        -- 16 bytes
    content_hash blob not null,                        -- content hash
    lane_id      blob,                                 -- 16 bytes that stand for (topic, key); null without a key
    state        text not null,                        -- waiting or dead
    blocks       integer not null,                     -- 1: later messages of the lane are stored behind this one
    due_at       integer,                              -- heads only: when it is tried next, or its lease ends
    lease        blob,                                 -- who tries it: a random token of 16 bytes
    attempts     integer not null,                     -- tries counted so far
    history      text not null default '[]',           -- JSON array of {at, attempt, error}, the last 50
    reason       text,                                 -- why it is dead, in a word
    stored_at    integer not null,                     -- when it came here
    dead_at      integer,                              -- when it became dead
    id_text      text not null,                        -- the id as it stood in the message
    topic        text not null,                        -- as it arrived
    key          blob,                                 -- as it arrived
    kind         text not null,                        -- as it arrived; empty where there was none
    headers      text not null,                        -- JSON array of [name, value as hexadecimal digits]
    payload      blob not null,                        -- as it arrived
    tombstone    integer not null,                     -- 1: there was no payload
    content_type text,                                 -- as it arrived
    source       text not null,                        -- as it arrived; empty where there was none
    message_time text,                                 -- when it was enqueued, RFC 3339
    traceparent  text,                                 -- trace context
    tracestate   text,                                 -- trace context
    place        text not null,                        -- where it stood in the broker
    partition_no integer not null,                     -- where it stood in the broker
    offset_no    integer not null,                     -- where it stood in the broker
    check (state in ('waiting', 'dead')),
    check ((state = 'dead') = (reason is not null) and (state = 'dead') = (dead_at is not null)),
    check (state = 'waiting' or (due_at is null and lease is null)),
    check (lease is null or due_at is not null),
    check (blocks in (0, 1) and (blocks = 0 or lane_id is not null)),
    check (state = 'dead' or blocks = (lane_id is not null)),
    check (lane_id is not null or state = 'dead' or due_at is not null),
    check (length(message_id) = 16 and length(content_hash) = 16 and tombstone in (0, 1))
);

-- One dead delivery for each (consumer, message id, content).
create unique index oncebox_waiting_dead on oncebox_waiting (consumer_id, message_id, content_hash) where state = 'dead';
-- Serves the lease of due heads and the question when the next one is due.
create index oncebox_waiting_due on oncebox_waiting (consumer_id, due_at) where due_at is not null;
-- Serves "is this lane blocked", "what comes next in it", and the sweep over the lanes.
create index oncebox_waiting_lane on oncebox_waiting (consumer_id, lane_id, sequence) where blocks = 1;
-- Serves `dead list`, the count of waiting messages of a consumer, and the age of the oldest.
create index oncebox_waiting_first on oncebox_waiting (consumer_id, sequence) where state = 'waiting';
-- Serves `dead list`.
create index oncebox_waiting_state on oncebox_waiting (state, consumer_id, sequence) where state = 'dead';
