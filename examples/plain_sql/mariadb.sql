-- Messages from plain SQL, on MariaDB and MySQL. Any client of any language can do this; here it is the command line:
--
--     mariadb --host 127.0.0.1 --user shop --password shop < examples/plain_sql/mariadb.sql
--
-- The procedure is always there. Where the server allows functions, this is shorter and works in any statement:
--
--     select oncebox_enqueue('invoices', account_id, 'invoice.issued', payload, null, null, null) from ...

create table if not exists invoice (
    invoice_id   varchar(64) primary key,
    account_id   varchar(64) not null,
    amount_minor bigint      not null
);

-- Business row and message in one transaction: both or neither.
start transaction;
insert into invoice (invoice_id, account_id, amount_minor) values ('inv-1', 'acc-7', 1999);
-- Topic, key, kind, payload, content type, headers, message id; null for what is left out. The id comes back in @id.
call oncebox_enqueue_p('invoices', 'acc-7', 'invoice.issued', '{"invoiceId":"inv-1","amountMinor":1999}',
                       null, '{"tenant":"t1"}', null, @id);
commit;

-- More than one in a transaction.
start transaction;
insert into invoice (invoice_id, account_id, amount_minor) values ('inv-2', 'acc-8', 500), ('inv-3', 'acc-7', 700);
call oncebox_enqueue_p('invoices', 'acc-8', 'invoice.issued', json_object('invoiceId', 'inv-2', 'amountMinor', 500),
                       null, '{"tenant":"t1"}', null, @id);
call oncebox_enqueue_p('invoices', 'acc-7', 'invoice.issued', json_object('invoiceId', 'inv-3', 'amountMinor', 700),
                       null, '{"tenant":"t1"}', null, @id);
commit;

-- What is rolled back was never there: no row, no message.
start transaction;
insert into invoice (invoice_id, account_id, amount_minor) values ('inv-4', 'acc-7', 1);
call oncebox_enqueue_p('invoices', 'acc-7', 'invoice.issued', '{"invoiceId":"inv-4"}', null, null, null, @id);
rollback;
