-- oncebox on MySQL 8.0 or later and MariaDB 10.6 or later: tables, limits, and the SQL door.
--
-- Every statement can be run twice, because DDL commits by itself here: a migration that was cut off is run again from its start.
-- What is compared is binary (varbinary, binary, blob): utf8mb4_bin of MySQL and MariaDB ignores trailing spaces, other collations also
-- case and accents. Times are UTC, written by utc_timestamp(6). No triggers and no foreign keys: the first need a privilege that
-- a migrator often lacks, the second lock the parent row at every insert.

set session sql_mode = 'STRICT_ALL_TABLES,ERROR_FOR_DIVISION_BY_ZERO,NO_ENGINE_SUBSTITUTION';
set names utf8mb4;

create table if not exists oncebox_migration (
  version     bigint       not null comment 'number of the migration, ascending from 1',
  description varchar(200) not null comment 'what it is for',
  serves_from bigint       not null comment 'programs that know migrations up to this one or later work on the schema after it',
  applied_at  datetime(6)  not null comment 'when it was applied, UTC',
  primary key (version) comment 'serves: which migrations are applied'
) engine = InnoDB default charset = utf8mb4 comment = 'oncebox: applied migrations';

create table if not exists oncebox_outbox (
  position     bigint           not null auto_increment comment 'order; drawn when the row is inserted, visible when its transaction commits',
  bucket       tinyint unsigned not null comment 'first byte of SHA-256 of the key, or of the message id where there is no key',
  message_id   binary(16)       not null comment 'UUID v7 unless given; the same id twice is published twice',
  topic        varbinary(249)   not null comment 'Kafka topic, routing key on RabbitMQ',
  `key`        blob             null     comment 'order is kept per (topic, key); null: no order',
  kind         varbinary(255)   not null comment 'what happened, for example payment.created',
  headers      mediumtext character set utf8mb4 collate utf8mb4_bin null comment 'JSON object of strings; null: none',
  payload      longblob         not null comment 'bytes, never looked into',
  content_type varchar(255) character set ascii collate ascii_bin not null comment 'content type of the payload',
  traceparent  varchar(55)  character set ascii collate ascii_bin null comment 'W3C trace context',
  tracestate   varchar(512) character set ascii collate ascii_bin null comment 'W3C trace context, state of vendors',
  created_at   datetime(6)      not null comment 'when it was enqueued, UTC by the database clock',
  primary key (position) comment 'serves: the read of the relay, and its deletes by exact position',
  key outbox_message_id (message_id) comment 'serves: explain and dead show'
) engine = InnoDB default charset = utf8mb4
  comment = 'oncebox: messages not yet proven by the broker; insert only, deleted by the relay once proven';

create table if not exists oncebox_shard (
  shard_id      int              not null comment 'always 0: MySQL and MariaDB have one shard',
  bucket_from   tinyint unsigned not null comment 'first bucket',
  bucket_to     tinyint unsigned not null comment 'last bucket',
  scanned_to    bigint           not null comment 'highest position that was proven or diverted; shown only, nothing is decided from it',
  epoch         bigint           not null comment 'raised by every new ownership; a write of an older one changes nothing',
  revision      bigint           not null comment 'raised by every write of the owner; another one than it wrote last ends its session',
  owner         varchar(255) character set utf8mb4 collate utf8mb4_bin null comment 'who holds the lease; null: nobody',
  lease_until   datetime(6)      null     comment 'end of the lease, UTC by the clock of the database',
  lease_seconds double           null     comment 'length of the lease; one that ends later than now plus this counts as expired, for the clock went back',
  updated_at    datetime(6)      not null comment 'when the owner last marked, UTC',
  primary key (shard_id) comment 'serves: lease, read, checkpoint and mark',
  constraint oncebox_shard_only check (shard_id = 0),
  constraint oncebox_shard_lease check ((owner is null) = (lease_until is null) and (owner is null) = (lease_seconds is null))
) engine = InnoDB default charset = utf8mb4 comment = 'oncebox: who owns the outbox';

insert ignore into oncebox_shard
  (shard_id, bucket_from, bucket_to, scanned_to, epoch, revision, owner, lease_until, lease_seconds, updated_at)
  values (0, 0, 255, 0, 0, 0, null, null, null, utc_timestamp(6));

create table if not exists oncebox_outbox_dead (
  position     bigint           not null comment 'position it had in the outbox: its place in the order of its key',
  bucket       tinyint unsigned not null comment 'as in the outbox',
  message_id   binary(16)       not null comment 'as in the outbox, or the new id an operator gave',
  topic        varbinary(249)   not null comment 'as in the outbox',
  `key`        blob             null     comment 'as in the outbox',
  kind         varbinary(255)   not null comment 'as in the outbox',
  headers      mediumtext character set utf8mb4 collate utf8mb4_bin null comment 'as in the outbox; a new id adds oncebox-causation-id',
  payload      longblob         not null comment 'as in the outbox, or what an operator made of it',
  content_type varchar(255) character set ascii collate ascii_bin not null comment 'as in the outbox',
  traceparent  varchar(55)  character set ascii collate ascii_bin null comment 'as in the outbox',
  tracestate   varchar(512) character set ascii collate ascii_bin null comment 'as in the outbox',
  created_at   datetime(6)      not null comment 'as in the outbox',
  lane_id      binary(16)       null     comment 'stands for (topic, key) in indexes: SHA-256, first 16 bytes; null: no key',
  state        varchar(16) character set ascii collate ascii_bin not null comment 'dead: refused for what it is; held: waits until it is released',
  cause        varchar(16) character set ascii collate ascii_bin not null comment 'refused: by the broker; behind: stands behind a dead or held row of its key; destination: its topic is not there, not routed or denied',
  reason       mediumtext character set utf8mb4 collate utf8mb4_bin null comment 'what the broker said; null behind another row',
  holds        boolean          not null comment 'later rows of its key are held behind it (policy hold)',
  attempts     int unsigned     not null comment 'how often it was diverted: once, and again after each release that was refused',
  history      mediumtext character set utf8mb4 collate utf8mb4_bin not null comment 'JSON array of {at, attempt, error}, oldest first, the last 50',
  diverted_at  datetime(6)      not null comment 'when it came here, or its state last changed, UTC',
  requested    varchar(16) character set ascii collate ascii_bin null comment 'redrive or discard, as an operator asked; only the owner of the shard acts on it',
  requested_at datetime(6)      null     comment 'when, UTC',
  requested_by varchar(255) character set utf8mb4 collate utf8mb4_bin null comment 'who',
  primary key (position) comment 'serves: diversion and release by exact position, loading in position order',
  key outbox_dead_lane (lane_id, position) comment 'serves: dead list, how many stand behind a dead row',
  key outbox_dead_topic (topic, position) comment 'serves: dead list, how many of a topic are held',
  key outbox_dead_state (state, position) comment 'serves: dead list, counts',
  key outbox_dead_requested (requested, position) comment 'serves: the question of the relay for requests',
  key outbox_dead_message_id (message_id) comment 'serves: explain and dead show, rows by message id',
  constraint oncebox_outbox_dead_state check (state in ('dead', 'held')),
  constraint oncebox_outbox_dead_cause check (cause in ('refused', 'behind', 'destination') and (state = 'dead') = (cause = 'refused')),
  constraint oncebox_outbox_dead_holds check (state = 'dead' or holds = 0),
  constraint oncebox_outbox_dead_reason check ((reason is null) = (cause = 'behind')),
  constraint oncebox_outbox_dead_lane check ((lane_id is null) = (`key` is null)),
  constraint oncebox_outbox_dead_requested check ((requested is null) = (requested_at is null)
    and (requested is null) = (requested_by is null)
    and (requested is null or requested = 'discard' or (state = 'dead' and requested = 'redrive')))
) engine = InnoDB default charset = utf8mb4
  comment = 'oncebox: outbox rows that could not be sent, and those they hold back, whole';

create table if not exists oncebox_limits (
  name  varchar(64) character set ascii collate ascii_bin not null comment 'name of the limit; an error names the limit or the field that breaks it',
  value bigint unsigned not null comment 'its value',
  note  varchar(200) not null comment 'what it means',
  primary key (name) comment 'serves: every door'
) engine = InnoDB default charset = utf8mb4
  comment = 'oncebox: limits of a message, the same for every door; change them with a short innodb_lock_wait_timeout, for open writers hold them shared';

insert ignore into oncebox_limits (name, value, note) values
  ('topic_length_max', 249, 'characters; at most 249 whatever stands here, what Kafka takes'),
  ('key_bytes_max', 1024, 'bytes of a key; the column takes 65,535'),
  ('kind_bytes_max', 255, 'bytes of a kind; at most 255 whatever stands here (an AMQP short string)'),
  ('headers_max', 64, 'number of headers'),
  ('header_name_bytes_max', 128, 'bytes of a header name; at most 255 whatever stands here'),
  ('headers_bytes_max', 65536, 'names and values together; at most 65,536 whatever stands here (an AMQP frame is 128 KiB)'),
  ('content_type_bytes_max', 255, 'bytes of a content type; at most 255 whatever stands here'),
  ('message_bytes_max', 900000, 'key, headers and payload together'),
  ('id_skew_seconds', 3600, 'how far the time in a given UUID v7 may be from the database clock');

create table if not exists oncebox_consumer (
  consumer_id  int             not null auto_increment comment 'number of the consumer in this database',
  name         varbinary(255)  not null comment 'its name',
  id_rule      text character set utf8mb4 collate utf8mb4_bin not null comment 'where the id of a message stands; another one is refused unless accepted',
  registered_at datetime(6)    not null comment 'its first start, UTC',
  seen_at      datetime(6)     not null comment 'when one of its processes was last there, UTC; written every ten seconds',
  purged_below datetime(6)     null     comment 'ids whose time is before this were purged from the inbox and are too old; null: never purged since its first start',
  primary key (consumer_id) comment 'serves: names of consumers',
  unique key consumer_name (name) comment 'serves: registration; one number per name'
) engine = InnoDB default charset = utf8mb4 comment = 'oncebox: consumers';

create table if not exists oncebox_inbox (
  consumer_id  int         not null comment 'oncebox_consumer',
  message_id   binary(16)  not null comment 'identity of the message, fixed length, binary',
  content_hash binary(16)  not null comment 'first 16 bytes of SHA-256 of the content: the same id with another one is an alarm',
  batch_token  binary(16)  not null comment 'random, of the batch that inserted the row: tells new rows from known ones',
  received_at  datetime(6) not null comment 'when it was admitted, UTC',
  primary key (consumer_id, message_id) comment 'serves: every decision whether a message is new',
  key inbox_received (consumer_id, received_at, message_id) comment 'serves: the purge, what a consumer received first'
) engine = InnoDB default charset = utf8mb4
  comment = 'oncebox: messages whose effects are committed, or which wait or are dead; and one row for each retry that was finished, which tells that it was';

create table if not exists oncebox_attempt (
  consumer_id int          not null comment 'oncebox_consumer',
  message_id  binary(16)   not null comment 'identity of the message',
  attempts    int unsigned not null comment 'tries counted, in transactions of their own',
  history     mediumtext character set utf8mb4 collate utf8mb4_bin not null comment 'JSON array of {at, attempt, error}, oldest first',
  updated_at  datetime(6)  not null comment 'last try, UTC',
  primary key (consumer_id, message_id) comment 'serves: counting on suspicion'
) engine = InnoDB default charset = utf8mb4 comment = 'oncebox: tries of messages under suspicion; gone with success';

create table if not exists oncebox_waiting (
  sequence     bigint          not null auto_increment comment 'order within a key',
  consumer_id  int             not null comment 'oncebox_consumer',
  state        varchar(16) character set ascii collate ascii_bin not null comment 'waiting or dead',
  lane_id      binary(16)      null     comment 'first 16 bytes of SHA-256 of topic and key while the row orders its key; null: no key, or a dead row that holds nothing',
  due_at       datetime(6)     null     comment 'a head is tried from then on, UTC; null: stands behind another one, or is dead',
  lease        binary(16)      null     comment 'token of the process that tries it now; until due_at',
  message_id   binary(16)      not null comment 'identity',
  id_text      mediumtext character set utf8mb4 collate utf8mb4_bin not null comment 'the id as it stood in the message',
  content_hash binary(16)      not null comment 'as in the inbox',
  dead_hash    binary(16)      null     comment 'the content hash while dead: makes dead deliveries unique',
  topic        varbinary(255)  not null comment 'topic',
  `key`        mediumblob      null     comment 'key, any bytes',
  kind         mediumblob      not null comment 'kind; empty where the message has none',
  headers      mediumtext character set utf8mb4 collate utf8mb4_bin not null comment 'JSON array of [name, text] or [name, hex, "hex"]',
  payload      longblob        not null comment 'bytes',
  tombstone    boolean         not null comment 'a Kafka record with a null value',
  content_type mediumblob      null     comment 'content type',
  source       mediumblob      not null comment 'source',
  message_time datetime(6)     null     comment 'time of the message, UTC',
  traceparent  varchar(55)  character set ascii collate ascii_bin null comment 'W3C trace context',
  tracestate   varchar(512) character set ascii collate ascii_bin null comment 'W3C trace context, state of vendors',
  place        mediumblob      not null comment 'topic or queue it was delivered from',
  partition_no int             not null comment 'partition; 0 on RabbitMQ',
  offset_no    bigint          not null comment 'offset; delivery tag on RabbitMQ',
  attempts     int unsigned    not null comment 'tries counted',
  reason       varbinary(64)   null     comment 'why it is dead',
  error        mediumtext character set utf8mb4 collate utf8mb4_bin null comment 'what the last try said',
  history      mediumtext character set utf8mb4 collate utf8mb4_bin not null comment 'JSON array of {at, attempt, error}, oldest first',
  stored_at    datetime(6)     not null comment 'when it was stored, UTC',
  dead_at      datetime(6)     null     comment 'when it became dead, UTC',
  primary key (sequence) comment 'serves: finish, postpone, bury by exact row',
  key waiting_lane (consumer_id, lane_id, sequence) comment 'serves: which keys are blocked, heads, the next of a key, the sweep (loose scan)',
  key waiting_due (consumer_id, due_at) comment 'serves: leasing due heads, and when the next one is due',
  key waiting_state (state, consumer_id, sequence) comment 'serves: dead list, counts',
  key waiting_message_id (message_id) comment 'serves: explain and dead show',
  unique key waiting_dead_once (consumer_id, message_id, dead_hash) comment 'serves: a dead delivery that comes again is the same one',
  constraint oncebox_waiting_state_known check (state in ('waiting', 'dead')),
  constraint oncebox_waiting_dead_whole check ((state = 'dead') = (dead_hash is not null)),
  constraint oncebox_waiting_dead_reason check ((state = 'dead') = (reason is not null)),
  constraint oncebox_waiting_dead_since check ((state = 'dead') = (dead_at is not null)),
  constraint oncebox_waiting_dead_never_due check (state <> 'dead' or (due_at is null and lease is null)),
  constraint oncebox_waiting_lease_ends check (lease is null or due_at is not null)
) engine = InnoDB default charset = utf8mb4
  comment = 'oncebox: messages of consumers that wait for a retry or behind one, and dead ones';

create table if not exists oncebox_assignment (
  consumer_id  int            not null comment 'oncebox_consumer',
  topic        varbinary(255) not null comment 'topic',
  partition_no int            not null comment 'partition',
  state        varchar(16) character set ascii collate ascii_bin not null comment 'open since its assignment, closed by a clean end',
  owner        binary(16)     comment 'token of the assignment that holds it; none after a clean end',
  topic_id     varchar(64) character set ascii collate ascii_bin comment 'which topic of this name it was, where the broker tells: one made anew has another',
  next_offset  bigint         comment 'everything before this offset is done; written soon after, never before',
  id_rule      text character set utf8mb4 collate utf8mb4_bin comment 'the id rule of the consumer when next_offset was written',
  changed_at   datetime(6)    not null comment 'last change, UTC',
  primary key (consumer_id, topic, partition_no) comment 'serves: whether the last owner ended cleanly',
  constraint oncebox_assignment_state_known check (state in ('open', 'closed'))
) engine = InnoDB default charset = utf8mb4 comment = 'oncebox: partitions assigned to consumers, and up to where they are done';

create table if not exists oncebox_email (
  email_id   bigint         not null auto_increment comment 'row number',
  unique_key varbinary(255) not null comment 'one row per effect; the Message-ID is made from it',
  recipient  text character set utf8mb4 collate utf8mb4_bin not null comment 'address',
  subject    text character set utf8mb4 collate utf8mb4_bin not null comment 'subject line',
  body       longtext character set utf8mb4 collate utf8mb4_bin not null comment 'plain text',
  state      varchar(16) character set ascii collate ascii_bin not null comment 'pending, sent or failed',
  due_at     datetime(6)    null     comment 'a pending row is sent from then on, UTC; null: sent or failed',
  lease      binary(16)     null     comment 'token of the sender that has it now; until due_at',
  attempts   int unsigned   not null comment 'tries counted',
  possibly_sent int unsigned not null default 0 comment 'tries that may each have arrived: their answer was lost, or their sender died',
  error      text character set utf8mb4 collate utf8mb4_bin null comment 'what the last try said',
  created_at datetime(6)    not null comment 'when it was stored, UTC',
  settled_at datetime(6)    null     comment 'when it was sent or refused for good, UTC',
  has_content boolean       not null default true comment 'false: its time is over, and recipient, subject, body and error are blank',
  primary key (email_id) comment 'serves: settling by exact row',
  unique key email_unique_key (unique_key) comment 'serves: one row per effect',
  key email_due (due_at) comment 'serves: leasing due rows, counting pending ones',
  key email_settled (has_content, settled_at) comment 'serves: blanking, and then deleting, what was settled first',
  constraint oncebox_email_state_known check (state in ('pending', 'sent', 'failed')),
  constraint oncebox_email_pending_is_due check ((state = 'pending') = (due_at is not null)),
  constraint oncebox_email_settled_when check ((state = 'pending') = (settled_at is null))
) engine = InnoDB default charset = utf8mb4 comment = 'oncebox: e-mails, sent by a sender process';

create table if not exists oncebox_audit (
  audit_id   bigint         not null auto_increment comment 'row number',
  at         datetime(6)    not null comment 'when, UTC',
  actor      varchar(255)   character set utf8mb4 collate utf8mb4_bin not null comment 'who',
  reason     text           character set utf8mb4 collate utf8mb4_bin not null comment 'why',
  act        varchar(32)    character set ascii collate ascii_bin not null comment 'redrive, redrive-as or discard',
  place      varbinary(255) not null comment 'outbox, or the name of the consumer',
  number     varchar(32)    character set ascii collate ascii_bin not null comment 'its number in dead list: o<position> or c<sequence>',
  message_id binary(16)     not null comment 'its id before the act',
  new_id     binary(16)     null     comment 'redrive-as: its id from then on',
  detail     mediumtext     character set utf8mb4 collate utf8mb4_bin not null comment 'what it was dead for',
  primary key (audit_id) comment 'serves: the history of acts, newest last',
  key audit_message_id (message_id) comment 'serves: explain, what was done with a message',
  constraint oncebox_audit_act check (act in ('redrive', 'redrive-as', 'discard'))
) engine = InnoDB default charset = utf8mb4 comment = 'oncebox: what operators did';

insert ignore into oncebox_migration (version, description, serves_from, applied_at) values (1, 'tables', 1, utc_timestamp(6));
