//! Remaining budget of a step: tokens, encoder tokens, sequences, adapters.
//!
//! Invariant: usage stays within the limits if each use was checked first.

use smallvec::SmallVec;

/// Tokens, sequences and adapters of one step: their limits, and what is taken.
#[derive(Clone, Debug)]
pub(crate) struct SchedulingBudget {
    token_limit: usize,
    seq_limit: usize,
    adapter_limit: usize,
    num_tokens: usize,
    num_encoder_tokens: usize,
    num_seqs: usize,
    adapters: SmallVec<[u32; 8]>,
    /// Adapter that no further group may use, 0 for none.
    drained_adapter: u32,
}

impl SchedulingBudget {
    /// Creates an unused budget; `adapter_limit` adapters may be active, or any number.
    pub(crate) fn new(token_limit: usize, seq_limit: usize, adapter_limit: Option<usize>) -> Self {
        Self {
            token_limit,
            seq_limit,
            adapter_limit: adapter_limit.unwrap_or(usize::MAX),
            num_tokens: 0,
            num_encoder_tokens: 0,
            num_seqs: 0,
            adapters: SmallVec::new(),
            drained_adapter: 0,
        }
    }

    /// Tokens that can still be scheduled.
    pub(crate) fn remaining_tokens(&self) -> usize {
        self.token_limit - self.num_tokens
    }

    /// Whether nothing has been scheduled yet.
    pub(crate) fn is_whole(&self) -> bool {
        self.num_tokens == 0
    }

    /// Whether a group of `num_seqs` sequences may join with `num_tokens` tokens.
    pub(crate) fn can_schedule(&self, num_tokens: usize, num_seqs: usize) -> bool {
        num_tokens <= self.remaining_tokens() && self.num_seqs + num_seqs <= self.seq_limit
    }

    /// Whether a group may join whose encoder makes `num_tokens`: the encoder tokens of a step are
    /// limited as its tokens are, unless they belong to one encoder.
    pub(crate) fn can_encode(&self, num_tokens: usize) -> bool {
        let num_before = self.num_encoder_tokens;
        num_tokens == 0 || num_before == 0 || num_before + num_tokens <= self.token_limit
    }

    /// Whether a group may join with `adapter` (0 for none): it is active, or can become so.
    pub(crate) fn has_adapter_slot(&self, adapter: u32) -> bool {
        let has_slot = self.adapters.contains(&adapter) || self.adapters.len() < self.adapter_limit;
        adapter == 0 || (has_slot && adapter != self.drained_adapter)
    }

    /// Admits no further group with `adapter`, so that its slot becomes free.
    pub(crate) fn drain_adapter(&mut self, adapter: u32) {
        self.drained_adapter = adapter;
    }

    /// The active adapters.
    pub(crate) fn adapters(&self) -> &[u32] {
        &self.adapters
    }

    /// Takes tokens.
    pub(crate) fn take_tokens(&mut self, num_tokens: usize) {
        self.num_tokens += num_tokens;
    }

    /// Takes tokens of an encoder.
    pub(crate) fn take_encoder_tokens(&mut self, num_tokens: usize) {
        self.num_encoder_tokens += num_tokens;
    }

    /// Releases the sequences of a preempted group.
    pub(crate) fn give_seqs(&mut self, num_seqs: usize) {
        self.num_seqs -= num_seqs;
    }

    /// Takes the sequences and the adapter of a group.
    pub(crate) fn take_group(&mut self, num_seqs: usize, adapter: u32) {
        self.num_seqs += num_seqs;
        if adapter != 0 && !self.adapters.contains(&adapter) {
            self.adapters.push(adapter);
        }
    }
}
