-- Messages from plain SQL, on PostgreSQL. Any client of any language can do this; here it is psql:
--
--     psql "$ONCEBOX_DATABASE__URL" --set ON_ERROR_STOP=1 --file examples/plain_sql/postgres.sql
--
-- A role that does not own the schema needs `grant oncebox_app to the_role`.

create table if not exists invoice (
    invoice_id   text   primary key,
    account_id   text   not null,
    amount_minor bigint not null
);

-- Business row and message in one transaction: both or neither.
begin;
insert into invoice (invoice_id, account_id, amount_minor) values ('inv-1', 'acc-7', 1999);
select oncebox.enqueue(topic => 'invoices', key => 'acc-7', kind => 'invoice.issued',
                       payload => '{"invoiceId":"inv-1","amountMinor":1999}',
                       headers => '{"tenant":"t1"}');
commit;

-- Many at once: a message for each row, in one statement.
begin;
with issued as (
    insert into invoice (invoice_id, account_id, amount_minor)
    values ('inv-2', 'acc-8', 500), ('inv-3', 'acc-7', 700)
    returning *
)
select oncebox.enqueue(topic => 'invoices', key => account_id, kind => 'invoice.issued',
                       payload => jsonb_build_object('invoiceId', invoice_id, 'amountMinor', amount_minor),
                       headers => '{"tenant":"t1"}')
from issued;
commit;

-- What is rolled back was never there: no row, no message.
begin;
insert into invoice (invoice_id, account_id, amount_minor) values ('inv-4', 'acc-7', 1);
select oncebox.enqueue(topic => 'invoices', key => 'acc-7', kind => 'invoice.issued', payload => '{"invoiceId":"inv-4"}');
rollback;
