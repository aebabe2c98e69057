//! Whole blocks of many pools, copied in one call.
//!
//! # Invariant
//!
//! All sources of a pool are read before its first destination is written, also where a block is
//! both.
//!
//! # Costs
//!
//! Each byte is read once and written once; twice where a destination is also a source, which can
//! be within a pool alone.
#![expect(unsafe_code, reason = "pools are addresses of tensors")]

use crate::error::{Error, Result};
use crate::team::Execution;

// SAFETY: any thread may hold addresses; the caller of a kernel upholds the rest.
unsafe impl Send for Pools {}

/// Two pools of a layer, or one of them twice: blocks go from one to the other.
#[derive(Clone, Copy, Debug)]
pub struct Pools {
    /// `[num_sources, block_bytes]`.
    pub source: *const u8,
    /// Number of blocks of the source.
    pub num_sources: usize,
    /// `[num_destinations, block_bytes]`.
    pub destination: *mut u8,
    /// Number of blocks of the destination.
    pub num_destinations: usize,
    /// Bytes of a block.
    pub block_bytes: usize,
}

/// Copies the blocks of each pair, source and destination, in the pools of every layer.
/// Destinations are distinct.
///
/// # Errors
/// A block that a pool does not have, blocks of nothing.
///
/// # Safety
/// The pools exist, are the same or do not overlap, and no other code accesses them during the
/// call.
pub unsafe fn copy_blocks(
    layers: &[Pools],
    pairs: &[(usize, usize)],
    execution: &Execution<'_>,
) -> Result<()> {
    for pools in layers {
        check(pools, pairs)?;
    }
    let shared = Layers(layers);
    let is_within = layers.iter().any(|pools| pools.source == pools.destination.cast_const());
    if is_within && is_chained(pairs) {
        // SAFETY: the caller's promise, and the blocks were checked.
        execution.for_each(layers.len(), &|layer| unsafe { shared.get(layer).stage(pairs) });
    } else {
        execution.for_each(layers.len() * pairs.len(), &|item| {
            let (from, to) = pairs[item % pairs.len()];
            // SAFETY: the same; no thread reads a destination, and each is written once.
            unsafe { shared.get(item / pairs.len()).copy(from, to) };
        });
    }
    Ok(())
}

fn check(pools: &Pools, pairs: &[(usize, usize)]) -> Result<()> {
    let (num_sources, num_destinations) = (pools.num_sources, pools.num_destinations);
    if pools.block_bytes == 0 {
        return Err(Error("block_bytes must be at least 1; got 0".into()));
    }
    match pairs.iter().find(|(from, to)| *from >= num_sources || *to >= num_destinations) {
        None => Ok(()),
        Some((from, to)) => Err(Error(format!(
            "a pair must name blocks below {num_sources} and {num_destinations}; got {from}, {to}"
        ))),
    }
}

/// Whether a destination is also a source.
fn is_chained(pairs: &[(usize, usize)]) -> bool {
    let mut sources: Vec<usize> = pairs.iter().map(|(from, _)| *from).collect();
    sources.sort_unstable();
    pairs.iter().any(|(_, to)| sources.binary_search(to).is_ok())
}

/// Pointers that threads share: each writes distinct blocks.
struct Layers<'a>(&'a [Pools]);

// SAFETY: see above.
unsafe impl Sync for Layers<'_> {}

impl Layers<'_> {
    fn get(&self, layer: usize) -> Pools {
        self.0[layer]
    }
}

impl Pools {
    unsafe fn copy(self, from: usize, to: usize) {
        let size = self.block_bytes;
        // SAFETY: both blocks exist, and are not the same.
        unsafe {
            let source = self.source.add(from * size);
            self.destination.add(to * size).copy_from_nonoverlapping(source, size);
        }
    }

    unsafe fn stage(self, pairs: &[(usize, usize)]) {
        let size = self.block_bytes;
        let mut staged = Vec::with_capacity(pairs.len() * size);
        for (from, _) in pairs {
            // SAFETY: the block exists, and nothing is written yet.
            let block = unsafe { std::slice::from_raw_parts(self.source.add(from * size), size) };
            staged.extend_from_slice(block);
        }
        for ((_, to), block) in pairs.iter().zip(staged.chunks_exact(size)) {
            // SAFETY: the block exists, and what is copied lies elsewhere.
            unsafe {
                self.destination.add(to * size).copy_from_nonoverlapping(block.as_ptr(), size);
            }
        }
    }
}
