//! Identifiers of tokens and blocks.
//!
//! Owns nothing.  A [`BlockId`] is an index into one tier's pool, valid for the life of the pool;
//! handles of sequences and groups come from [`crate::arena`] and die with the object they name.

/// A token of the vocabulary, never negative (checked where tokens enter the core); a negative
/// one is a placeholder.
pub type TokenId = i32;

/// Placeholder of the token of sample `index` of a step until it is known: `-1 - index`.
#[expect(clippy::cast_possible_truncation, clippy::cast_possible_wrap, reason = "validated")]
pub(crate) fn placeholder(index: usize) -> TokenId {
    -1 - index as TokenId
}

/// A physical KV block of one tier; ids of different tiers are unrelated.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BlockId(pub(crate) u32);

impl BlockId {
    /// The block at `index` of a pool.
    pub fn new(index: u32) -> Self {
        Self(index)
    }

    /// The index in the pool, counted from 0.
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

/// A used block and the destination of its contents: (source, destination).
pub type BlockPair = (BlockId, BlockId);
