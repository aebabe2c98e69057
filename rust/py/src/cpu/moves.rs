//! Copies of blocks between the memory of torch tensors.
#![expect(unsafe_code, reason = "addresses from Python become pointers")]

use numpy::{PyReadonlyArray2, PyUntypedArrayMethods};
use pagedserve_core::error::Error;
use pagedserve_cpu::moves::{self as kernel, Pools};
use pyo3::prelude::*;

use crate::cpu::{on_threads, size};
use crate::error::OrRaise;
use crate::gateway::Work;

/// Addresses, block counts and block bytes of two pools.
type PoolPair = (usize, i64, usize, i64, i64);

/// Copy blocks in every layer; all sources are read before any destination is written.
///
/// Args:
///     layers: For each layer: address and number of blocks of the source pool, the same of the
///         destination pool, bytes per block.
///     pairs: Source and destination blocks, int64 ``[n, 2]``; destinations are distinct.
///     num_threads: Number of threads, the caller's included.
///
/// Raises:
///     ``StepError``: A block outside of its pool, or pairs that are not contiguous.
#[pyfunction]
#[pyo3(signature = (*, layers, pairs, num_threads = 1))]
#[expect(clippy::needless_pass_by_value, reason = "what PyO3 makes of a list")]
pub(crate) fn copy_blocks(
    layers: Vec<PoolPair>,
    pairs: PyReadonlyArray2<'_, i64>,
    num_threads: i64,
) -> PyResult<()> {
    let py = pairs.py();
    let layers = layers.iter().map(|layer| pools(*layer)).collect::<PyResult<Vec<_>>>()?;
    let refusal = || Error::Arrays("pairs must be contiguous, two block ids a row".into());
    // A transposed array is contiguous too, in the other order.
    if !pairs.is_c_contiguous() || pairs.shape()[1] != 2 {
        return Err(refusal()).or_raise();
    }
    let (rows, _) = pairs.as_slice().map_err(|_| refusal()).or_raise()?.as_chunks::<2>();
    let block = |id: i64| size("a block of pairs", id);
    let pairs = rows.iter().map(|[from, to]| Ok((block(*from)?, block(*to)?)));
    let pairs = pairs.collect::<PyResult<Vec<_>>>()?;
    let block_bytes = layers.iter().map(|pools| pools.block_bytes).max().unwrap_or(0);
    let work = Work::numbers(&[pairs.len(), layers.len(), block_bytes / 4]);
    on_threads(py, num_threads, None, work, move |execution| {
        // SAFETY: the caller promises, as the stub says, that the addresses are those of live
        // tensors of these sizes; everything else is checked.
        unsafe { kernel::copy_blocks(&layers, &pairs, execution) }
    })
}

fn pools(layer: PoolPair) -> PyResult<Pools> {
    let (source, num_sources, destination, num_destinations, block_bytes) = layer;
    Ok(Pools {
        source: std::ptr::with_exposed_provenance(source),
        num_sources: size("num_sources", num_sources)?,
        destination: std::ptr::with_exposed_provenance_mut(destination),
        num_destinations: size("num_destinations", num_destinations)?,
        block_bytes: size("block_bytes", block_bytes)?,
    })
}
