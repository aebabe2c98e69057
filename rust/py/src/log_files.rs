//! Files of a decision log: one file, or a directory with files of bounded size.
//!
//! In a directory the files of a log are `decisions-RRRR-PPPPP.jsonl`: the number of the log, one
//! more than that of any log found there, and that of the part.  They are a log only together, from
//! the first.  Invariants:
//!
//! 1. A line lies in one file.
//! 2. A file begins only once `max_bytes` allows another: the oldest files are deleted first.
//!
//! Costs: those of a `BufWriter`; one listing of the directory per file.

use std::fs::{self, File, OpenOptions};
use std::io::{self, BufWriter, ErrorKind, Write};
use std::path::{Path, PathBuf};

/// Number of files in a full directory.
const FILES: u64 = 16;

/// The files of one decision log.
#[derive(Debug)]
pub(crate) struct LogFiles {
    file: BufWriter<File>,
    parts: Option<Parts>,
}

/// A log in a directory.
#[derive(Debug)]
struct Parts {
    directory: PathBuf,
    log: u32,
    part: u32,
    max_bytes: u64,
    /// Number of the last part.
    num_bytes: u64,
    is_line_whole: bool,
}

impl LogFiles {
    pub(crate) const DEFAULT_MAX_BYTES: u64 = 1 << 30;

    /// Begins a log: in the file `path`, or in new files if it is a directory.
    ///
    /// # Errors
    /// The I/O error of creating the file.
    pub(crate) fn create(path: &Path, max_bytes: u64) -> io::Result<Self> {
        if !path.is_dir() {
            return Ok(Self { file: BufWriter::new(File::create(path)?), parts: None });
        }
        let last = logs_in(path)?.last().map_or(0, |(log, _, _)| *log);
        let directory = path.to_owned();
        let mut parts = Parts {
            directory,
            log: last + 1,
            part: 0,
            max_bytes,
            num_bytes: 0,
            is_line_whole: true,
        };
        Ok(Self { file: BufWriter::new(parts.begin_next()?), parts: Some(parts) })
    }
}

impl Write for LogFiles {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if let Some(parts) = self.parts.as_mut().filter(|parts| parts.is_full()) {
            self.file.flush()?;
            self.file = BufWriter::new(parts.begin_next()?);
        }
        let written = self.file.write(bytes)?;
        if let Some(parts) = &mut self.parts {
            parts.num_bytes += written as u64;
            parts.is_line_whole = bytes[..written].last() == Some(&b'\n');
        }
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}

impl Parts {
    fn file_bytes(&self) -> u64 {
        self.max_bytes / FILES
    }

    fn is_full(&self) -> bool {
        self.is_line_whole && self.num_bytes >= self.file_bytes()
    }

    /// Deletes the oldest files until the next part fits, and creates it.
    fn begin_next(&mut self) -> io::Result<File> {
        self.part += 1;
        self.num_bytes = 0;
        let mut files = logs_in(&self.directory)?;
        while let Some((_, _, path)) = files.first() {
            // A file that another process has removed meanwhile counts 0 bytes.
            let size_of = |path: &PathBuf| fs::metadata(path).map_or(0, |about| about.len());
            let num_bytes: u64 = files.iter().map(|(_, _, path)| size_of(path)).sum();
            if num_bytes + self.file_bytes() <= self.max_bytes {
                break;
            }
            match fs::remove_file(path) {
                Err(error) if error.kind() != ErrorKind::NotFound => return Err(error),
                _ => {}
            }
            files.remove(0);
        }
        loop {
            let name = format!("decisions-{:04}-{:05}.jsonl", self.log, self.part);
            let file =
                OpenOptions::new().write(true).create_new(true).open(self.directory.join(name));
            match file {
                // Another process began a log in the same moment.
                Err(error) if error.kind() == ErrorKind::AlreadyExists && self.part == 1 => {
                    self.log += 1;
                }
                file => return file,
            }
        }
    }
}

/// Lists the files of logs in a directory, oldest first: number of the log, of the part, path.
fn logs_in(directory: &Path) -> io::Result<Vec<(u32, u32, PathBuf)>> {
    let mut found = Vec::new();
    for entry in fs::read_dir(directory)? {
        let path = entry?.path();
        let name = path.file_name().and_then(|name| name.to_str());
        if let Some((log, part)) = name.and_then(numbers) {
            found.push((log, part, path));
        }
    }
    found.sort();
    Ok(found)
}

/// Parses the numbers in a file's name, if it is that of a log.
fn numbers(name: &str) -> Option<(u32, u32)> {
    let (log, part) = name.strip_prefix("decisions-")?.strip_suffix(".jsonl")?.split_once('-')?;
    Some((log.parse().ok()?, part.parse().ok()?))
}
