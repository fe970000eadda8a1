//! Topics of the broker in memory: partitions and their records.

use chrono::{DateTime, Utc};
use sha2::{Digest, Sha256};

/// One record of a partition.
#[derive(Debug, Clone)]
pub(super) struct Record {
    pub(super) key: Option<Vec<u8>>,
    pub(super) headers: Vec<(String, Vec<u8>)>,
    pub(super) payload: Option<Vec<u8>>,
    pub(super) appended_at: DateTime<Utc>,
}

/// A topic: its id, which also decides how shares are spread, and its partitions.
#[derive(Debug)]
pub(super) struct Topic {
    pub(super) id: i64,
    pub(super) partitions: Vec<Vec<Record>>,
}

impl Topic {
    pub(super) fn new(id: i64, partitions: usize) -> Self {
        Self { id, partitions: vec![Vec::new(); partitions] }
    }

    /// Appends to the partition that the hash of `hashed` selects. Returns partition and offset.
    pub(super) fn append(&mut self, hashed: &[u8], record: Record) -> (i32, i64) {
        let digest = Sha256::digest(hashed);
        let number = usize::from(u16::from_be_bytes([digest[0], digest[1]])) % self.partitions.len();
        let partition = &mut self.partitions[number];
        partition.push(record);
        (i32::try_from(number).unwrap_or(i32::MAX), end(partition) - 1)
    }

    /// The records of a partition; none where there is no such partition.
    pub(super) fn partition(&self, number: i32) -> &[Record] {
        usize::try_from(number)
            .ok()
            .and_then(|number| self.partitions.get(number))
            .map(Vec::as_slice)
            .unwrap_or_default()
    }
}

/// The offset that the next record of a partition gets.
pub(super) fn end(partition: &[Record]) -> i64 {
    i64::try_from(partition.len()).unwrap_or(i64::MAX)
}
