//! Block tables: the map from the logical blocks of a sequence to physical blocks.
//!
//! [`crate::space`] counts the references.  A table of the first KV group grows by one of two
//! rules: without limit, or in a ring of as many blocks as a sliding window spans, where a new
//! logical block replaces one that no query attends to any more.  Those of the other groups are
//! [`SpanTable`]s.  Invariants:
//! 1. Logical block `i` holds the keys and values of tokens `i * block_size ..` of its
//!    sequence, until a later block takes its place in the ring.
//! 2. The physical blocks of one table are distinct.
//!
//! Costs: 4 bytes a physical block.

mod span;

use std::num::NonZeroUsize;
use std::ops::Range;

use crate::ids::BlockId;

pub use span::SpanTable;

/// Number of blocks of `num_tokens` tokens.
pub fn num_blocks_for(num_tokens: usize, block_size: usize) -> usize {
    num_tokens.div_ceil(block_size)
}

/// Physical blocks by logical index.
#[derive(Clone, Debug, Default)]
pub struct BlockTable {
    blocks: Vec<BlockId>,
    len: usize,
    ring: Option<NonZeroUsize>,
}

impl BlockTable {
    /// Creates an empty table of at most `ring` blocks, or without limit.
    pub fn new(ring: Option<usize>) -> Self {
        Self { blocks: Vec::new(), len: 0, ring: ring.and_then(NonZeroUsize::new) }
    }

    /// The physical blocks, each once.
    pub fn blocks(&self) -> &[BlockId] {
        &self.blocks
    }

    /// The places of logical blocks among the physical ones, mapped or yet to be mapped.
    pub fn places(&self, logical: Range<usize>) -> impl Iterator<Item = usize> + use<> {
        let ring = self.ring;
        logical.map(move |index| ring.map_or(index, |ring| index % ring))
    }

    /// The physical block of logical block `index`.
    ///
    /// # Panics
    /// If it is not mapped.
    pub fn block(&self, index: usize) -> BlockId {
        assert!(index < self.len, "logical block {index} of {} is not mapped", self.len);
        self.blocks[self.ring.map_or(index, |ring| index % ring)]
    }

    /// Logical blocks mapped.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether nothing is mapped: the sequence has no memory.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Whether the next logical block takes the place of an old one.
    pub fn is_ring_full(&self) -> bool {
        self.ring.is_some_and(|ring| ring.get() == self.blocks.len())
    }

    /// Maps the next logical block to `block`.
    pub fn push(&mut self, block: BlockId) {
        debug_assert!(!self.is_ring_full());
        self.blocks.push(block);
        self.len += 1;
    }

    /// Maps the next logical block to the place of the oldest in a full ring.
    pub fn reuse_oldest(&mut self) {
        debug_assert!(self.is_ring_full());
        self.len += 1;
    }

    /// Exchanges the physical block at `place` and returns the one that was there.
    pub fn replace(&mut self, place: usize, block: BlockId) -> BlockId {
        std::mem::replace(&mut self.blocks[place], block)
    }

    /// Unmaps everything, in order of place.
    pub fn drain(&mut self) -> impl Iterator<Item = BlockId> {
        self.len = 0;
        self.blocks.drain(..)
    }
}
