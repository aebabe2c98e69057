//! Span tables: the blocks of a sequence in one KV group beside the first.
//!
//! Owns the map only, as [`super::BlockTable`] does.  It grows at the end.  Blocks that no later
//! query attends to have passed: they are removed.
//!
//! Invariant: the blocks that have passed are one range, which ends before or where the table does.
//!
//! Costs: 4 bytes a block; removing blocks moves the later ones.  A pointer for a table without any:
//! sequences are read in every step, and each byte of them costs.

use std::ops::Range;

use crate::ids::BlockId;

/// Physical blocks of the logical blocks from 0 on that have not passed.
#[derive(Clone, Debug, Default)]
pub struct SpanTable(Option<Box<Mapped>>);

#[derive(Clone, Debug, Default)]
struct Mapped {
    passed: Range<usize>,
    blocks: Vec<BlockId>,
}

impl SpanTable {
    /// The logical blocks from 0 on without those of `passed`, mapped to `blocks`.
    pub(crate) fn new(passed: Range<usize>, blocks: Vec<BlockId>) -> Self {
        Self(Some(Box::new(Mapped { passed, blocks })))
    }

    /// The logical blocks that have passed.
    pub fn passed(&self) -> Range<usize> {
        self.0.as_ref().map_or(0..0, |mapped| mapped.passed.clone())
    }

    /// The logical block after the last mapped one.
    pub fn end(&self) -> usize {
        self.passed().len() + self.blocks().len()
    }

    /// The runs of consecutive logical blocks that are mapped: the first block of each, and the
    /// physical ones.
    pub fn runs(&self) -> [(usize, &[BlockId]); 2] {
        let Range { start, end } = self.passed();
        let (before, after) = self.blocks().split_at(start);
        [(0, before), (end, after)]
    }

    /// The place of logical block `index`, mapped or yet to be mapped, among the physical ones.
    pub(crate) fn place(&self, index: usize) -> usize {
        let passed = self.passed();
        if index < passed.start { index } else { index - passed.len() }
    }

    /// The physical blocks, in order.
    pub fn blocks(&self) -> &[BlockId] {
        self.0.as_ref().map_or(&[], |mapped| &mapped.blocks)
    }

    /// The physical blocks, to be exchanged.
    pub(crate) fn blocks_mut(&mut self) -> &mut [BlockId] {
        self.0.as_mut().map_or(&mut [], |mapped| &mut mapped.blocks)
    }

    /// Whether nothing is mapped.
    pub fn is_empty(&self) -> bool {
        self.blocks().is_empty()
    }

    /// The physical block of logical block `index`, which is mapped.
    pub fn block(&self, index: usize) -> BlockId {
        self.blocks()[self.place(index)]
    }

    /// Maps the next logical block to `block`.
    pub(crate) fn push(&mut self, block: BlockId) {
        self.0.get_or_insert_default().blocks.push(block);
    }

    /// Unmaps the logical blocks of `passed`, all of them mapped except those that passed before.
    pub(crate) fn pass(&mut self, passed: Range<usize>) -> impl Iterator<Item = BlockId> {
        let mapped = self.0.get_or_insert_default();
        let (start, num_new) = (passed.start, passed.len() - mapped.passed.len());
        mapped.passed = passed;
        mapped.blocks.drain(start..start + num_new)
    }

    /// Unmaps everything.
    pub(crate) fn drain(&mut self) -> impl Iterator<Item = BlockId> {
        self.0.take().into_iter().flat_map(|mapped| mapped.blocks)
    }
}
