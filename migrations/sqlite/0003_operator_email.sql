-- What operators did, and e-mails that handlers left to be sent.
--
-- Times are whole milliseconds since 1970 UTC, by the database's clock.

-- One row for each message that an operator acted on.
create table oncebox_audit (
    audit_id   integer primary key autoincrement,      -- order
    at         integer not null,                       -- when
    actor      text not null,                          -- who
    reason     text not null,                          -- why
    act        text not null,                          -- redrive, redrive-as, discard
    place      text not null,                          -- outbox, or the name of the consumer
    number     text not null,                          -- the message's number in `dead list`
    message_id text not null,                          -- its id before the act
    new_id     text,                                   -- redrive-as: its id from then on
    detail     text not null,                          -- what it was dead for
    check (act in ('redrive', 'redrive-as', 'discard'))
);

-- Serves "what was done with this message".
create index oncebox_audit_message_id on oncebox_audit (message_id);

-- E-mails, committed together with the effect that they tell of.
create table oncebox_email (
    email_id   integer primary key autoincrement,      -- row number
    unique_key text not null unique,                   -- one row for each effect; the Message-ID is made from it
    recipient  text not null,                          -- address
    subject    text not null,                          -- subject line
    body       text not null,                          -- plain text
    state      text not null default 'pending',        -- pending, sent, failed
    attempts   integer not null default 0,             -- tries
    possibly_sent integer not null default 0,          -- tries that may each have arrived: their answer was lost, or their sender died
    due_at     integer,                                -- pending: when it is tried next, or its lease ends
    lease      blob,                                   -- who sends it: a random token of 16 bytes
    error      text,                                   -- what the server said last
    created_at integer not null,                       -- when it was stored
    settled_at integer,                                -- when it was sent or failed
    has_content integer not null default 1,            -- 0: its time is over; recipient, subject, body and error are blank
    check (has_content in (0, 1)),
    check (state in ('pending', 'sent', 'failed')),
    check ((state = 'pending') = (due_at is not null) and (state = 'pending') = (settled_at is null)),
    check (lease is null or state = 'pending')
);

-- Serves the lease of due e-mails.
create index oncebox_email_due on oncebox_email (due_at) where state = 'pending';
-- Serves blanking, and then deleting, what was settled first.
create index oncebox_email_settled on oncebox_email (has_content, settled_at) where state <> 'pending';
