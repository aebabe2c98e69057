//! Results of a step: sampled tokens, forks and ends of sequences.
//!
//! `update` checks everything first and then, row by row: counts the row's tokens as
//! computed; forks a child for each output but the last, which keeps the row's handle;
//! appends the tokens.  Sequences that were sampled and got no output are dropped, finished
//! ones freed, empty groups forgotten, waiting aborts carried out.

use crate::config::PreemptionMode;
use crate::error::{Error, Result};
use crate::ids::TokenId;
use crate::outputs::Row;
use crate::scheduler::Scheduler;
use crate::sequence::{GroupHandle, GroupStats, SeqHandle, SequenceStatus};

/// Results of the model: output `i` continues row `parent_rows[i]` with the tokens
/// `tokens[token_start[i]..token_start[i + 1]]`.
#[derive(Clone, Copy, Debug)]
pub struct SampledOutputs<'a> {
    /// Sampled rows, not decreasing; a row may be named any number of times.
    pub parent_rows: &'a [i32],
    /// One entry more than outputs, from 0, increasing.
    pub token_start: &'a [i32],
    /// At least one token per output; the only output of a decode row may have up to
    /// `num_lookahead_slots` more.
    pub tokens: &'a [TokenId],
    /// 0 for an output whose sequence continues.
    pub finish: &'a [u8],
}

/// Effects of an update.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Updated<'a> {
    /// The sequence of each output, in order; that of a finished one is dead.
    pub handles: &'a [SeqHandle],
    /// Groups that ended with the step, in its order, with statistics; their handles are dead.
    pub ended: &'a [(GroupHandle, GroupStats)],
}

impl SampledOutputs<'_> {
    /// Checks that the arrays fit each other.
    fn check(&self) -> Result<()> {
        let SampledOutputs { parent_rows, token_start, tokens, finish } = self;
        let num_outputs = parent_rows.len();
        if finish.len() != num_outputs || token_start.len() != num_outputs + 1 {
            return Err(Error::Arrays(format!(
                "{num_outputs} parent_rows need {num_outputs} finish and {} token_start entries; \
                 there are {} and {}",
                num_outputs + 1,
                finish.len(),
                token_start.len()
            )));
        }
        let increases = token_start.windows(2).all(|pair| pair[0] < pair[1]);
        let ends = (token_start[0], row_index(token_start[num_outputs]));
        if !increases || ends != (0, tokens.len()) {
            return Err(Error::Arrays(format!(
                "token_start must increase from 0 to {}, the number of tokens",
                tokens.len()
            )));
        }
        check_tokens(tokens)
    }

    fn tokens_of(&self, output: usize) -> &[TokenId] {
        &self.tokens[row_index(self.token_start[output])..row_index(self.token_start[output + 1])]
    }
}

impl Scheduler {
    /// Applies the results of the open step.
    ///
    /// # Errors
    /// [`Error::Step`] when `step_id` is not the open step or the tokens of the previous one are
    /// unresolved, [`Error::Arrays`] when the arrays do not fit the step; the step stays open.
    pub fn update(&mut self, step_id: u64, results: SampledOutputs<'_>) -> Result<Updated<'_>> {
        self.check_step(step_id)?;
        self.unresolved.check_none()?;
        results.check()?;
        self.check_rows(&results)?;
        self.is_step_open = false;
        self.output_handles.clear();
        self.ended.clear();
        self.mark_moved();
        let mut output = 0;
        for row in 0..self.outputs.rows.len() {
            output = self.update_row(row, output, &results);
        }
        if !self.ended.is_empty() {
            let store = &self.store;
            self.queues.running.retain(|group| store.find_group(*group).is_ok());
        }
        self.apply_aborts();
        Ok(Updated { handles: &self.output_handles, ended: &self.ended })
    }

    /// Marks the moves of the step as made: the contents of their destinations are computed.
    pub(super) fn mark_moved(&mut self) {
        for (group, is_on_device) in self.outputs.moved_groups() {
            for seq in self.store.seqs_of(group) {
                self.space.mark_moved(seq, is_on_device);
            }
        }
    }

    /// Applies the outputs of one row, from `output` on; returns the first of the next row.
    fn update_row(&mut self, row: usize, mut output: usize, results: &SampledOutputs<'_>) -> usize {
        let Row { seq, num_tokens, is_sampled, .. } = self.outputs.rows[row];
        self.advance(seq, num_tokens);
        if !is_sampled {
            return output;
        }
        self.end_prefill(row);
        let belongs = |output: usize| {
            results.parent_rows.get(output).is_some_and(|parent| row_index(*parent) == row)
        };
        if !belongs(output) {
            self.end_seq(seq);
            return output;
        }
        while belongs(output + 1) {
            let child = self.store.fork(seq);
            self.space.fork(self.store.seq(child));
            self.append_or_finish(child, output, results);
            output += 1;
        }
        self.append_or_finish(seq, output, results);
        output + 1
    }

    /// Marks the group of a sampled row as decoding.  Only the group of a prefill row is looked up:
    /// looking up that of each row would read the memory of all groups.
    pub(super) fn end_prefill(&mut self, row: usize) {
        if row < self.outputs.num_prefill_rows {
            let group = self.store.seq(self.outputs.rows[row].seq).group();
            self.store.group_mut(group).is_prefill = false;
        }
    }

    pub(super) fn advance(&mut self, seq: SeqHandle, num_tokens: usize) {
        let entry = self.store.seq_mut(seq);
        let first = entry.num_computed_tokens;
        entry.num_computed_tokens += num_tokens;
        self.space.mark_computed(&mut self.store, seq, first);
    }

    /// Continues `seq` with an output.  All its tokens but the last have their keys and values:
    /// the model ran on them in the lookahead slots.
    fn append_or_finish(&mut self, seq: SeqHandle, output: usize, results: &SampledOutputs<'_>) {
        self.output_handles.push(seq);
        if results.finish[output] != 0 {
            self.end_seq(seq);
            return;
        }
        let tokens = results.tokens_of(output);
        for token in tokens {
            self.store.seq_mut(seq).append(*token);
        }
        if tokens.len() > 1 {
            self.advance(seq, tokens.len() - 1);
        }
    }

    /// Ends a sequence, and its group with the last of them.
    fn end_seq(&mut self, seq: SeqHandle) {
        let group = self.store.seq(seq).group();
        self.space.free(&mut self.store, seq);
        self.store.group_mut(group).leave(seq);
        self.store.remove_seq(seq);
        if self.store.group(group).seqs.is_empty() {
            self.ended.push((group, self.store.group(group).stats));
            self.store.remove_group(group);
        }
    }

    pub(super) fn check_step(&self, step_id: u64) -> Result<()> {
        if self.is_step_open && self.outputs.step_id == step_id {
            return Ok(());
        }
        let state = if self.is_step_open {
            format!("step {} is open", self.outputs.step_id)
        } else {
            "no step is open".to_owned()
        };
        Err(Error::Step(format!("step {step_id} cannot be ended: {state}")))
    }

    /// Checks that parents are sampled rows in order, that no group exceeds its number of
    /// sequences, and no live sequence the model's length.
    fn check_rows(&self, results: &SampledOutputs<'_>) -> Result<()> {
        let mut previous = 0;
        for (output, &parent) in results.parent_rows.iter().enumerate() {
            if parent < previous {
                return Err(Error::Arrays(format!(
                    "parent_rows must not decrease; {parent} follows {previous}"
                )));
            }
            previous = parent;
            self.check_output(output, results)?;
        }
        self.check_group_sizes(results)
    }

    fn check_output(&self, output: usize, results: &SampledOutputs<'_>) -> Result<()> {
        let parent = results.parent_rows[output];
        let index = row_index(parent);
        let Some(row) = self.outputs.rows.get(index).filter(|row| row.is_sampled) else {
            return Err(Error::Arrays(format!(
                "parent_rows names row {parent}, which is not among the {} sampled of {} rows",
                self.outputs.num_samples,
                self.outputs.rows.len()
            )));
        };
        let num_tokens = results.tokens_of(output).len();
        if num_tokens > 1 {
            let rows = results.parent_rows;
            let is_only = rows.get(output + 1) != Some(&parent)
                && (output == 0 || rows[output - 1] != parent);
            let is_decode = index >= self.outputs.num_prefill_rows;
            let most = 1 + if is_only && is_decode { self.outputs.num_lookahead_slots } else { 0 };
            if num_tokens > most {
                return Err(Error::Arrays(format!(
                    "an output of row {parent} has {num_tokens} tokens; it may have {most}"
                )));
            }
        }
        // Looked up only if a sequence may be at the limit: each row costs a cache miss.
        let is_near = self.longest + num_tokens > self.config.max_model_len;
        let is_beyond = || self.store.seq(row.seq).len() + num_tokens > self.config.max_model_len;
        if results.finish[output] == 0 && is_near && is_beyond() {
            return Err(Error::Arrays(format!(
                "an output of row {parent} lives on beyond max_model_len, {}",
                self.config.max_model_len
            )));
        }
        Ok(())
    }

    fn check_group_sizes(&self, results: &SampledOutputs<'_>) -> Result<()> {
        if results.parent_rows.len() <= self.outputs.num_samples
            && results.parent_rows.windows(2).all(|pair| pair[0] != pair[1])
        {
            return Ok(()); // no row forks
        }
        let (mut end_row, mut output) = (0, 0);
        for scheduled in &self.outputs.scheduled_seq_groups {
            end_row += scheduled.num_rows;
            let mut num_alive = 0;
            while results.parent_rows.get(output).is_some_and(|row| row_index(*row) < end_row) {
                num_alive += usize::from(results.finish[output] == 0);
                output += 1;
            }
            let limit = self.store.group(scheduled.group).num_budgeted_seqs();
            if num_alive > limit {
                return Err(Error::Arrays(format!(
                    "{num_alive} outputs of one group live on; it may continue with {limit}"
                )));
            }
        }
        Ok(())
    }

    /// Abandons the open step and an unresolved one, after execution failed.
    ///
    /// Every group that ran or was swapped out in them is recomputed from its tokens, in the old
    /// order, since moves and writes may have been done in part.
    ///
    /// # Errors
    /// [`Error::Step`] when `step_id` is neither step.
    pub fn abandon(&mut self, step_id: u64) -> Result<()> {
        if !self.unresolved.is(step_id) {
            self.check_step(step_id)?;
        }
        if self.is_step_open {
            self.abandon_open();
        }
        self.abandon_unresolved();
        self.apply_aborts();
        Ok(())
    }

    fn abandon_open(&mut self) {
        self.is_step_open = false;
        self.adapters.abandon_since(self.outputs.step_id);
        for index in 0..self.outputs.preempted.len() {
            let (group, mode) = self.outputs.preempted[index];
            if mode == PreemptionMode::Swap {
                self.restart(group);
            }
        }
        for index in (0..self.outputs.swapped_in.len()).rev() {
            self.restart(self.outputs.swapped_in[index]);
        }
        for index in (0..self.outputs.scheduled_seq_groups.len()).rev() {
            self.restart(self.outputs.scheduled_seq_groups[index].group);
        }
    }

    pub(super) fn restart(&mut self, group: GroupHandle) {
        let status = self.store.group(group).status;
        if status != SequenceStatus::Waiting {
            self.queues.remove(group, status);
            self.give_up_blocks(group);
            self.queues.waiting.push_front(group);
        }
    }

    pub(super) fn apply_aborts(&mut self) {
        while let Some(group) = self.aborted.pop() {
            if self.store.find_group(group).is_ok() {
                self.end_group(group);
            }
        }
    }
}

/// Sampled tokens are not negative; the core does not know the vocabulary.
pub(super) fn check_tokens(tokens: &[TokenId]) -> Result<()> {
    tokens.iter().find(|token| **token < 0).map_or(Ok(()), |token| {
        Err(Error::Arrays(format!("tokens holds {token}; ids are at least 0")))
    })
}

/// Converts a row number from the caller; a negative one becomes one that no step has.
pub(super) fn row_index(row: i32) -> usize {
    usize::try_from(row).unwrap_or(usize::MAX)
}
