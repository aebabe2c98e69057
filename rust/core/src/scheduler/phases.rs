//! The phases of one step, each a pass over one queue.
//!
//! Prefill first: new groups are admitted while they fit; only when none was, those that run
//! decode; only when none of them was preempted, swapped ones come back.  Groups are served
//! first come first served.  (Kwon et al., `PagedAttention`, SOSP 2023, section 4.5; the order
//! of the phases is that of vLLM's classic scheduler.)

use crate::outputs::{IgnoredReason, Row, ScheduledSequenceGroup};
use crate::scheduler::{Scheduler, SchedulingBudget};
use crate::sequence::{GroupHandle, Sequence, SequenceStatus};
use crate::space::AllocStatus;

impl Scheduler {
    pub(super) fn run_phases(&mut self) {
        let mut budget = SchedulingBudget::new(
            self.config.max_num_batched_tokens,
            self.config.max_num_seqs,
            self.num_budgeted_seqs(),
        );
        if self.queues.swapped.is_empty() {
            self.schedule_prefills(&mut budget);
        }
        if self.outputs.rows.is_empty() {
            self.schedule_running(&mut budget);
            if self.outputs.preempted.is_empty() {
                self.schedule_swapped(&mut budget);
            }
        }
    }

    /// Sequences that the running groups have or may still fork.
    fn num_budgeted_seqs(&self) -> usize {
        if self.queues.waiting.is_empty() && self.queues.swapped.is_empty() {
            return 0; // nobody to admit, nobody asks
        }
        let of_group = |group: &GroupHandle| self.store.group(*group).num_budgeted_seqs();
        self.queues.running.iter().map(of_group).sum()
    }

    /// Admits waiting groups in order, until one does not fit.
    fn schedule_prefills(&mut self, budget: &mut SchedulingBudget) {
        while let Some(&group) = self.queues.waiting.front() {
            if let Some(reason) = self.prompt_too_long(group) {
                self.ignore(group, reason);
                continue;
            }
            match self.space.can_allocate(&self.store, group) {
                AllocStatus::Ok => {}
                AllocStatus::Later => break,
                AllocStatus::Never => {
                    self.ignore(group, self.never_fits(group));
                    continue;
                }
            }
            let num_tokens = self.num_tokens_to_admit(group, budget);
            let num_seqs = self.store.group(group).num_budgeted_seqs();
            if !budget.can_schedule(num_tokens, num_seqs) {
                break;
            }
            self.queues.waiting.pop_front();
            self.queues.running.push_back(group);
            self.space.allocate(&mut self.store, group);
            self.mark_running(group);
            budget.take_seqs(num_seqs);
            self.schedule_rows(group, budget);
        }
    }

    /// Tokens that a waiting group must be able to compute at once.  Only a group that comes
    /// back from a recompute may need more than a whole step; it is admitted to an empty step
    /// and goes on in the running phase.
    fn num_tokens_to_admit(&self, group: GroupHandle, budget: &SchedulingBudget) -> usize {
        let num_tokens: usize = self.store.seqs_of(group).map(Sequence::len).sum();
        if budget.remaining_tokens() == self.config.max_num_batched_tokens {
            num_tokens.min(self.config.max_num_batched_tokens)
        } else {
            num_tokens
        }
    }

    /// A prompt is computed in one step; what was generated since is not held against it.
    fn prompt_too_long(&self, group: GroupHandle) -> Option<IgnoredReason> {
        let entry = self.store.group(group);
        let (num_tokens, limit) = (self.store.seq(entry.seqs[0]).len(), self.config.prompt_limit());
        let is_new = entry.first_scheduled_time.is_none();
        (is_new && num_tokens > limit).then_some(IgnoredReason::PromptTooLong { num_tokens, limit })
    }

    fn never_fits(&self, group: GroupHandle) -> IgnoredReason {
        IgnoredReason::NeverFits {
            num_blocks: self.space.num_blocks_to_allocate(&self.store, group),
            limit: self.space.num_usable_blocks(),
        }
    }

    fn mark_running(&mut self, group: GroupHandle) {
        let now = self.now;
        let group = self.store.group_mut(group);
        group.status = SequenceStatus::Running;
        if group.first_scheduled_time.is_none() {
            group.first_scheduled_time = Some(now);
            self.stats.queue_seconds += (now - group.arrival_time).max(0.0);
        }
    }

    /// Gives every running group the slots of its next tokens, in order; one that lacks blocks
    /// takes them from the last of the queue, at worst from itself.
    fn schedule_running(&mut self, budget: &mut SchedulingBudget) {
        let mut position = 0;
        while position < self.queues.running.len() {
            let group = self.queues.running[position];
            let entry = self.store.group(group);
            if entry.is_prefill {
                // It has had all its slots since it was admitted.
                self.schedule_rows(group, budget);
                position += 1;
            } else if entry.seqs.len() > budget.remaining_tokens() {
                // No moves for a group without rows: were the step abandoned, nobody would know
                // that they were not done.
                position += 1;
            } else if self.space.can_append_slots(&self.store, group) {
                self.append_slots(group);
                self.schedule_rows(group, budget);
                position += 1;
            } else {
                self.preempt_last_running(group);
            }
        }
    }

    fn append_slots(&mut self, group: GroupHandle) {
        for index in 0..self.store.group(group).seqs.len() {
            let seq = self.store.group(group).seqs[index];
            self.space.append_slots(&mut self.store, seq, &mut self.outputs.blocks_to_copy);
        }
    }

    /// Brings swapped groups back in order, until one does not fit.
    fn schedule_swapped(&mut self, budget: &mut SchedulingBudget) {
        while let Some(&group) = self.queues.swapped.front() {
            let entry = self.store.group(group);
            let (num_tokens, num_seqs) = (entry.seqs.len(), entry.num_budgeted_seqs());
            if self.space.can_swap_in(&self.store, group) != AllocStatus::Ok
                || !budget.can_schedule(num_tokens, num_seqs)
            {
                break;
            }
            self.queues.swapped.pop_front();
            self.queues.running.push_back(group);
            self.space.swap_in(&mut self.store, group, &mut self.outputs.blocks_to_swap_in);
            self.mark_running(group);
            self.outputs.swapped_in.push(group);
            self.append_slots(group);
            budget.take_seqs(num_seqs);
            self.schedule_rows(group, budget);
        }
    }

    /// Makes the rows of a group that has its slots.  With budget for all uncomputed tokens
    /// every sequence is sampled.  With less, none is: each stops short of its last token, in
    /// order, so that siblings reach their ends in one step and none runs ahead.
    fn schedule_rows(&mut self, group: GroupHandle, budget: &mut SchedulingBudget) {
        let entry = self.store.group(group);
        let is_prefill = entry.is_prefill;
        let target = if is_prefill { &mut self.outputs.rows } else { &mut self.decode_rows.rows };
        let first_row = target.len();
        let num_uncomputed: usize =
            self.store.seqs_of(group).map(Sequence::num_uncomputed_tokens).sum();
        let is_sampled = num_uncomputed <= budget.remaining_tokens();
        let mut left = budget.remaining_tokens();
        for &seq in &entry.seqs {
            let mut num_tokens = self.store.seq(seq).num_uncomputed_tokens();
            if !is_sampled {
                num_tokens = (num_tokens - 1).min(left);
            }
            if num_tokens > 0 {
                left -= num_tokens;
                target.push(Row { seq, num_tokens, is_sampled });
            }
        }
        let num_rows = target.len() - first_row;
        if num_rows == 0 {
            return;
        }
        let token_chunk_size = budget.remaining_tokens() - left;
        budget.take_tokens(token_chunk_size);
        let scheduled = ScheduledSequenceGroup { group, token_chunk_size, is_prefill, num_rows };
        if is_prefill {
            self.outputs.scheduled_seq_groups.push(scheduled);
        } else {
            self.decode_rows.groups.push(scheduled);
        }
    }
}
