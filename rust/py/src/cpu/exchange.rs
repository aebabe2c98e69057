//! Sums over processes: the binding of [`pagedserve_cpu::exchange`].
#![expect(unsafe_code, reason = "addresses from Python become pointers")]

use std::time::Duration;

use pagedserve_core::error::Error;
use pagedserve_cpu::exchange::Exchange;
use pyo3::prelude::*;

use crate::cpu::{dtype_of, size};
use crate::error::{OrRaise, to_py};
use crate::gateway::{Locked, Work};

/// Collective operations of one rank over memory that all ranks of this machine map.
///
/// Ranks make the same calls in the same order.  A call that returns False timed out while it
/// waited for a rank, or was interrupted by a signal: repeat it with the same arguments.
///
/// Args:
///     memory: Address of ``num_bytes(num_ranks, piece_bytes)``, a multiple of 64, zeroed before
///         the first rank starts.
///     rank: Rank of this process.
///     num_ranks: Number of ranks.
///     piece_bytes: Bytes per exchange, a multiple of 64.
///
/// Raises:
///     ``StepError``: Arguments out of range.
#[pyclass(frozen, module = "pagedserve._core.cpu")]
pub(crate) struct RankExchange(Locked<Exchange>);

#[pymethods]
impl RankExchange {
    #[new]
    #[pyo3(signature = (memory, *, rank, num_ranks, piece_bytes))]
    fn new(memory: usize, rank: i64, num_ranks: i64, piece_bytes: i64) -> PyResult<Self> {
        let memory = std::ptr::with_exposed_provenance_mut(memory);
        let rank = (size("rank", rank)?, size("num_ranks", num_ranks)?);
        let piece_bytes = size("piece_bytes", piece_bytes)?;
        // SAFETY: the caller promises that the memory is mapped while this lives.
        let exchange = unsafe { Exchange::new(memory, rank, piece_bytes) }.or_raise()?;
        Ok(Self(Locked::new(exchange)))
    }

    /// Return the bytes of memory that the ranks need.
    #[staticmethod]
    #[pyo3(signature = (*, num_ranks, piece_bytes))]
    fn num_bytes(num_ranks: i64, piece_bytes: i64) -> PyResult<usize> {
        let num_ranks = size("num_ranks", num_ranks)?;
        Ok(Exchange::num_bytes(num_ranks, size("piece_bytes", piece_bytes)?))
    }

    /// Sum numbers over the ranks in place (all-reduce), in float32; all get the same sums.
    ///
    /// Args:
    ///     values: Address of the numbers.
    ///     num: Number of numbers.
    ///     dtype: Type of the numbers.
    ///     patience: Timeout in seconds.
    #[pyo3(signature = (values, num, dtype, *, patience))]
    fn sum(
        &self,
        py: Python<'_>,
        values: usize,
        num: i64,
        dtype: &str,
        patience: f64,
    ) -> PyResult<bool> {
        let (num, dtype) = (size("num", num)?, dtype_of("dtype", dtype)?);
        let patience = seconds(patience)?;
        self.0.act(
            py,
            |_| Work::LONG,
            |exchange| {
                let values = std::ptr::with_exposed_provenance_mut(values);
                // SAFETY: the caller promises that the numbers exist.
                unsafe { exchange.sum(values, num, dtype, patience) }
            },
        )
    }

    /// Concatenate the bytes of all ranks (all-gather).
    ///
    /// Args:
    ///     values: Address of this rank's bytes.
    ///     output: Address of ``num_ranks * num_bytes`` bytes.
    ///     num_bytes: Number of bytes of each rank.
    ///     patience: Timeout in seconds.
    #[pyo3(signature = (values, output, num_bytes, *, patience))]
    fn gather(
        &self,
        py: Python<'_>,
        values: usize,
        output: usize,
        num_bytes: i64,
        patience: f64,
    ) -> PyResult<bool> {
        let (num_bytes, patience) = (size("num_bytes", num_bytes)?, seconds(patience)?);
        self.0.act(
            py,
            |_| Work::LONG,
            |exchange| {
                let values = std::ptr::with_exposed_provenance(values);
                let output = std::ptr::with_exposed_provenance_mut(output);
                // SAFETY: the caller promises that both exist.
                Ok::<_, Error>(unsafe { exchange.gather((values, output), num_bytes, patience) })
            },
        )
    }
}

/// Converts a timeout.
pub(crate) fn seconds(timeout: f64) -> PyResult<Duration> {
    Duration::try_from_secs_f64(timeout)
        .map_err(|error| to_py(&Error::Arrays(format!("seconds to wait are {timeout}: {error}"))))
}
