//! Async scheduling: the next step is decided while the tokens of the last are still being made.
//!
//! `update_async` ends a step as if every sampled row continued with one token, which is a
//! placeholder until `resolve_tokens` names it; a sequence that ends with that token is aborted
//! then.  So a device can begin with the next step before the host has the tokens of this one.
//! (Overlapping the scheduler with the device: Zheng et al., `SGLang`, `NeurIPS` 2024, since v0.4.)
//!
//! Owns the sequences whose newest token is a placeholder, and the other groups to recompute if the
//! step that was ended turns out to have failed.  Invariants:
//! 1. A placeholder is the newest token of its sequence, and sample `i` of the unresolved step
//!    left `placeholder(i)` there; at most one step is unresolved.
//! 2. Nothing with a placeholder in it is looked up in the prefix cache or registered there.
//!
//! Costs: O(rows); allocates nothing in steady decode.

use crate::error::{Error, Result};
use crate::ids::{TokenId, placeholder};
use crate::outputs::Row;
use crate::scheduler::Scheduler;
use crate::scheduler::update::check_tokens;
use crate::sequence::{GroupHandle, SeqHandle};

/// The step that was ended before its tokens were known.
#[derive(Clone, Debug, Default)]
pub(super) struct Unresolved {
    step_id: Option<u64>,
    /// The sequences of its samples.
    seqs: Vec<SeqHandle>,
    /// The groups that moved in the step or have rows that were not sampled.
    others: Vec<GroupHandle>,
}

impl Unresolved {
    pub(super) fn is(&self, step_id: u64) -> bool {
        self.step_id == Some(step_id)
    }

    /// Whether the newest token of `seq` may be a placeholder.
    pub(super) fn holds(&self, seq: SeqHandle) -> bool {
        self.seqs.contains(&seq)
    }

    /// Checks that no step is unresolved.
    ///
    /// # Errors
    /// [`Error::Step`].
    pub(super) fn check_none(&self) -> Result<()> {
        self.step_id.map_or(Ok(()), |step| {
            Err(Error::Step(format!(
                "the tokens of step {step} are missing: resolve_tokens is first"
            )))
        })
    }
}

impl Scheduler {
    /// Ends the open step before its tokens are known: every sampled row continues with one token,
    /// for which [`prepare_inputs`](Scheduler::prepare_inputs) writes `-1 - i`, `i` the number of
    /// the sample, until [`resolve_tokens`](Scheduler::resolve_tokens) names it.  At most one more
    /// step can be scheduled before that.
    ///
    /// False, and the step stays open, where it has drafts, or a sampled row belongs to a group
    /// that may have several sequences, or is at the model's length.
    ///
    /// # Errors
    /// [`Error::Step`] when `step_id` is not the open step, or the tokens of the step before are
    /// missing.
    pub fn update_async(&mut self, step_id: u64) -> Result<bool> {
        self.check_step(step_id)?;
        self.unresolved.check_none()?;
        let has_drafts = !self.outputs.drafts.is_empty();
        if has_drafts || !self.outputs.rows.iter().all(|row| self.can_be_async(row)) {
            return Ok(false);
        }
        self.is_step_open = false;
        self.mark_moved();
        self.unresolved.step_id = Some(step_id);
        self.unresolved.seqs.clear();
        self.unresolved.others.clear();
        self.unresolved.others.extend(self.outputs.moved_groups().map(|(group, _)| group));
        for index in 0..self.outputs.rows.len() {
            let Row { seq, num_tokens, is_sampled, .. } = self.outputs.rows[index];
            self.advance(seq, num_tokens);
            if is_sampled {
                self.end_prefill(index);
                self.store.seq_mut(seq).append(placeholder(self.unresolved.seqs.len()));
                self.unresolved.seqs.push(seq);
            } else {
                self.unresolved.others.push(self.store.seq(seq).group());
            }
        }
        self.apply_aborts();
        Ok(true)
    }

    fn can_be_async(&self, row: &Row) -> bool {
        let seq = self.store.seq(row.seq);
        !row.is_sampled
            || (self.store.group(seq.group()).max_num_running_seqs() == 1
                && seq.len() < self.config.max_model_len)
    }

    /// Sets the tokens of the unresolved step, one per sample, in order; those of sequences that
    /// have ended meanwhile are ignored.
    ///
    /// # Errors
    /// [`Error::Step`] when `step_id` is not the unresolved step, [`Error::Arrays`] for too few or
    /// too many tokens, or a negative one; nothing was resolved then.
    pub fn resolve_tokens(&mut self, step_id: u64, tokens: &[TokenId]) -> Result<()> {
        if !self.unresolved.is(step_id) {
            return Err(Error::Step(format!(
                "step {step_id} does not wait for its tokens: update_async is first"
            )));
        }
        if tokens.len() != self.unresolved.seqs.len() {
            return Err(Error::Arrays(format!(
                "{} tokens for the {} samples of step {step_id}",
                tokens.len(),
                self.unresolved.seqs.len()
            )));
        }
        check_tokens(tokens)?;
        for (seq, token) in self.unresolved.seqs.drain(..).zip(tokens) {
            if self.store.find_seq(seq).is_ok() {
                self.store.seq_mut(seq).resolve(*token);
            }
        }
        self.unresolved.step_id = None;
        Ok(())
    }

    /// Abandons the unresolved step: its sequences lose the placeholders, and groups that ran or
    /// moved in it are recomputed, since it may have been executed in part.
    pub(super) fn abandon_unresolved(&mut self) {
        let Some(step_id) = self.unresolved.step_id.take() else { return };
        self.adapters.abandon_since(step_id);
        self.space.abandon_since(step_id);
        while let Some(seq) = self.unresolved.seqs.pop() {
            if self.store.find_seq(seq).is_ok() {
                self.store.seq_mut(seq).take_back();
                self.restart(self.store.seq(seq).group());
            }
        }
        while let Some(group) = self.unresolved.others.pop() {
            if self.store.find_group(group).is_ok() {
                self.restart(group);
            }
        }
    }
}
