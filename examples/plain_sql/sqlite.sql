-- Messages from plain SQL, on SQLite 3.38 or later. Any client of any language can do this; here it is the command line:
--
--     sqlite3 -bail oncebox.db < examples/plain_sql/sqlite.sql
--
-- SQLite has no stored functions: the door is an insert; defaults and triggers do the rest.

-- Others write too: wait for them.
pragma busy_timeout = 30000;

create table if not exists invoice (
    invoice_id   text    primary key,
    account_id   text    not null,
    amount_minor integer not null
);

-- Business row and message in one transaction: both or neither. `immediate` takes the write lock first, where waiting works.
begin immediate;
insert into invoice (invoice_id, account_id, amount_minor) values ('inv-1', 'acc-7', 1999);
insert into oncebox_outbox (topic, key, kind, payload, headers)
values ('invoices', 'acc-7', 'invoice.issued', '{"invoiceId":"inv-1","amountMinor":1999}', '{"tenant":"t1"}');
commit;

-- Many at once: a message for each row, in one statement.
begin immediate;
insert into invoice (invoice_id, account_id, amount_minor) values ('inv-2', 'acc-8', 500), ('inv-3', 'acc-7', 700);
insert into oncebox_outbox (topic, key, kind, payload, headers)
select 'invoices', account_id, 'invoice.issued', json_object('invoiceId', invoice_id, 'amountMinor', amount_minor),
       '{"tenant":"t1"}'
  from invoice where invoice_id in ('inv-2', 'inv-3') order by invoice_id;
commit;

-- What is rolled back was never there: no row, no message.
begin immediate;
insert into invoice (invoice_id, account_id, amount_minor) values ('inv-4', 'acc-7', 1);
insert into oncebox_outbox (topic, key, kind, payload) values ('invoices', 'acc-7', 'invoice.issued', '{"invoiceId":"inv-4"}');
rollback;
