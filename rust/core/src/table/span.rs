//! Span tables: the blocks of a sequence in one KV group beside the first.
//!
//! Owns the map only, as [`super::BlockTable`] does.  It grows at the end.  Blocks that no later
//! query attends to have passed: they are removed.
//!
//! Invariant: the blocks that have passed are one range, which ends before or where the table does.
//!
//! Costs: 4 bytes a block; removing blocks moves the later ones.

use std::ops::Range;

use crate::ids::BlockId;

/// Physical blocks of the logical blocks from 0 on that have not passed.
#[derive(Clone, Debug, Default)]
pub struct SpanTable {
    passed: Range<usize>,
    blocks: Vec<BlockId>,
}

impl SpanTable {
    /// Maps the logical blocks from 0 on, without those of `passed`, to `blocks`.
    pub(crate) fn new(passed: Range<usize>, blocks: Vec<BlockId>) -> Self {
        Self { passed, blocks }
    }

    /// The logical blocks that have passed.
    pub fn passed(&self) -> Range<usize> {
        self.passed.clone()
    }

    /// The logical block after the last mapped one.
    pub fn end(&self) -> usize {
        self.passed.len() + self.blocks.len()
    }

    /// The runs of consecutive logical blocks that are mapped: the first block of each, and the
    /// physical ones.
    pub fn runs(&self) -> [(usize, &[BlockId]); 2] {
        let (before, after) = self.blocks.split_at(self.passed.start);
        [(0, before), (self.passed.end, after)]
    }

    /// The place of logical block `index`, mapped or yet to be mapped, among the physical ones.
    pub(crate) fn place(&self, index: usize) -> usize {
        if index < self.passed.start { index } else { index - self.passed.len() }
    }

    /// The physical blocks, in order.
    pub fn blocks(&self) -> &[BlockId] {
        &self.blocks
    }

    /// The physical blocks, to be exchanged.
    pub(crate) fn blocks_mut(&mut self) -> &mut [BlockId] {
        &mut self.blocks
    }

    /// Whether nothing is mapped.
    pub fn is_empty(&self) -> bool {
        self.blocks.is_empty()
    }

    /// The physical block of logical block `index`, which is mapped.
    pub fn block(&self, index: usize) -> BlockId {
        self.blocks[self.place(index)]
    }

    /// Maps the next logical block to `block`.
    pub(crate) fn push(&mut self, block: BlockId) {
        self.blocks.push(block);
    }

    /// Unmaps the logical blocks of `passed`, all of them mapped except those that passed before.
    pub(crate) fn pass(&mut self, passed: Range<usize>) -> impl Iterator<Item = BlockId> {
        let (start, num_new) = (passed.start, passed.len() - self.passed.len());
        self.passed = passed;
        self.blocks.drain(start..start + num_new)
    }

    /// Unmaps everything.
    pub(crate) fn drain(&mut self) -> impl Iterator<Item = BlockId> {
        self.passed = 0..0;
        self.blocks.drain(..)
    }
}
