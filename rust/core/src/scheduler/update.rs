//! The results of a step: what was sampled, what goes on and what ends.
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
use crate::sequence::{GroupHandle, SeqHandle, SequenceStatus};

/// What the model's step led to: output `i` continues row `parent_rows[i]` with the tokens
/// `tokens[token_start[i]..token_start[i + 1]]`.
#[derive(Clone, Copy, Debug)]
pub struct StepResults<'a> {
    /// Sampled rows, not decreasing; a row may be named any number of times.
    pub parent_rows: &'a [i32],
    /// One entry more than outputs.
    pub token_start: &'a [i32],
    /// One token an output.
    pub tokens: &'a [TokenId],
    /// 0 for an output that lives on.
    pub finish: &'a [u8],
}

impl StepResults<'_> {
    /// The arrays fit each other.
    fn check(&self) -> Result<()> {
        let StepResults { parent_rows, token_start, tokens, finish } = self;
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
        // One token an output: start i is i, and the last is the number of tokens.
        let is_one_each = (0i32..).zip(*token_start).all(|(expected, start)| expected == *start);
        if !is_one_each || tokens.len() != num_outputs {
            return Err(Error::Arrays(format!(
                "token_start must give each of {num_outputs} outputs one of as many tokens; \
                 there are {} tokens",
                tokens.len()
            )));
        }
        if let Some(token) = tokens.iter().find(|token| **token < 0) {
            return Err(Error::Arrays(format!("tokens holds {token}; ids are at least 0")));
        }
        Ok(())
    }
}

impl Scheduler {
    /// Applies the results of the open step; returns the handle of each output's sequence, in
    /// order.  The handle of a finished output is dead.
    ///
    /// # Errors
    /// [`Error::Step`] when `step_id` is not the open step, [`Error::Arrays`] when the arrays
    /// do not fit the step; the step stays open.
    pub fn update(&mut self, step_id: u64, results: StepResults<'_>) -> Result<&[SeqHandle]> {
        self.check_step(step_id)?;
        results.check()?;
        self.check_rows(&results)?;
        self.is_step_open = false;
        self.output_handles.clear();
        let mut output = 0;
        let mut first_row = 0;
        let mut any_group_ended = false;
        for index in 0..self.outputs.scheduled_seq_groups.len() {
            let scheduled = self.outputs.scheduled_seq_groups[index];
            let last_row = first_row + scheduled.num_rows;
            for row in first_row..last_row {
                output = self.update_row(row, output, &results);
            }
            first_row = last_row;
            if self.store.group(scheduled.group).seqs.is_empty() {
                self.store.remove_group(scheduled.group);
                any_group_ended = true;
            }
        }
        if any_group_ended {
            let store = &self.store;
            self.queues.running.retain(|group| store.find_group(*group).is_ok());
        }
        self.apply_aborts();
        Ok(&self.output_handles)
    }

    /// Applies the outputs of one row, from `output` on; returns the first of the next row.
    fn update_row(&mut self, row: usize, mut output: usize, results: &StepResults<'_>) -> usize {
        let Row { seq, num_tokens, is_sampled } = self.outputs.rows[row];
        let parent = self.store.seq_mut(seq);
        parent.num_computed_tokens += num_tokens;
        let group = parent.group();
        if !is_sampled {
            return output;
        }
        self.store.group_mut(group).is_prefill = false;
        let belongs = |output: usize| {
            results.parent_rows.get(output).is_some_and(|parent| row_index(*parent) == row)
        };
        if !belongs(output) {
            self.end_seq(seq);
            return output;
        }
        while belongs(output + 1) {
            let child = self.fork(seq, results.tokens[output], results.finish[output] != 0);
            self.output_handles.push(child);
            output += 1;
        }
        self.output_handles.push(seq);
        self.append_or_finish(seq, results.tokens[output], results.finish[output] != 0);
        output + 1
    }

    /// A child of `parent` with one more token.
    fn fork(&mut self, parent: SeqHandle, token: TokenId, is_finished: bool) -> SeqHandle {
        let table = self.space.fork(&self.store, parent);
        let child = self.store.fork(parent, table);
        self.append_or_finish(child, token, is_finished);
        child
    }

    fn append_or_finish(&mut self, seq: SeqHandle, token: TokenId, is_finished: bool) {
        if is_finished {
            self.end_seq(seq);
        } else {
            self.store.seq_mut(seq).append(token);
        }
    }

    fn end_seq(&mut self, seq: SeqHandle) {
        let group = self.store.seq(seq).group();
        self.space.free(&mut self.store, seq);
        self.store.group_mut(group).leave(seq);
        self.store.remove_seq(seq);
    }

    fn check_step(&self, step_id: u64) -> Result<()> {
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

    /// Parents are sampled rows in order, no group outgrows what it asked for, and no living
    /// sequence the model's length.
    fn check_rows(&self, results: &StepResults<'_>) -> Result<()> {
        let rows = &self.outputs.rows;
        let mut previous = 0;
        for (parent, finish) in results.parent_rows.iter().zip(results.finish) {
            if *parent < previous {
                return Err(Error::Arrays(format!(
                    "parent_rows must not decrease; {parent} follows {previous}"
                )));
            }
            previous = *parent;
            let Some(row) = rows.get(row_index(*parent)).filter(|row| row.is_sampled) else {
                return Err(Error::Arrays(format!(
                    "parent_rows names row {parent}, which is not among the {} sampled of {} rows",
                    self.outputs.num_samples,
                    rows.len()
                )));
            };
            let len = self.store.seq(row.seq).len();
            if *finish == 0 && len >= self.config.max_model_len {
                return Err(Error::Arrays(format!(
                    "an output of row {parent} lives on beyond max_model_len, {}",
                    self.config.max_model_len
                )));
            }
        }
        self.check_group_sizes(results)
    }

    fn check_group_sizes(&self, results: &StepResults<'_>) -> Result<()> {
        if results.parent_rows.len() <= self.outputs.num_samples
            && results.parent_rows.windows(2).all(|pair| pair[0] != pair[1])
        {
            return Ok(()); // nobody forks
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
                    "{num_alive} outputs of one group live on; it may go on with {limit}"
                )));
            }
        }
        Ok(())
    }

    /// Gives up the open step: its execution failed, whatever was already done of it.  Every
    /// group that ran or was swapped out in it starts again from its tokens, in its old order,
    /// since moves and writes may have been done in part.
    ///
    /// # Errors
    /// [`Error::Step`] when `step_id` is not the open step.
    pub fn abandon(&mut self, step_id: u64) -> Result<()> {
        self.check_step(step_id)?;
        self.is_step_open = false;
        for index in 0..self.outputs.preempted.len() {
            let (group, mode) = self.outputs.preempted[index];
            if mode == PreemptionMode::Swap {
                self.restart(group);
            }
        }
        for index in (0..self.outputs.scheduled_seq_groups.len()).rev() {
            self.restart(self.outputs.scheduled_seq_groups[index].group);
        }
        self.apply_aborts();
        Ok(())
    }

    fn restart(&mut self, group: GroupHandle) {
        let status = self.store.group(group).status;
        if status != SequenceStatus::Waiting {
            self.queues.remove(group, status);
            self.recompute(group);
        }
    }

    fn apply_aborts(&mut self) {
        while let Some(group) = self.aborted.pop() {
            if self.store.find_group(group).is_ok() {
                self.end_group(group);
            }
        }
    }
}

/// A row number from outside; a negative one becomes one that no step has.
fn row_index(row: i32) -> usize {
    usize::try_from(row).unwrap_or(usize::MAX)
}
