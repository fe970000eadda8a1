-- The business table that deploy/compose/consumer.toml writes to. Run once, when the database is made.
create table ledger_entry (
    id                bigint generated always as identity primary key,
    entry_type        text        not null,
    source_payment_id text        not null,
    account_id        text        not null,
    amount_minor      bigint      not null,
    created_at        timestamptz not null default now(),
    -- The same payment under a second message id (enqueued again, or `oncebox dead redrive --new-id`) is a new message to the
    -- inbox; this key keeps it from being booked twice.
    unique (entry_type, source_payment_id)
);
