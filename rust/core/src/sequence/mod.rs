//! Sequences, the groups they belong to, and where both are kept.
//!
//! Owns the token ids, how far they are computed, and the block tables of every sequence.
//! Invariants:
//! 1. `num_computed_tokens < len()`: the newest token is never computed yet.
//! 2. The prompt is never empty.
//!
//! Costs: 4 bytes a token, and some 290 a sequence.

mod group;
mod store;
mod tokens;

pub use group::{GroupStats, Request, SequenceGroup, SequenceStatus};
pub use store::SequenceStore;

use std::borrow::Cow;
use std::ops::Range;

use smallvec::{SmallVec, smallvec};

use crate::arena::Handle;
use crate::block::Prefix;
use crate::ids::TokenId;
use crate::sequence::tokens::Tokens;
use crate::table::{BlockTable, SpanTable};

/// The key of a [`Sequence`].
pub type SeqHandle = Handle<Sequence>;
/// The key of a [`SequenceGroup`].
pub type GroupHandle = Handle<SequenceGroup>;

/// Tokens of a prompt and of the output generated after it.
///
/// Fields used in every step come first, to touch few cache lines.
#[derive(Clone, Debug)]
#[repr(C)]
pub struct Sequence {
    group: GroupHandle,
    /// Leading tokens whose keys and values are in the blocks of `table`.
    pub num_computed_tokens: usize,
    /// Leading tokens whose keys and values need not be written: the prefix cache had them.
    pub num_cached_tokens: usize,
    /// The last step in which the sequence ran.
    pub last_step: u64,
    tokens: Tokens,
    /// Physical blocks of the first KV group, of the tier that the group's status names.
    pub table: BlockTable,
    /// While fewer tokens are computed, no row and no update changes `tables`; 0 if it is not known,
    /// as after a fork, whose siblings share the blocks that they write.
    pub(crate) tables_fit_until: usize,
    pub(crate) chain: Chain,
    num_prompt_tokens: usize,
    /// Physical blocks of the other KV groups, on the same tier.
    pub tables: SmallVec<[SpanTable; 1]>,
}

/// Leading full blocks of a sequence that are registered in the prefix cache.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Chain {
    pub(crate) num_blocks: usize,
    /// Prefix of those blocks; `None` without prefix caching.
    pub(crate) prefix: Option<Prefix>,
}

impl Sequence {
    pub(crate) fn new(
        group: GroupHandle,
        prompt: &[TokenId],
        block_size: usize,
        num_tables: usize,
    ) -> Self {
        Self {
            group,
            tokens: Tokens::new(prompt, block_size),
            num_prompt_tokens: prompt.len(),
            num_computed_tokens: 0,
            num_cached_tokens: 0,
            table: BlockTable::default(),
            tables: smallvec![SpanTable::default(); num_tables],
            last_step: 0,
            tables_fit_until: 0,
            chain: Chain::default(),
        }
    }

    /// The group that the sequence belongs to.
    pub fn group(&self) -> GroupHandle {
        self.group
    }

    /// Token ids of prompt and output; a copy unless they are contiguous.
    pub fn token_ids(&self) -> Cow<'_, [TokenId]> {
        self.token_ids_at(0..self.len())
    }

    /// The token at `position`.
    ///
    /// # Panics
    /// If the sequence has fewer tokens.
    pub fn token_id(&self, position: usize) -> TokenId {
        self.tokens.at(position)
    }

    /// Token ids at `positions`; a copy unless they are contiguous.
    ///
    /// # Panics
    /// If the sequence has fewer tokens.
    pub fn token_ids_at(&self, positions: Range<usize>) -> Cow<'_, [TokenId]> {
        self.tokens.get(positions)
    }

    /// Leading tokens that are contiguous in memory: at least those of all full blocks, and every
    /// token of a sequence that has computed nothing.
    pub(crate) fn listed_tokens(&self) -> &[TokenId] {
        self.tokens.listed()
    }

    /// Tokens of the prompt alone.
    pub fn num_prompt_tokens(&self) -> usize {
        self.num_prompt_tokens
    }

    /// Tokens of prompt and output together.
    #[expect(clippy::len_without_is_empty, reason = "never empty, invariant 2")]
    pub fn len(&self) -> usize {
        self.tokens.len()
    }

    /// Tokens that have no keys and values yet, at least 1 between steps.
    pub fn num_uncomputed_tokens(&self) -> usize {
        self.len() - self.num_computed_tokens
    }

    /// Marks all tokens as not computed: the blocks are freed.
    pub(crate) fn reset_computed(&mut self) {
        self.num_computed_tokens = 0;
        self.num_cached_tokens = 0;
        self.chain = Chain::default();
        self.tokens.settle();
    }

    pub(crate) fn append(&mut self, token: TokenId) {
        self.tokens.push(token);
    }

    /// Sets the newest token, so far a placeholder.
    pub(crate) fn resolve(&mut self, token: TokenId) {
        *self.newest() = token;
    }

    /// Drops the newest token, a placeholder that will not be resolved.
    pub(crate) fn take_back(&mut self) {
        debug_assert!(*self.newest() < 0, "only a placeholder is taken back");
        self.tokens.pop();
    }

    fn newest(&mut self) -> &mut TokenId {
        self.tokens.last_mut().expect("never empty, invariant 2")
    }
}
