//! Reference counts of the blocks of one tier.
//!
//! Owns the number of tables that name a block, independent of the allocation policy.  Invariants:
//! 1. A block is used exactly while its count is above 0.
//! 2. `num_used` is the number of used blocks, `num_shared` of those with a count above 1.
//!
//! Costs: every call O(1); 4 bytes a block.

use crate::ids::BlockId;

/// Reference count of each block.
#[derive(Clone, Debug)]
pub struct BlockPool {
    ref_counts: Vec<u32>,
    num_used: usize,
    num_shared: usize,
}

impl BlockPool {
    /// Creates a pool of `num_blocks` free blocks.
    pub fn new(num_blocks: usize) -> Self {
        Self { ref_counts: vec![0; num_blocks], num_used: 0, num_shared: 0 }
    }

    /// Blocks in the pool.
    pub fn num_total(&self) -> usize {
        self.ref_counts.len()
    }

    /// Used blocks.
    pub fn num_used(&self) -> usize {
        self.num_used
    }

    /// Blocks with several references.
    pub fn num_shared(&self) -> usize {
        self.num_shared
    }

    /// References to `block`.
    ///
    /// # Panics
    /// If `block` is not of this pool.
    pub fn ref_count(&self, block: BlockId) -> u32 {
        self.ref_counts[block.index()]
    }

    /// Takes the first reference to a free block.
    ///
    /// # Panics
    /// If the block is used.
    pub fn acquire(&mut self, block: BlockId) {
        let count = &mut self.ref_counts[block.index()];
        assert_eq!(*count, 0, "block {block:?} was acquired while used");
        *count = 1;
        self.num_used += 1;
    }

    /// Takes one more reference to a used block.
    ///
    /// # Panics
    /// If the block is free.
    pub fn share(&mut self, block: BlockId) {
        let count = &mut self.ref_counts[block.index()];
        assert_ne!(*count, 0, "block {block:?} was shared while free");
        self.num_shared += usize::from(*count == 1);
        *count += 1;
    }

    /// Releases one reference; true for the last one.
    ///
    /// # Panics
    /// If the block is free: a double free.
    pub fn release(&mut self, block: BlockId) -> bool {
        let count = &mut self.ref_counts[block.index()];
        assert_ne!(*count, 0, "block {block:?} was freed twice");
        self.num_shared -= usize::from(*count == 2);
        *count -= 1;
        let is_free = *count == 0;
        self.num_used -= usize::from(is_free);
        is_free
    }
}
