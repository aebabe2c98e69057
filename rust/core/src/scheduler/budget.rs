//! What one step may still take: tokens and sequences.
//!
//! Invariant: neither sum exceeds its limit through `take`.

/// Tokens and sequences of one step, limits and what is promised.
#[derive(Clone, Debug)]
pub struct SchedulingBudget {
    token_limit: usize,
    seq_limit: usize,
    num_tokens: usize,
    num_seqs: usize,
}

impl SchedulingBudget {
    /// A budget of which `num_seqs` sequences are taken already: those that run.
    pub fn new(token_limit: usize, seq_limit: usize, num_seqs: usize) -> Self {
        Self { token_limit, seq_limit, num_tokens: 0, num_seqs }
    }

    /// Tokens that can still be scheduled.
    pub fn remaining_tokens(&self) -> usize {
        self.token_limit - self.num_tokens
    }

    /// Whether a group of `num_seqs` sequences may join with `num_tokens` tokens.
    pub fn can_schedule(&self, num_tokens: usize, num_seqs: usize) -> bool {
        num_tokens <= self.remaining_tokens() && self.num_seqs + num_seqs <= self.seq_limit
    }

    /// Takes tokens.
    pub fn take_tokens(&mut self, num_tokens: usize) {
        self.num_tokens += num_tokens;
    }

    /// Takes sequences.
    pub fn take_seqs(&mut self, num_seqs: usize) {
        self.num_seqs += num_seqs;
    }
}
