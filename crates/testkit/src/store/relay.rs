//! Cases of the cursor: it loses no row, gives no row twice in a session, and never stalls.

use std::time::Duration;

use super::trial::{DEADLINE, Session, context, lease, new_message, payloads, read_nothing, read_rows, taken, through};
use super::{Fixture, Trial};
use oncebox::error::StoreError;
use oncebox::message::NewMessage;
use oncebox::store::{Base, LeaseRequest, Mark, Operator, Outbox, OutboxRow};

fn messages(numbers: std::ops::Range<u32>) -> Vec<NewMessage> {
    numbers.map(|number| new_message("k", number.to_string())).collect()
}

fn numbers(numbers: std::ops::Range<u32>) -> Vec<String> {
    numbers.map(|number| number.to_string()).collect()
}

/// This also holds where each read returns only some of the rows.
pub async fn rows_come_in_position_order_and_never_twice_in_a_session<F: Fixture>(trial: &Trial<F>) {
    trial.enqueue(messages(0..25)).await;
    let mut session = trial.session("a").await;
    let mut rows = Vec::new();
    let mut batches = Vec::new();
    while rows.len() < 30 {
        let read = session.read(7).await.unwrap();
        assert!(read.rows.len() <= 7);
        if batches.is_empty() {
            trial.enqueue(messages(25..30)).await;
        }
        batches.push(read.batch);
        rows.extend(read.rows);
        session.checkpoint(Mark::default()).await.unwrap();
        assert!(batches.len() < 1_000, "{} of 30 rows", rows.len());
    }
    assert!(batches.windows(2).all(|pair| pair[0] + 1 == pair[1]), "batches count up by one: {batches:?}");
    assert!(rows.windows(2).all(|pair| pair[0].position < pair[1].position));
    assert_eq!(payloads(&rows), numbers(0..30));
    read_nothing(&mut session).await;
}

/// A row is sent at least once: each new session reads it again until it is marked.
pub async fn everything_that_is_not_marked_comes_again_after_a_reopen<F: Fixture>(trial: &Trial<F>) {
    trial.enqueue(messages(0..10)).await;
    let mut session = trial.session("a").await;
    read_rows(&mut session, 10).await;
    drop(session);
    let mut session = trial.session("a").await;
    let (rows, batch) = read_rows(&mut session, 10).await;
    assert_eq!(payloads(&rows), numbers(0..10));
    session.checkpoint(through(batch)).await.unwrap();
    drop(session);
    let mut session = trial.session("a").await;
    read_nothing(&mut session).await;
    trial.enqueue(messages(10..11)).await;
    assert_eq!(payloads(&read_rows(&mut session, 1).await.0), numbers(10..11));
}

/// The cursor passes only the rows up to the marked batch, which the broker has proven.
pub async fn a_mark_covers_the_batches_up_to_it_and_no_more<F: Fixture>(trial: &Trial<F>) {
    trial.enqueue(messages(0..9)).await;
    let mut session = trial.session("a").await;
    let mut reads = Vec::new();
    while reads.iter().map(|read: &oncebox::store::ReadBatch| read.rows.len()).sum::<usize>() < 9 {
        let read = session.read(3).await.unwrap();
        session.checkpoint(Mark::default()).await.unwrap();
        reads.push(read);
    }
    let second = reads.iter().filter(|read| !read.rows.is_empty()).nth(1).unwrap().batch;
    session.checkpoint(through(second)).await.unwrap();
    drop(session);
    let mut session = trial.session("a").await;
    let (rows, batch) = read_rows(&mut session, 3).await;
    assert_eq!(payloads(&rows), numbers(6..9));
    session.checkpoint(through(batch)).await.unwrap();
    assert_eq!(trial.store.status().await.unwrap().pending, 0);
}

/// The cursor passes a position whose transaction rolled back.
pub async fn holes_of_rolled_back_transactions_never_stall<F: Fixture>(trial: &Trial<F>) {
    let mut session = trial.session("a").await;
    for round in 0..4 {
        let mut tx = trial.begin().await;
        oncebox::store::enqueue_all(&mut *tx, messages(0..3)).await.unwrap();
        tx.rollback().await.unwrap();
        trial.enqueue(messages(round..round + 1)).await;
        let (rows, batch) = read_rows(&mut session, 1).await;
        assert_eq!(payloads(&rows), numbers(round..round + 1));
        session.checkpoint(through(batch)).await.unwrap();
    }
    drop(session);
    let mut session = trial.session("a").await;
    let batch = read_nothing(&mut session).await;
    session.checkpoint(through(batch)).await.unwrap();
    assert_eq!(trial.store.status().await.unwrap().pending, 0);
}

/// Transaction A gets the lower position, and B commits first. Both rows come, also where the relay
/// is replaced in between.
pub async fn a_lower_position_that_commits_late_is_not_lost<F: Fixture>(trial: &Trial<F>) {
    if !F::CONCURRENT_WRITERS {
        return; // With a single writer, positions are in the order of the commits.
    }
    for reopen in [false, true] {
        let mut late = trial.begin().await;
        oncebox::store::enqueue(&mut *late, new_message("late", "late")).await.unwrap();
        trial.enqueue(vec![new_message("early", "early")]).await;
        let mut session = trial.session("a").await;
        let (rows, batch) = read_rows(&mut session, 1).await;
        assert_eq!(payloads(&rows), ["early"], "an open transaction holds nobody up");
        session.checkpoint(through(batch)).await.unwrap();
        read_nothing(&mut session).await;
        if reopen {
            drop(session);
            session = trial.session("a").await;
            read_nothing(&mut session).await;
        }
        oncebox::store::commit(late).await.unwrap();
        let (rows, batch) = read_rows(&mut session, 1).await;
        assert_eq!(payloads(&rows), ["late"]);
        session.checkpoint(through(batch)).await.unwrap();
        drop(session);
        let mut session = trial.session("a").await;
        let batch = read_nothing(&mut session).await;
        session.checkpoint(through(batch)).await.unwrap();
        assert_eq!(trial.store.status().await.unwrap().pending, 0);
    }
}

/// Writers commit and roll back while the relay reads, marks and is replaced by another owner.
pub async fn many_writers_at_once_lose_nothing_and_keep_each_their_order<F: Fixture>(trial: &Trial<F>) {
    const WRITERS: u32 = 4;
    const EACH: u32 = 40;
    let mut writers = tokio::task::JoinSet::new();
    for writer in 0..WRITERS {
        let store = trial.fixture.connect().await;
        writers.spawn(async move {
            let mut written = 0;
            while written < EACH {
                let mut tx = F::begin(&store).await;
                let message = new_message(&format!("w{writer}"), format!("{writer}:{written}"));
                oncebox::store::enqueue(&mut *tx, message).await.unwrap();
                if written % 5 == 4 {
                    drop(tx); // Rolled back on purpose: this row must never come.
                } else {
                    oncebox::store::commit(tx).await.unwrap();
                }
                written += 1;
            }
        });
    }
    let expected = |writer: u32| -> Vec<String> {
        (0..EACH).filter(|number| number % 5 != 4).map(|number| format!("{writer}:{number}")).collect()
    };
    let total: usize = (0..WRITERS).map(|writer| expected(writer).len()).sum();
    let mut firsts: Vec<String> = Vec::new();
    let began = std::time::Instant::now();
    let mut sessions = 0;
    while firsts.len() < total {
        assert!(began.elapsed() < 2 * DEADLINE, "{} of {total}", firsts.len());
        sessions += 1;
        let mut session = trial.take_over(&format!("owner {sessions}")).await;
        for round in 0..20 {
            // The rest is for other owners, however fast this one reads.
            if firsts.len() > sessions * total / 4 {
                break;
            }
            let read = session.read(10).await.unwrap();
            session.checkpoint(Mark::default()).await.unwrap();
            for payload in payloads(&read.rows) {
                if !firsts.contains(&payload) {
                    firsts.push(payload);
                }
            }
            // The last batches of a session are not marked, so that the next session reads them
            // again.
            if round < 17 {
                session.checkpoint(through(read.batch)).await.unwrap();
            }
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }
    assert!(sessions >= 3, "{sessions} owners");
    writers.join_all().await;
    for writer in 0..WRITERS {
        let prefix = format!("{writer}:");
        let of_writer: Vec<String> = firsts.iter().filter(|payload| payload.starts_with(&prefix)).cloned().collect();
        assert_eq!(of_writer, expected(writer));
    }
    let mut session = trial.take_over("last").await;
    loop {
        let read = session.read(100).await.unwrap();
        session.checkpoint(through(read.batch)).await.unwrap();
        if trial.store.status().await.unwrap().pending == 0 {
            break;
        }
        assert!(began.elapsed() < 2 * DEADLINE);
    }
}

/// Sets the sequence back to the first position, as after a partial restore. Rows that were sent
/// are not in the table any more.
async fn set_back<F: Fixture>(trial: &Trial<F>) {
    let sql = match F::Store::NAME {
        "sqlite" => "update sqlite_sequence set seq = 0 where name = 'oncebox_outbox'",
        "mysql" => "alter table oncebox_outbox auto_increment = 1",
        _ => "delete from oncebox.outbox; select setval('oncebox.outbox_position_seq', 1, false)",
    };
    trial.run(sql).await;
}

/// After the sequence was set back, either a door or the relay refuses with an error that names
/// `oncebox doctor --fix`, and the row is read after that command; or the row is read at once. A
/// row is never accepted and then passed over.
pub async fn r7_a_position_that_the_relay_has_passed_is_refused_or_read<F: Fixture>(trial: &Trial<F>) {
    let is_refused = |error: &StoreError| error.to_string().contains("oncebox doctor --fix");
    for count in [1, 3] {
        trial.enqueue(messages(0..9)).await;
        let mut session = trial.take_over("before").await;
        let (_, batch) = read_rows(&mut session, 9).await;
        session.checkpoint(through(batch)).await.unwrap();
        set_back(trial).await;
        assert_eq!(trial.rows("outbox").await, 0, "a row that is left would keep the sequence where it was");

        let mut tx = trial.begin().await;
        let written = match count {
            1 => oncebox::store::enqueue(&mut *tx, new_message("k", "0")).await.map(|_| ()),
            _ => oncebox::store::enqueue_all(&mut *tx, messages(0..count)).await.map(|_| ()),
        };
        let is_written = written.is_ok();
        match written {
            Ok(()) => oncebox::store::commit(tx).await.unwrap(),
            Err(error) => {
                assert!(is_refused(&error), "{error}");
                tx.rollback().await.unwrap();
            }
        }
        let read = session.read(100).await;
        match read {
            Ok(read) if is_written => assert_eq!(payloads(&read.rows), numbers(0..count)),
            Ok(_) => {}
            Err(error) => assert!(is_refused(&error), "{error}"),
        }
        drop(session);
        trial.store.mend(&context()).await.unwrap();
        if !is_written {
            trial.enqueue(messages(0..count)).await;
        }
        let mut session = trial.take_over("after").await;
        let (rows, batch) = read_rows(&mut session, usize::try_from(count).unwrap()).await;
        assert_eq!(payloads(&rows), numbers(0..count));
        session.checkpoint(through(batch)).await.unwrap();
        assert_eq!(trial.store.status().await.unwrap().pending, 0);
    }
}

/// A read returns no more rows than asked for, and says whether there are more.
pub async fn a_read_is_bounded_and_says_whether_there_is_more<F: Fixture>(trial: &Trial<F>) {
    trial.enqueue(messages(0..10)).await;
    let mut session = trial.session("a").await;
    let read = session.read(9).await.unwrap();
    assert_eq!(read.rows.len(), 9);
    assert!(read.more);
    session.checkpoint(Mark::default()).await.unwrap();
    let read = session.read(9).await.unwrap();
    assert_eq!(read.rows.len(), 1);
    assert!(!read.more);
}

/// The most bytes that a read may return in these cases.
const READ_BYTES: usize = 100_000;
const LARGEST: usize = 150_000;

/// Numbered messages: small ones, large ones, one that is larger than a read, and some with most of
/// their weight in the headers.
pub(super) fn of_all_sizes() -> Vec<NewMessage> {
    let sizes = [
        10, 20, 30_000, 40, 60_000, 60_000, 140_000, 10, 90_000, 50, 60_000, 10, 10, 70_000, 20, 33_000, 33_000, 34_000,
    ];
    let message = |(number, size): (usize, &usize)| {
        let payload: String = format!("{number} ").chars().chain(std::iter::repeat('x')).take(*size).collect();
        let message = new_message("k", payload);
        if number % 5 == 0 { message.with_header("h", "y".repeat(20_000)) } else { message }
    };
    sizes.iter().enumerate().map(message).collect()
}

/// Asserts that a read stays below its bound of bytes before its last row.
pub(super) fn within_bytes(rows: &[OutboxRow]) {
    let before_last: usize = rows.iter().rev().skip(1).map(|row| row.message.weight()).sum();
    assert!(before_last < READ_BYTES, "{before_last} bytes before the last of {} rows", rows.len());
}

/// Opens a session whose reads have the bound `READ_BYTES`.
pub(super) async fn bounded<F: Fixture>(trial: &Trial<F>) -> Session {
    F::set_lease_end(&trial.store, -1).await;
    let request = LeaseRequest { read_bytes: READ_BYTES, ..lease("bounded") };
    taken(trial.store.open(&request).await.unwrap())
}

/// The bound of bytes holds whatever number of rows is asked for: a thousand of the largest would
/// not fit into memory (G11).
pub async fn g11_a_read_gives_no_more_bytes_than_were_asked_for<F: Fixture>(trial: &Trial<F>) {
    let messages = of_all_sizes();
    trial.enqueue(messages.clone()).await;
    let mut session = bounded(trial).await;
    let (mut rows, mut reads, mut last) = (Vec::new(), 0, 0);
    while rows.len() < messages.len() {
        let read = session.read(100).await.unwrap();
        session.checkpoint(Mark::default()).await.unwrap();
        within_bytes(&read.rows);
        assert!(!read.rows.is_empty(), "one is always given");
        reads += 1;
        last = read.batch;
        rows.extend(read.rows);
        assert!(read.more || rows.len() == messages.len(), "no more after {} rows", rows.len());
    }
    assert!(reads >= 5, "only {reads} reads");
    for (row, message) in rows.iter().zip(&messages) {
        assert!(row.message.payload == message.payload && row.message.headers == message.headers);
    }
    assert!(rows.iter().all(|row| row.message.weight() < LARGEST));
    session.checkpoint(through(last)).await.unwrap();
    read_nothing(&mut session).await;
    assert_eq!(trial.store.status().await.unwrap().pending, 0);
}

/// `tidy` removes no row that is not proven, however often it runs. On PostgreSQL it drops whole
/// partitions, of which these rows fill none: tests of that adapter look at what it drops.
pub async fn tidying_never_takes_what_is_not_proven<F: Fixture>(trial: &Trial<F>) {
    trial.enqueue(messages(0..20)).await;
    let mut session = trial.session("a").await;
    let read = session.read(5).await.unwrap();
    session.checkpoint(Mark::default()).await.unwrap();
    session.checkpoint(through(read.batch)).await.unwrap();
    for _ in 0..3 {
        session.tidy().await.unwrap();
    }
    let (rows, _) = read_rows(&mut session, 15).await;
    assert_eq!(payloads(&rows), numbers(5..20));
    session.tidy().await.unwrap();
    drop(session);
    let mut session = trial.session("a").await;
    session.tidy().await.unwrap();
    assert_eq!(payloads(&read_rows(&mut session, 15).await.0), numbers(5..20));
}
