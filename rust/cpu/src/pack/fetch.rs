//! Rows of files, and those of one panel in memory.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use crate::storage::Storage;

/// Some rows of a file: output features of a layer.
#[derive(Clone, Copy, Debug)]
pub struct Rows<'a> {
    /// The file.
    pub file: &'a File,
    /// The first byte of the first row; rows lie side by side.
    pub offset: u64,
    /// Number of rows.
    pub num_rows: usize,
    /// Storage of the weights.
    pub storage: Storage,
    /// Scale of each row, in the order of the file: of [`Storage::I8Rows`], and of no other.
    pub scales: Option<&'a [f32]>,
    /// Size of heads whose halves are interleaved, element by element, as llama.cpp stores queries
    /// and keys of some families; None for rows in their order.
    pub interleaved: Option<usize>,
}

impl Rows<'_> {
    /// Index in the file of an output feature.
    #[inline]
    pub(super) fn place(&self, feature: usize) -> usize {
        let Some(size) = self.interleaved else { return feature };
        let (head, element) = (feature / size, feature % size);
        head * size + element % (size / 2) * 2 + element / (size / 2)
    }
}

/// The bytes of the rows of one panel.
pub(super) struct Fetched<'a> {
    bytes: &'a [u8],
    /// For each part the first of its rows here, and its offset; rows up to the last follow.
    starts: Vec<(usize, usize)>,
}

impl<'a> Fetched<'a> {
    /// Reads the rows of features, given as part and index in the part, with one call for each
    /// part.  The memory only grows.
    pub(super) fn read(
        parts: &[Rows<'_>],
        features: impl Iterator<Item = (usize, usize)>,
        in_features: usize,
        memory: &'a mut Vec<u8>,
    ) -> io::Result<Self> {
        // The first row and the end of each part; empty for a part without features here.
        let mut ranges = vec![(usize::MAX, 0); parts.len()];
        for (part, row) in features {
            let (place, (first, end)) = (parts[part].place(row), &mut ranges[part]);
            (*first, *end) = ((*first).min(place), (*end).max(place + 1));
        }
        let num_rows = |(first, end): (usize, usize)| end.saturating_sub(first);
        let row_bytes = |part: &Rows<'_>| part.storage.row_bytes(in_features);
        let lens =
            parts.iter().zip(&ranges).map(|(part, range)| num_rows(*range) * row_bytes(part));
        let num_bytes = lens.sum();
        if memory.len() < num_bytes {
            memory.resize(num_bytes, 0);
        }
        let (mut starts, mut end) = (Vec::with_capacity(parts.len()), 0);
        for (part, range) in parts.iter().zip(ranges) {
            let (start, row_bytes) = (end, row_bytes(part));
            end += num_rows(range) * row_bytes;
            starts.push((range.0, start));
            if end > start {
                let offset = part.offset + (range.0 * row_bytes) as u64;
                part.file.read_exact_at(&mut memory[start..end], offset)?;
            }
        }
        Ok(Self { bytes: &memory[..end], starts })
    }

    /// The bytes of a row, which is one of those read.
    #[inline]
    pub(super) fn row(&self, part: usize, place: usize, row_bytes: usize) -> &'a [u8] {
        let (first, start) = self.starts[part];
        &self.bytes[start + (place - first) * row_bytes..][..row_bytes]
    }
}
