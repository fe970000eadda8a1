//! Its books: one line of JSON for each charge or refusal, on the disk before it is answered.

use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::path::Path;

use serde::{Deserialize, Serialize};

/// What is asked for.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(crate) struct Request {
    pub(crate) amount_minor: i64,
    pub(crate) currency: String,
    pub(crate) reference: String,
}

/// A charge that was taken.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Charge {
    pub(crate) id: String,
    pub(crate) reference: String,
    pub(crate) amount_minor: i64,
    pub(crate) currency: String,
}

/// A line: what a request with a key came to. Declined where there is no charge.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Entry {
    pub(crate) key: String,
    pub(crate) request: Request,
    pub(crate) charge: Option<Charge>,
}

/// The books.
#[derive(Debug)]
pub(crate) struct Ledger {
    file: File,
    entries: Vec<Entry>,
}

impl Ledger {
    pub(crate) fn open(path: &Path) -> std::io::Result<Self> {
        let mut file = File::options().create(true).read(true).append(true).open(path)?;
        let mut entries = Vec::new();
        let mut ends_with_line = true;
        let mut reader = BufReader::new(&file);
        let mut line = String::new();
        while reader.read_line(&mut line)? > 0 {
            ends_with_line = line.ends_with('\n');
            // A line that a kill cut short was never answered.
            entries.extend(serde_json::from_str::<Entry>(&line));
            line.clear();
        }
        if !ends_with_line {
            file.write_all(b"\n")?;
        }
        Ok(Self { file, entries })
    }

    /// What a key came to first.
    pub(crate) fn first(&self, key: &str) -> Option<&Entry> {
        self.entries.iter().find(|entry| entry.key == key)
    }

    pub(crate) fn charges<'a>(&'a self, key: &'a str) -> impl Iterator<Item = &'a Charge> {
        self.entries.iter().filter(move |entry| entry.key == key).filter_map(|entry| entry.charge.as_ref())
    }

    /// How many charges there are, of how many keys.
    pub(crate) fn count(&self) -> (usize, usize) {
        let charged = || self.entries.iter().filter(|entry| entry.charge.is_some());
        let mut keys: Vec<&str> = charged().map(|entry| entry.key.as_str()).collect();
        keys.sort_unstable();
        keys.dedup();
        (charged().count(), keys.len())
    }

    pub(crate) fn declines(&mut self, key: &str, request: Request) -> std::io::Result<()> {
        self.write(Entry { key: key.to_owned(), request, charge: None })
    }

    /// Takes a charge of so much more than was asked for.
    pub(crate) fn takes(&mut self, key: &str, request: Request, more: i64) -> std::io::Result<Charge> {
        let charge = Charge {
            id: format!("ch_{}", self.entries.len() + 1),
            reference: request.reference.clone(),
            amount_minor: request.amount_minor.saturating_add(more),
            currency: request.currency.clone(),
        };
        self.write(Entry { key: key.to_owned(), request, charge: Some(charge.clone()) })?;
        Ok(charge)
    }

    fn write(&mut self, entry: Entry) -> std::io::Result<()> {
        let mut line = serde_json::to_vec(&entry)?;
        line.push(b'\n');
        self.file.write_all(&line)?;
        self.file.sync_data()?;
        self.entries.push(entry);
        Ok(())
    }
}
