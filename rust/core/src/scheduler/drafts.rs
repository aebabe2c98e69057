//! Draft tokens: proposals for the tokens after a decode row's token, computed in the same step.
//!
//! The caller samples after each draft token and passes the accepted tokens to `update`.
//! (Leviathan, Kalman and Matias, "Fast inference from transformers via speculative decoding", ICML
//! 2023; here every accepted token is one that was sampled.)
//!
//! Draft tokens are kept in the step's outputs.  Invariants:
//! 1. No decision depends on drafts: they use lookahead slots that every decoding sequence has, so
//!    a log is replayed without them.
//! 2. A draft is never a token of its sequence: the keys and values of a rejected one are
//!    overwritten, and never registered in the prefix cache.
//!
//! Costs: O(rows with drafts + drafts).

use crate::error::{Error, Result};
use crate::ids::TokenId;
use crate::outputs::SchedulerOutputs;
use crate::scheduler::Scheduler;
use crate::scheduler::update::{check_tokens, row_index};

/// Draft tokens of rows: those of `rows[i]` are `tokens[token_start[i]..token_start[i + 1]]`.
#[derive(Clone, Copy, Debug)]
pub struct Drafts<'a> {
    /// Sampled decode rows of the step, increasing.
    pub rows: &'a [i32],
    /// One entry more than rows, from 0, increasing.
    pub token_start: &'a [i32],
    /// At most `num_lookahead_slots` per row.
    pub tokens: &'a [TokenId],
}

impl Drafts<'_> {
    /// Checks that the arrays fit each other.
    fn check(&self) -> Result<()> {
        let Drafts { rows, token_start, tokens } = self;
        let ends = (token_start.first().copied(), token_start.last().map(|end| row_index(*end)));
        let increases = token_start.windows(2).all(|pair| pair[0] < pair[1]);
        if token_start.len() != rows.len() + 1
            || !increases
            || ends != (Some(0), Some(tokens.len()))
        {
            return Err(Error::Arrays(format!(
                "token_start must have {} entries, increasing from 0 to {}, the number of drafts",
                rows.len() + 1,
                tokens.len()
            )));
        }
        if !rows.is_sorted_by(|row, next| row < next) {
            return Err(Error::Arrays("rows must increase".to_owned()));
        }
        check_tokens(tokens)
    }
}

impl Scheduler {
    /// Adds draft tokens to decode rows of the open step.
    /// [`prepare_inputs`](Scheduler::prepare_inputs) then writes them after the row's token, each
    /// with a separate sample.
    ///
    /// # Errors
    /// [`Error::Step`] when `step_id` is not the open step or already has drafts, [`Error::Arrays`]
    /// when they do not fit the step: its rows, the lookahead slots, the model's length or the
    /// tokens of a step.  The step then has no drafts.
    pub fn propose(&mut self, step_id: u64, drafts: Drafts<'_>) -> Result<&SchedulerOutputs> {
        self.check_step(step_id)?;
        if !self.outputs.drafts.is_empty() {
            return Err(Error::Step(format!("step {step_id} has its drafts")));
        }
        drafts.check()?;
        let most = self.config.max_num_batched_tokens - self.outputs.num_batched_tokens;
        if drafts.tokens.len() > most {
            return Err(Error::Arrays(format!(
                "there are {} drafts; max_num_batched_tokens leaves the step {most}",
                drafts.tokens.len()
            )));
        }
        let lens =
            drafts.token_start.windows(2).map(|pair| row_index(pair[1]) - row_index(pair[0]));
        for (row, len) in drafts.rows.iter().zip(lens.clone()) {
            self.check_drafts(row_index(*row), len)?;
        }
        for (row, len) in drafts.rows.iter().zip(lens) {
            self.outputs.rows[row_index(*row)].num_drafts = len;
        }
        self.outputs.drafts.extend_from_slice(drafts.tokens);
        self.outputs.num_batched_tokens += drafts.tokens.len();
        self.outputs.num_samples += drafts.tokens.len();
        Ok(&self.outputs)
    }

    fn check_drafts(&self, index: usize, num_drafts: usize) -> Result<()> {
        let row = self.outputs.rows.get(index).filter(|row| row.is_sampled);
        let Some(row) = row.filter(|_| index >= self.outputs.num_prefill_rows) else {
            return Err(Error::Arrays(format!(
                "rows names {index}, which is not among the sampled decode rows: {} rows, from {} on",
                self.outputs.rows.len(),
                self.outputs.num_prefill_rows
            )));
        };
        let left = self.config.max_model_len.saturating_sub(self.store.seq(row.seq).len() + 1);
        let most = self.outputs.num_lookahead_slots.min(left);
        if num_drafts > most {
            return Err(Error::Arrays(format!(
                "row {index} has {num_drafts} drafts; it may have {most}, of {} lookahead slots and \
                 {left} tokens to max_model_len after its next",
                self.outputs.num_lookahead_slots
            )));
        }
        Ok(())
    }
}
