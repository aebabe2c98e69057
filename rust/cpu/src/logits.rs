//! Rows of logits, in the form that the sampling kernels read.
#![expect(unsafe_code, reason = "logits are the address of a tensor")]

use crate::error::{Error, Result};
use crate::number::DType;

/// Rows of logits.
#[derive(Clone, Copy, Debug)]
pub struct Logits<'a> {
    /// Address of `[.., vocab_size]`, rows side by side.
    pub address: *const f32,
    /// Logits of a row.
    pub vocab_size: usize,
    /// Indices of the rows that are read; None for the first ones.
    pub rows: Option<&'a [usize]>,
}

// SAFETY: logits are only read.
unsafe impl Sync for Logits<'_> {}

impl Logits<'_> {
    /// Refuses logits that cannot be `num_rows` rows.
    pub(crate) fn check(&self, num_rows: usize) -> Result<()> {
        if let Some(rows) = self.rows.filter(|rows| rows.len() != num_rows) {
            return Err(Error(format!("rows must have {num_rows} entries; got {}", rows.len())));
        }
        if num_rows == 0 {
            return Ok(());
        }
        DType::Float32.check_address("logits", self.address.cast())
    }

    /// The logits of one of the rows.
    ///
    /// # Safety
    /// The logits exist, and are not written.
    pub(crate) unsafe fn row(&self, row: usize) -> &[f32] {
        let place = self.rows.map_or(row, |rows| rows[row]);
        // SAFETY: the caller's promise.
        unsafe {
            let first = self.address.add(place * self.vocab_size);
            std::slice::from_raw_parts(first, self.vocab_size)
        }
    }
}
