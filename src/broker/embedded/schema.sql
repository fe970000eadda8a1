-- The topic log. Times are milliseconds since 1970, by the clock of this machine.

create table topic (
    topic_id integer primary key,
    name text not null unique,
    partitions integer not null check (partitions between 1 and 1024),
    created_at integer not null
) strict;

create table topic_partition (
    partition_id integer primary key,
    topic_id integer not null references topic (topic_id),
    number integer not null check (number >= 0),
    -- The first offset that retention left, and the one that the next row gets.
    first_offset integer not null default 0,
    next_offset integer not null default 0 check (next_offset >= first_offset and next_offset < 1 << 40),
    unique (topic_id, number)
) strict;

-- One tree, in order: a partition is a range of positions, and appending never touches another one's rows.
create table record (
    position integer primary key, -- partition_id << 40 | offset
    key blob,
    headers text not null, -- [[name, value], ..] as Kafka would have them
    payload blob not null,
    appended_at integer not null
) strict;

create table consumer_group (
    group_id integer primary key,
    name text not null unique,
    -- Raised whenever members or owners change, so that the others look.
    generation integer not null default 0
) strict;

create table member (
    member_id integer primary key autoincrement,
    group_id integer not null references consumer_group (group_id),
    process integer not null,
    session_ms integer not null,
    expires_at integer not null
) strict;

create table member_topic (
    member_id integer not null references member (member_id) on delete cascade,
    topic_id integer not null references topic (topic_id),
    primary key (member_id, topic_id)
) strict, without rowid;

-- Who reads a partition for a group, under which epoch, and up to where it is done.
create table lease (
    group_id integer not null references consumer_group (group_id),
    partition_id integer not null references topic_partition (partition_id),
    member_id integer references member (member_id),
    epoch integer not null default 0,
    committed integer not null, -- the next offset to be handled
    primary key (group_id, partition_id)
) strict, without rowid;

-- For people.
create view records as
select t.name as topic, p.number as "partition", r.position & 0xffffffffff as "offset", cast(r.key as text) as key,
    r.headers, r.payload, datetime(r.appended_at / 1000.0, 'unixepoch', 'subsec') as appended_at
from topic t
join topic_partition p on p.topic_id = t.topic_id
join record r on r.position >= p.partition_id << 40 and r.position < (p.partition_id + 1) << 40;
