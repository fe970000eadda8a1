-- The tables of the payments service, on SQLite and PostgreSQL alike. A real service has them in its own migrations.

create table if not exists payment (
    payment_id   varchar(64) primary key,
    account_id   varchar(64) not null,
    amount_minor bigint      not null,
    currency     varchar(3)  not null
);

-- It has no unique key on purpose: only the inbox keeps a second pair out, which is what this
-- example shows. Give a ledger of your own a key, here (payment_id, account_id), and write `on
-- conflict do nothing` in its handler. Without it the same payment under a second message id, as
-- after `oncebox dead redrive --new-id`, is booked twice.
create table if not exists ledger_entry (
    payment_id   varchar(64) not null,
    account_id   varchar(64) not null,
    amount_minor bigint      not null
);

-- What the provider is to be told. A row is pending until the provider's answer has been seen.
create table if not exists provider_notification (
    provider_key varchar(128) primary key,             -- the provider recognises a repeated request by it
    body         text         not null,                -- the same bytes with every try
    state        varchar(16)  not null default 'pending' check (state in ('pending', 'delivered', 'refused')),
    attempts     bigint       not null default 0,      -- counted before each try, so that a crash counts too
    reference    text,                                 -- what the provider calls it
    error        text                                  -- why the last try did not succeed
);

create index if not exists provider_notification_pending on provider_notification (attempts, provider_key)
    where state = 'pending';
