//! Span tables: the blocks of a sequence in one KV group beside the first.
//!
//! Owns the map only, as [`super::BlockTable`] does.  It grows at the end; blocks that no later
//! query attends to are removed from the beginning.
//!
//! Costs: 4 bytes a block; removing blocks from the beginning moves the later ones.  A pointer for
//! a table without any: sequences are read in every step, and each byte of them costs.

use crate::ids::BlockId;

/// Physical blocks of the logical blocks from `first` on.
#[derive(Clone, Debug, Default)]
pub struct SpanTable(Option<Box<Mapped>>);

#[derive(Clone, Debug, Default)]
struct Mapped {
    first: usize,
    blocks: Vec<BlockId>,
}

impl SpanTable {
    /// The logical blocks from `first` on, mapped to `blocks`.
    pub(crate) fn new(first: usize, blocks: Vec<BlockId>) -> Self {
        Self(Some(Box::new(Mapped { first, blocks })))
    }

    /// The first logical block that is mapped.
    pub fn first(&self) -> usize {
        self.0.as_ref().map_or(0, |mapped| mapped.first)
    }

    /// The logical block after the last mapped one.
    pub fn end(&self) -> usize {
        self.first() + self.blocks().len()
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
        self.blocks()[index - self.first()]
    }

    /// Maps the next logical block to `block`.
    pub(crate) fn push(&mut self, block: BlockId) {
        self.0.get_or_insert_default().blocks.push(block);
    }

    /// Unmaps the logical blocks before `first`.
    pub(crate) fn drain_before(&mut self, first: usize) -> impl Iterator<Item = BlockId> {
        let mapped = self.0.get_or_insert_default();
        let num_passed = first.saturating_sub(mapped.first).min(mapped.blocks.len());
        mapped.first += num_passed;
        mapped.blocks.drain(..num_passed)
    }

    /// Unmaps everything.
    pub(crate) fn drain(&mut self) -> impl Iterator<Item = BlockId> {
        self.0.take().into_iter().flat_map(|mapped| mapped.blocks)
    }
}
