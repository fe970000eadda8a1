-- The outbox: limits, messages, the cursor of the relay, and what could not be sent.
--
-- Works with SQLite 3.38 and later, whatever program writes: nothing here uses a newer function. Text must be UTF-8 (the
-- default encoding of a database). Times are whole milliseconds since 1970 UTC, by the database's clock. With
-- `pragma trusted_schema = off` a door may fail, loudly: the triggers call functions.

-- The limits of a message, the same for every door; the triggers below obey them. A row may be raised or lowered, within the
-- bounds that its note names.
create table oncebox_limits (
    name    text primary key not null,                 -- the limit; an error names the limit or the field that breaks it
    value   integer not null check (value >= 0),       -- the limit
    note    text not null                              -- what it limits, and what the brokers bound whatever is written here
) without rowid;

insert into oncebox_limits (name, value, note) values
    ('topic_length_max', 249, 'characters of a topic; never more than 249, which Kafka takes'),
    ('key_bytes_max', 1024, 'bytes of a key'),
    ('kind_bytes_max', 255, 'bytes of a kind; never more than 255, an AMQP short string'),
    ('headers_max', 64, 'number of headers, trace context not counted'),
    ('header_name_bytes_max', 128, 'bytes of a header name; never more than 255'),
    ('headers_bytes_max', 65536, 'bytes of names and values together; never more than 65536, half an AMQP frame'),
    ('content_type_bytes_max', 255, 'bytes of a content type; never more than 255'),
    ('message_bytes_max', 900000, 'bytes of key, headers and payload together'),
    ('id_skew_seconds', 3600, 'how far the time in a given v7 id may be from the time of the database');

-- Messages that are not proven yet. The door is a plain insert:
--     insert into oncebox_outbox (topic, key, kind, payload) values (...)
-- Rows are immutable and insert-only; the relay deletes a row in the transaction that proves or diverts it.
-- Columns have no declared type on purpose: type affinity would turn a number into text before the triggers see it.
create table oncebox_outbox (
    position     integer primary key autoincrement,    -- order; never given, never used twice
    bucket       default 0,                            -- always 0: SQLite has one shard
    message_id   default (                             -- UUID as 36 characters, lower case; v7 unless given
        printf('%s-%s-7%s-%s%s-%s',
            substr(printf('%012x', cast(round((julianday('now') - 2440587.5) * 86400000) as integer)), 1, 8),
            substr(printf('%012x', cast(round((julianday('now') - 2440587.5) * 86400000) as integer)), 9, 4),
            substr(lower(hex(randomblob(2))), 1, 3),
            substr('89ab', 1 + (random() & 3), 1), substr(lower(hex(randomblob(2))), 1, 3),
            lower(hex(randomblob(6))))),
    topic,                                             -- where it goes
    key,                                               -- order is kept per (topic, key); null: no order
    kind,                                              -- what happened
    headers      default '{}',                         -- JSON object of strings; traceparent and tracestate are the trace
    payload,                                           -- text or blob, sent byte for byte
    content_type,                                      -- null becomes application/json or application/octet-stream
    created_at   default (                             -- when it was enqueued
        cast(round((julianday('now') - 2440587.5) * 86400000) as integer))
);

-- Serves `explain` and `dead show`: messages by id. Not unique: enqueuing an id twice is publishing it twice.
create index oncebox_outbox_message_id on oncebox_outbox (message_id);

-- The cursor of the relay and its lease. Every write is fenced by epoch and revision.
create table oncebox_shard (
    shard_id     integer primary key not null,         -- 0
    bucket_from  integer not null,                     -- first bucket
    bucket_to    integer not null,                     -- last bucket
    scanned_to   integer not null default 0,           -- every position up to here is proven, dead, held or discarded
    updated_at   integer not null,                     -- when scanned_to was last written
    epoch        integer not null default 0,           -- raised by every change of owner
    revision     integer not null default 0,           -- raised by every write of the owner
    owner        text,                                 -- who has the lease
    lease_until  integer not null default 0,           -- until when
    lease_length integer not null default 0,           -- for how long at a time, milliseconds
    check (bucket_from <= bucket_to and scanned_to >= 0)
);

insert into oncebox_shard (shard_id, bucket_from, bucket_to, updated_at)
values (0, 0, 255, cast(round((julianday('now') - 2440587.5) * 86400000) as integer));

-- Messages that are dead (refused for what they are) or held (behind a dead one of their key, or their destination is
-- blocked): copied whole in the transaction that moves the cursor past them.
create table oncebox_outbox_dead (
    position     integer primary key not null,         -- as it was in the outbox
    bucket       integer not null,                     -- as it was
    message_id   text not null,                        -- as it was, or the new id of a redrive under a new id
    topic        text not null,                        -- as it was
    key          text,                                 -- as it was
    kind         text not null,                        -- as it was
    headers      text not null,                        -- as they were; a redrive under a new id adds oncebox-causation-id
    payload      blob not null,                        -- as it was, or edited by a redrive under a new id
    content_type text not null,                        -- as it was
    created_at   integer not null,                     -- as it was
    state        text not null,                        -- dead, held-behind, held-destination
    holds        integer not null,                     -- 1: a dead message behind which later ones of its key are held
    reason       text,                                 -- what the broker said
    diverted_at  integer not null,                     -- when it came here, or last changed
    requested    text,                                 -- redrive or discard, as an operator asked; the relay carries it out
    requested_at integer,                              -- when
    check (state in ('dead', 'held-behind', 'held-destination')),
    check (holds in (0, 1) and (holds = 0 or state = 'dead')),
    check ((state = 'held-behind') = (reason is null)),
    check (requested is null or (requested_at is not null and (requested = 'discard' or (state = 'dead' and requested = 'redrive'))))
);

-- Serves "how many stand behind this one".
create index oncebox_outbox_dead_key on oncebox_outbox_dead (topic, key, position);
-- Serves counts and the age of the first held message.
create index oncebox_outbox_dead_state on oncebox_outbox_dead (state, position);
-- Serves the relay's question for requests.
create index oncebox_outbox_dead_request on oncebox_outbox_dead (position) where requested is not null;
-- Serves `dead show`: by message id.
create index oncebox_outbox_dead_message_id on oncebox_outbox_dead (message_id);

-- Limits are triggers, not CHECK or NOT NULL: INSERT OR IGNORE skips those silently (R13). An error reads
-- `oncebox: limit NAME: what is allowed`.
create trigger oncebox_outbox_limits before insert on oncebox_outbox
begin
    select raise(abort, 'oncebox: limit position: a position is never given')
     where new.position is not null and new.position <> -1;
    select raise(abort, 'oncebox: limit bucket: a bucket is never given')
     where new.bucket is not null and new.bucket is not 0;
    select raise(abort, 'oncebox: limit created_at: the time is the database''s own and never given')
     where new.created_at is not null
       and new.created_at is not cast(round((julianday('now') - 2440587.5) * 86400000) as integer);

    select raise(abort, 'oncebox: limit message_id: an id is a UUID of 36 characters in lower case')
     where new.message_id is not null
       and (typeof(new.message_id) <> 'text' or length(cast(new.message_id as blob)) <> 36
            or new.message_id glob '*[^0-9a-f-]*' or length(replace(new.message_id, '-', '')) <> 32
            or substr(new.message_id, 9, 1) <> '-' or substr(new.message_id, 14, 1) <> '-'
            or substr(new.message_id, 19, 1) <> '-' or substr(new.message_id, 24, 1) <> '-');
    -- The time of a v7 id is its first 48 bits; the sum turns its hexadecimal digits into a number.
    select raise(abort, 'oncebox: limit id_skew_seconds: the time in a given v7 id is too far from the time of the database')
     where substr(new.message_id, 15, 1) = '7' and instr('89ab', substr(new.message_id, 20, 1)) > 0
       and abs(cast(round((julianday('now') - 2440587.5) * 86400000) as integer) - (
                (instr('0123456789abcdef', substr(new.message_id, 1, 1)) - 1) * 17592186044416
              + (instr('0123456789abcdef', substr(new.message_id, 2, 1)) - 1) * 1099511627776
              + (instr('0123456789abcdef', substr(new.message_id, 3, 1)) - 1) * 68719476736
              + (instr('0123456789abcdef', substr(new.message_id, 4, 1)) - 1) * 4294967296
              + (instr('0123456789abcdef', substr(new.message_id, 5, 1)) - 1) * 268435456
              + (instr('0123456789abcdef', substr(new.message_id, 6, 1)) - 1) * 16777216
              + (instr('0123456789abcdef', substr(new.message_id, 7, 1)) - 1) * 1048576
              + (instr('0123456789abcdef', substr(new.message_id, 8, 1)) - 1) * 65536
              + (instr('0123456789abcdef', substr(new.message_id, 10, 1)) - 1) * 4096
              + (instr('0123456789abcdef', substr(new.message_id, 11, 1)) - 1) * 256
              + (instr('0123456789abcdef', substr(new.message_id, 12, 1)) - 1) * 16
              + (instr('0123456789abcdef', substr(new.message_id, 13, 1)) - 1)))
           > 1000 * coalesce((select value from oncebox_limits where name = 'id_skew_seconds'), 3600);

    select raise(abort, 'oncebox: limit topic: a topic is text')
     where typeof(new.topic) <> 'text';
    select raise(abort, 'oncebox: limit topic: a topic has 1 to topic_length_max characters of A-Z, a-z, 0-9, `.`, `_`, `-`')
     where length(cast(new.topic as blob)) not between 1
           and min(249, coalesce((select value from oncebox_limits where name = 'topic_length_max'), 249))
        or new.topic glob '*[^A-Za-z0-9._-]*' or instr(cast(new.topic as blob), x'00') > 0;
    select raise(abort, 'oncebox: limit topic: a topic is not `.` or `..`')
     where new.topic in ('.', '..');

    select raise(abort, 'oncebox: limit key: a key is text or null')
     where typeof(new.key) not in ('text', 'null');
    select raise(abort, 'oncebox: limit key: a key has 1 to key_bytes_max bytes, none of them NUL')
     where length(cast(new.key as blob)) not between 1
           and coalesce((select value from oncebox_limits where name = 'key_bytes_max'), 1024)
        or instr(cast(new.key as blob), x'00') > 0;
    select raise(abort, 'oncebox: limit kind: a kind is text')
     where typeof(new.kind) <> 'text';
    select raise(abort, 'oncebox: limit kind: a kind has 1 to kind_bytes_max bytes, none of them NUL')
     where length(cast(new.kind as blob)) not between 1
           and min(255, coalesce((select value from oncebox_limits where name = 'kind_bytes_max'), 255))
        or instr(cast(new.kind as blob), x'00') > 0;
    -- Text that is not UTF-8 could be written by any client and read by none: each character must survive a round trip
    -- through its code point. U+FFFE and U+FFFF are characters too, but `unicode` does not know them.
    select raise(abort, 'oncebox: limit key: a key is UTF-8')
     where new.key glob '*[^ -~]*'
       and exists (select 1 from json_each('[0' || replace(hex(zeroblob(length(new.key))), '00', ',0') || ']') as n
                    where n.key < length(new.key)
                      and char(unicode(substr(new.key, n.key + 1, 1))) <> substr(new.key, n.key + 1, 1)
                      and hex(substr(new.key, n.key + 1, 1)) not in ('EFBFBE', 'EFBFBF'));
    select raise(abort, 'oncebox: limit kind: a kind is UTF-8')
     where new.kind glob '*[^ -~]*'
       and exists (select 1 from json_each('[0' || replace(hex(zeroblob(length(new.kind))), '00', ',0') || ']') as n
                    where n.key < length(new.kind)
                      and char(unicode(substr(new.kind, n.key + 1, 1))) <> substr(new.kind, n.key + 1, 1)
                      and hex(substr(new.kind, n.key + 1, 1)) not in ('EFBFBE', 'EFBFBF'));

    select raise(abort, 'oncebox: limit content_type: 1 to content_type_bytes_max bytes of printable ASCII are allowed')
     where new.content_type is not null
       and (typeof(new.content_type) <> 'text' or new.content_type glob '*[^ -~]*'
            or instr(cast(new.content_type as blob), x'00') > 0
            or length(cast(new.content_type as blob)) not between 1
               and min(255, coalesce((select value from oncebox_limits where name = 'content_type_bytes_max'), 255)));
    select raise(abort, 'oncebox: limit payload: a payload is text or a blob, and never null')
     where typeof(new.payload) not in ('text', 'blob');

    select raise(abort, 'oncebox: limit headers: headers are a JSON object')
     where case when new.headers is null then 0
                when typeof(new.headers) <> 'text' then 1
                when instr(cast(new.headers as blob), x'00') > 0 then 1
                when not json_valid(new.headers) then 1
                else json_type(new.headers) <> 'object' end;
    select raise(abort, 'oncebox: limit header_value: the value of a header is text')
     where new.headers <> '{}' and exists (select 1 from json_each(new.headers) as h where h.type <> 'text');
    select raise(abort, 'oncebox: limit headers_max: at most headers_max headers are allowed')
     where new.headers <> '{}'
       and (select count(*) from json_each(new.headers) as h where lower(h.key) not in ('traceparent', 'tracestate'))
           > coalesce((select value from oncebox_limits where name = 'headers_max'), 64);
    select raise(abort, 'oncebox: limit header_name: a header name has 1 to header_name_bytes_max bytes')
     where new.headers <> '{}'
       and exists (select 1 from json_each(new.headers) as h
                    where length(cast(h.key as blob)) not between 1
                          and min(255, coalesce((select value from oncebox_limits where name = 'header_name_bytes_max'), 128)));
    select raise(abort, 'oncebox: limit header_reserved: ce_*, cloudEvents*, oncebox-*, content-type, CC, BCC and the names that RabbitMQ writes are reserved')
     where new.headers <> '{}'
       and exists (select 1 from json_each(new.headers) as h
                    where substr(lower(h.key), 1, 3) = 'ce_' or substr(lower(h.key), 1, 11) = 'cloudevents'
                       or substr(lower(h.key), 1, 8) = 'oncebox-'
                       or lower(h.key) glob 'x-first-death-*' or lower(h.key) glob 'x-last-death-*'
                       or lower(h.key) glob 'x-opt-*' or lower(h.key) glob 'x-stream-*' or lower(h.key) glob 'x-shovelled*'
                       or lower(h.key) in ('x-death', 'x-delivery-count', 'x-acquired-count', 'x-match', 'x-priority',
                                           'x-received-from', 'x-original-exchange', 'x-original-routing-key', 'x-routed-by', 'timestamp_in_ms',
                                           'content-type', 'cc', 'bcc'));
    select raise(abort, 'oncebox: limit header_twice: a header is given twice; case does not tell names apart')
     where new.headers <> '{}'
       and exists (select 1 from json_each(new.headers) as h group by lower(h.key) having count(*) > 1);
    -- JSON functions cut a text at an escaped NUL without a word, so the text itself is looked at; pairs of backslashes are
    -- taken out first, because a NUL escape after one is no escape.
    select raise(abort, 'oncebox: limit header_value: a header contains NUL')
     where instr(replace(new.headers, '\\', '  '), '\u0000') > 0;
    -- Half a surrogate pair comes out of JSON as bytes ED A0 to ED BF, which no UTF-8 has.
    select raise(abort, 'oncebox: limit header_value: a header contains half a surrogate pair')
     where instr(new.headers, '\u') > 0
       and exists (select 1 from json_each(new.headers) as h,
                   (values (x'EDA0'), (x'EDA1'), (x'EDA2'), (x'EDA3'), (x'EDA4'), (x'EDA5'), (x'EDA6'), (x'EDA7'),
                           (x'EDA8'), (x'EDA9'), (x'EDAA'), (x'EDAB'), (x'EDAC'), (x'EDAD'), (x'EDAE'), (x'EDAF'),
                           (x'EDB0'), (x'EDB1'), (x'EDB2'), (x'EDB3'), (x'EDB4'), (x'EDB5'), (x'EDB6'), (x'EDB7'),
                           (x'EDB8'), (x'EDB9'), (x'EDBA'), (x'EDBB'), (x'EDBC'), (x'EDBD'), (x'EDBE'), (x'EDBF')) as half
                    where instr(cast(h.key || h.value as blob), half.column1) > 0);
    select raise(abort, 'oncebox: limit trace: the header traceparent is not of the W3C form')
     where new.headers <> '{}'
       and exists (select 1 from json_each(new.headers) as h
                    where lower(h.key) = 'traceparent'
                      and (length(cast(h.value as blob)) <> 55 or h.value glob '*[^0-9a-f-]*'
                           or length(replace(h.value, '-', '')) <> 52
                           or substr(h.value, 3, 1) <> '-' or substr(h.value, 36, 1) <> '-' or substr(h.value, 53, 1) <> '-'
                           or substr(h.value, 1, 2) = 'ff'
                           or substr(h.value, 4, 32) = '00000000000000000000000000000000'
                           or substr(h.value, 37, 16) = '0000000000000000'));
    select raise(abort, 'oncebox: limit headers_bytes_max: names and values of headers together are too long')
     where new.headers <> '{}'
       and (select sum(length(cast(h.key as blob)) + length(cast(h.value as blob))) from json_each(new.headers) as h
             where lower(h.key) not in ('traceparent', 'tracestate'))
           > min(65536, coalesce((select value from oncebox_limits where name = 'headers_bytes_max'), 65536));
    select raise(abort, 'oncebox: limit message_bytes_max: key, headers and payload together are too long')
     where coalesce(length(cast(new.key as blob)), 0)
         + case typeof(new.payload) when 'blob' then length(new.payload) else length(cast(new.payload as blob)) end
         + case when new.headers is null or new.headers = '{}' then 0 else coalesce(
               (select sum(length(cast(h.key as blob)) + length(cast(h.value as blob))) from json_each(new.headers) as h
                 where lower(h.key) not in ('traceparent', 'tracestate')), 0) end
         > coalesce((select value from oncebox_limits where name = 'message_bytes_max'), 900000);
end;

-- What only shows once the row stands, and what was left out.
create trigger oncebox_outbox_complete after insert on oncebox_outbox
begin
    select raise(abort, 'oncebox: limit position: a position is never given')
     where new.position <= 0;
    -- The relay has passed this position: the row would never be read (R7).
    select raise(abort, 'oncebox: limit position: sequence behind cursor: sqlite_sequence was set back; run `oncebox doctor --fix`')
     where new.position <= (select max(scanned_to) from oncebox_shard);
    update oncebox_outbox
       set bucket       = 0,
           message_id   = coalesce(message_id, printf('%s-%s-7%s-%s%s-%s',
               substr(printf('%012x', cast(round((julianday('now') - 2440587.5) * 86400000) as integer)), 1, 8),
               substr(printf('%012x', cast(round((julianday('now') - 2440587.5) * 86400000) as integer)), 9, 4),
               substr(lower(hex(randomblob(2))), 1, 3),
               substr('89ab', 1 + (random() & 3), 1), substr(lower(hex(randomblob(2))), 1, 3),
               lower(hex(randomblob(6))))),
           headers      = coalesce(headers, '{}'),
           content_type = coalesce(content_type,
               case typeof(payload) when 'text' then 'application/json' else 'application/octet-stream' end),
           created_at   = coalesce(created_at, cast(round((julianday('now') - 2440587.5) * 86400000) as integer))
     where position = new.position
       and (bucket is null or message_id is null or headers is null or content_type is null or created_at is null);
end;

-- Rows are immutable. Only the trigger above ever meets a row that is not complete.
create trigger oncebox_outbox_immutable before update on oncebox_outbox
    when old.bucket is not null and old.message_id is not null and old.headers is not null
     and old.content_type is not null and old.created_at is not null
begin
    select raise(abort, 'oncebox: rows of oncebox_outbox are immutable; enqueue another message instead');
end;

-- A row that is not proven is not deleted. The relay moves the cursor first, in the same transaction.
create trigger oncebox_outbox_keep before delete on oncebox_outbox
    when old.position > (select max(scanned_to) from oncebox_shard)
begin
    select raise(abort, 'oncebox: this message is not proven yet; let the relay send it, then discard it where it is dead');
end;
