//! Going ahead: the next step is decided while the tokens of the last are still being made.
//!
//! `update_ahead` ends a step as if every sampled row went on with one token, which is a
//! placeholder until `fill_tokens` names it; what ends with that token is aborted then.  So a
//! device can begin with the next step before the host knows what came out of this one.
//! (Overlapping the scheduler with the device: Zheng et al., `SGLang`, `NeurIPS` 2024, since v0.4.)
//!
//! Owns the sequences whose newest token is a placeholder.  Invariants:
//! 1. A placeholder is the newest token of its sequence, and sample `i` of the step that has
//!    gone ahead left `placeholder(i)` there; at most one step has.
//! 2. Nothing with a placeholder in it is looked up in the prefix cache or registered there.
//!
//! Costs: O(rows); allocates nothing in steady decode.

use crate::error::{Error, Result};
use crate::ids::{TokenId, placeholder};
use crate::outputs::Row;
use crate::scheduler::Scheduler;
use crate::scheduler::update::check_tokens;
use crate::sequence::SeqHandle;

/// The step that has gone ahead, and the sequences of its samples.
#[derive(Clone, Debug, Default)]
pub(super) struct Ahead {
    step_id: Option<u64>,
    seqs: Vec<SeqHandle>,
}

impl Ahead {
    pub(super) fn is(&self, step_id: u64) -> bool {
        self.step_id == Some(step_id)
    }

    /// Whether the newest token of `seq` may be a placeholder.
    pub(super) fn holds(&self, seq: SeqHandle) -> bool {
        self.seqs.contains(&seq)
    }

    /// No step has gone ahead.
    ///
    /// # Errors
    /// [`Error::Step`].
    pub(super) fn check_none(&self) -> Result<()> {
        self.step_id.map_or(Ok(()), |step| {
            Err(Error::Step(format!("the tokens of step {step} are missing: fill_tokens is first")))
        })
    }
}

impl Scheduler {
    /// Ends the open step before its tokens are known: every sampled row goes on with one token,
    /// for which [`prepare_inputs`](Scheduler::prepare_inputs) writes `-1 - i`, `i` the number of
    /// the sample, until [`fill_tokens`](Scheduler::fill_tokens) names it.  At most one more step
    /// can be scheduled before that.
    ///
    /// False, and the step stays open, where a sampled row belongs to a group that may have
    /// several sequences, or has no room for a token in the model's length.
    ///
    /// # Errors
    /// [`Error::Step`] when `step_id` is not the open step, or the tokens of the step before are
    /// missing.
    pub fn update_ahead(&mut self, step_id: u64) -> Result<bool> {
        self.check_step(step_id)?;
        self.ahead.check_none()?;
        if !self.outputs.rows.iter().all(|row| self.can_go_ahead(row)) {
            return Ok(false);
        }
        self.is_step_open = false;
        self.mark_moved();
        self.ahead.step_id = Some(step_id);
        self.ahead.seqs.clear();
        for index in 0..self.outputs.rows.len() {
            let Row { seq, num_tokens, is_sampled } = self.outputs.rows[index];
            self.advance(seq, num_tokens);
            if is_sampled {
                let entry = self.store.seq_mut(seq);
                entry.append(placeholder(self.ahead.seqs.len()));
                let group = entry.group();
                self.store.group_mut(group).is_prefill = false;
                self.ahead.seqs.push(seq);
            }
        }
        self.apply_aborts();
        Ok(true)
    }

    fn can_go_ahead(&self, row: &Row) -> bool {
        let seq = self.store.seq(row.seq);
        !row.is_sampled
            || (self.store.group(seq.group()).max_num_running_seqs() == 1
                && seq.len() < self.config.max_model_len)
    }

    /// Names the tokens of the step that went ahead, one a sample, in order; those of sequences
    /// that have ended meanwhile are passed over.
    ///
    /// # Errors
    /// [`Error::Step`] when `step_id` is not the step that went ahead, [`Error::Arrays`] for too
    /// few or too many tokens, or a negative one; nothing was filled in then.
    pub fn fill_tokens(&mut self, step_id: u64, tokens: &[TokenId]) -> Result<()> {
        if !self.ahead.is(step_id) {
            return Err(Error::Step(format!("step {step_id} has not gone ahead of its tokens")));
        }
        if tokens.len() != self.ahead.seqs.len() {
            return Err(Error::Arrays(format!(
                "{} tokens for the {} samples of step {step_id}",
                tokens.len(),
                self.ahead.seqs.len()
            )));
        }
        check_tokens(tokens)?;
        for (seq, token) in self.ahead.seqs.drain(..).zip(tokens) {
            if self.store.find_seq(seq).is_ok() {
                self.store.seq_mut(seq).fill(*token);
            }
        }
        self.ahead.step_id = None;
        Ok(())
    }

    /// Gives up the step that went ahead: its sequences lose the placeholders and start again
    /// from their tokens.
    pub(super) fn abandon_ahead(&mut self) {
        self.ahead.step_id = None;
        while let Some(seq) = self.ahead.seqs.pop() {
            if self.store.find_seq(seq).is_ok() {
                self.store.seq_mut(seq).take_back();
                self.restart(self.store.seq(seq).group());
            }
        }
    }
}
