//! Allocator without prefix caching: a free block loses its contents.
//!
//! Owns the free blocks of one tier.  Invariants:
//! 1. A block is either in the free stack, once, or used.
//! 2. `num_free() + used = num_total()`.
//!
//! Costs: every call O(1); the last freed block is allocated first, while its memory is
//! in the CPU caches.

use crate::block::BlockPool;
use crate::ids::BlockId;

/// Allocator of reference-counted blocks without prefix caching.
#[derive(Clone, Debug)]
pub struct UncachedBlockAllocator {
    pool: BlockPool,
    free: Vec<BlockId>,
}

impl UncachedBlockAllocator {
    /// An allocator over blocks `0..num_blocks`, all free; block 0 goes first.
    ///
    /// # Panics
    /// If there are 2^32 blocks or more.
    pub fn new(num_blocks: usize) -> Self {
        let end = u32::try_from(num_blocks).expect("under 2^32 blocks");
        Self { pool: BlockPool::new(num_blocks), free: (0..end).rev().map(BlockId::new).collect() }
    }

    /// Allocates a free block, or `None` when all are used.
    pub fn allocate(&mut self) -> Option<BlockId> {
        let block = self.free.pop()?;
        self.pool.acquire(block);
        Some(block)
    }

    /// Takes one more reference to a used block.
    ///
    /// # Panics
    /// If the block is free.
    pub fn fork(&mut self, block: BlockId) {
        self.pool.share(block);
    }

    /// Releases one reference; the last one frees the block.
    ///
    /// # Panics
    /// If the block is free already.
    pub fn free(&mut self, block: BlockId) {
        if self.pool.release(block) {
            self.free.push(block);
        }
    }

    /// Blocks with several references.
    pub fn num_shared(&self) -> usize {
        self.pool.num_shared()
    }

    /// References to `block`.
    pub fn ref_count(&self, block: BlockId) -> u32 {
        self.pool.ref_count(block)
    }

    /// Blocks that can be allocated now.
    pub fn num_free(&self) -> usize {
        self.free.len()
    }

    /// Blocks of the tier.
    pub fn num_total(&self) -> usize {
        self.pool.num_total()
    }

    /// Used blocks.
    pub fn num_used(&self) -> usize {
        self.pool.num_used()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// The naive model: a list of holders, one entry a reference.
        #[test]
        fn counts_follow_a_list_of_holders(steps in prop::collection::vec((0..3u8, any::<prop::sample::Index>()), 1..400)) {
            let mut allocator = UncachedBlockAllocator::new(7);
            let mut holders: Vec<BlockId> = Vec::new();
            for (step, pick) in steps {
                match step {
                    0 => {
                        let block = allocator.allocate();
                        prop_assert_eq!(block.is_none(), holders.iter().collect::<BTreeSet<_>>().len() == 7);
                        prop_assert!(block.is_none_or(|block| !holders.contains(&block)));
                        holders.extend(block);
                    }
                    1 if !holders.is_empty() => {
                        let block = holders[pick.index(holders.len())];
                        allocator.fork(block);
                        holders.push(block);
                    }
                    2 if !holders.is_empty() => {
                        allocator.free(holders.swap_remove(pick.index(holders.len())));
                    }
                    _ => {}
                }
                for block in (0..7).map(BlockId::new) {
                    let held = holders.iter().filter(|held| **held == block).count();
                    prop_assert_eq!(allocator.ref_count(block) as usize, held);
                }
                prop_assert_eq!(allocator.num_free() + allocator.num_used(), allocator.num_total());
            }
        }
    }

    #[test]
    #[should_panic(expected = "freed twice")]
    fn a_double_free_is_caught() {
        let mut allocator = UncachedBlockAllocator::new(1);
        let block = allocator.allocate().unwrap();
        allocator.free(block);
        allocator.free(block);
    }
}
