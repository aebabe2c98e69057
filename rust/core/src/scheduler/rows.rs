//! Rows: what a group that has its blocks computes in this step.
//!
//! Kept apart by phase until the step is known, since prefills go before decodes.

use std::mem::{swap, take};

use crate::outputs::{Row, ScheduledSequenceGroup, SchedulerOutputs};
use crate::scheduler::{Scheduler, SchedulingBudget};
use crate::sequence::GroupHandle;

/// Where a group comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Phase {
    /// Admitted in this step.
    New,
    /// Running or swapped before.
    Running,
}

/// Tokens that a group computes in this step.
#[derive(Clone, Copy, Debug)]
pub(super) struct TokenChunk {
    /// Tokens of all its sequences together.
    pub(super) num_tokens: usize,
    /// Whether these are all that it has to compute.
    pub(super) is_sampled: bool,
}

/// Groups and rows in the order of the step: new prefills, continued prefills, decodes.
#[derive(Clone, Debug, Default)]
pub(super) struct PhaseRows {
    parts: [Part; 3],
}

#[derive(Clone, Debug, Default)]
struct Part {
    groups: Vec<ScheduledSequenceGroup>,
    rows: Vec<Row>,
    num_tokens: usize,
    num_samples: usize,
}

impl PhaseRows {
    /// Moves everything into `outputs` and counts it.
    pub(super) fn drain_into(&mut self, outputs: &mut SchedulerOutputs) {
        for (index, part) in self.parts.iter_mut().enumerate() {
            let num_tokens = take(&mut part.num_tokens);
            outputs.num_batched_tokens += num_tokens;
            if index < 2 {
                outputs.num_prefill_groups += part.groups.len();
                outputs.num_prefill_rows += part.rows.len();
                outputs.num_prefill_tokens += num_tokens;
            }
            outputs.num_samples += take(&mut part.num_samples);
            append(&mut outputs.scheduled_seq_groups, &mut part.groups);
            append(&mut outputs.rows, &mut part.rows);
        }
    }
}

/// Appends all of `part` to `whole`, without a copy if `whole` is empty.
fn append<T>(whole: &mut Vec<T>, part: &mut Vec<T>) {
    if whole.is_empty() {
        swap(whole, part);
    } else {
        whole.append(part);
    }
}

impl Scheduler {
    /// Makes the rows of a group that has its slots.  With all uncomputed tokens every sequence is
    /// sampled.  With less, none is: each stops short of its last token, in order, so that siblings
    /// reach their ends in one step and none runs ahead.
    pub(super) fn schedule_rows(
        &mut self,
        group: GroupHandle,
        chunk: TokenChunk,
        budget: &mut SchedulingBudget,
        phase: Phase,
    ) {
        let TokenChunk { num_tokens: token_chunk_size, is_sampled } = chunk;
        let entry = self.store.group(group);
        let is_prefill = entry.is_prefill;
        let step_id = self.outputs.step_id;
        let adapter_slot =
            self.adapters.enter(&entry.key, step_id, &mut self.outputs.adapters_to_load);
        let part = &mut self.step_rows.parts[match (is_prefill, phase) {
            (true, Phase::New) => 0,
            (true, Phase::Running) => 1,
            (false, _) => 2,
        }];
        let mut left = token_chunk_size;
        let mut num_rows = 0;
        self.store.for_each_seq(group, |handle, seq| {
            let held_back = usize::from(!is_sampled);
            let num_tokens = (seq.num_uncomputed_tokens() - held_back).min(left);
            if num_tokens > 0 {
                left -= num_tokens;
                num_rows += 1;
                part.num_samples += usize::from(is_sampled);
                seq.last_step = step_id;
                let num_drafts = 0;
                part.rows.push(Row {
                    seq: handle,
                    num_tokens,
                    adapter_slot,
                    is_sampled,
                    num_drafts,
                });
                self.longest = self.longest.max(seq.len());
                self.most_keys = self.most_keys.max(seq.num_computed_tokens + num_tokens);
                self.space.begin_row(seq, num_tokens, &mut self.outputs.moves);
            }
        });
        if num_rows > 0 {
            // Sequences that stop early may leave a part of a chunk unused.
            let token_chunk_size = token_chunk_size - left;
            budget.take_tokens(token_chunk_size);
            part.num_tokens += token_chunk_size;
            part.groups.push(ScheduledSequenceGroup {
                group,
                token_chunk_size: if is_prefill { token_chunk_size } else { 1 },
                is_prefill,
                is_sampled,
                num_rows,
            });
        }
    }
}
