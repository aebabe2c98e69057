//! Sequences, the groups they belong to, and where both are kept.
//!
//! Owns the token ids, how far they are computed, and the block table of every sequence.
//! Invariants:
//! 1. `num_computed_tokens < len()`: the newest token is never computed yet.
//! 2. The prompt is never empty.
//!
//! Costs: 4 bytes a token.

mod group;
mod store;

pub use group::{SequenceGroup, SequenceStatus};
pub use store::SequenceStore;

use crate::arena::Handle;
use crate::ids::TokenId;
use crate::table::BlockTable;

/// The key of a [`Sequence`].
pub type SeqHandle = Handle<Sequence>;
/// The key of a [`SequenceGroup`].
pub type GroupHandle = Handle<SequenceGroup>;

/// One line of tokens: a prompt and what was generated after it.
#[derive(Clone, Debug)]
pub struct Sequence {
    group: GroupHandle,
    token_ids: Vec<TokenId>,
    /// Leading tokens whose keys and values are in the blocks of `table`.
    pub num_computed_tokens: usize,
    /// Physical blocks, of the tier that the group's status names.
    pub table: BlockTable,
}

impl Sequence {
    pub(crate) fn new(group: GroupHandle, prompt: &[TokenId]) -> Self {
        Self {
            group,
            token_ids: prompt.to_vec(),
            num_computed_tokens: 0,
            table: BlockTable::default(),
        }
    }

    /// The group that the sequence belongs to.
    pub fn group(&self) -> GroupHandle {
        self.group
    }

    /// Prompt and output.
    pub fn token_ids(&self) -> &[TokenId] {
        &self.token_ids
    }

    /// Tokens of prompt and output together.
    #[expect(clippy::len_without_is_empty, reason = "never empty, invariant 2")]
    pub fn len(&self) -> usize {
        self.token_ids.len()
    }

    /// Tokens that have no keys and values yet, at least 1 between steps.
    pub fn num_uncomputed_tokens(&self) -> usize {
        self.token_ids.len() - self.num_computed_tokens
    }

    pub(crate) fn append(&mut self, token: TokenId) {
        self.token_ids.push(token);
    }
}
