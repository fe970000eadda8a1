-- The business table that deploy/compose/consumer.toml writes to. Run once, when the database is made.
create table ledger_entry (
    id                bigint generated always as identity primary key,
    entry_type        text        not null,
    source_payment_id text        not null,
    account_id        text        not null,
    amount_minor      bigint      not null,
    created_at        timestamptz not null default now(),
    -- The same payment under a second message id is a new message to the inbox: enqueued again, or
    -- after `oncebox dead redrive --new-id`. This key keeps it from being booked twice.
    unique (entry_type, source_payment_id)
);
