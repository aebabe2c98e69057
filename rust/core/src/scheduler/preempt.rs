//! Preemption: which groups release their blocks, and how.
//!
//! A group that was preempted returns to the front of its queue.

use std::cmp::Ordering;

use crate::config::{Policy, PreemptionMode, VictimPolicy};
use crate::outputs::IgnoredReason;
use crate::scheduler::rows::TokenChunk;
use crate::scheduler::{Scheduler, SchedulingBudget};
use crate::sequence::{GroupHandle, Sequence, SequenceStatus, SequenceStore};
use crate::space::AllocStatus;

impl Scheduler {
    /// Preempts a group at or after `position` in the running queue, to free blocks for the one
    /// there.  The last group preempts itself; if it holds all used blocks, it is ended, since it
    /// would return to the same state indefinitely.
    pub(super) fn preempt_behind(&mut self, position: usize, chunk: TokenChunk) {
        let asking = self.queues.running[position];
        let victim = match self.config.victim_policy {
            _ if position + 1 == self.queues.running.len() => position,
            VictimPolicy::Last => self.queues.running.len() - 1,
            VictimPolicy::LeastWork => self.least_work_behind(position),
        };
        if victim == position && self.space.holds_all_used_blocks(&self.store, asking) {
            let limit = self.space.outgrown_limit(&self.store, asking, chunk.num_tokens);
            self.ignore(asking, IgnoredReason::OutgrewCache { limit });
            return;
        }
        let victim = self.queues.running.remove(victim).expect("chosen from the queue");
        self.preempt(victim);
    }

    fn least_work_behind(&self, position: usize) -> usize {
        let work = |index: &usize| -> usize {
            let group = self.queues.running[*index];
            self.store.seqs_of(group).map(|seq| seq.num_computed_tokens).sum()
        };
        let behind = (position + 1..self.queues.running.len()).rev();
        behind.min_by_key(work).unwrap_or(position)
    }

    /// Frees or swaps out the blocks of a group that is in no queue.
    fn preempt(&mut self, victim: GroupHandle) {
        let mode = self.preemption_mode(victim);
        match mode {
            PreemptionMode::Recompute => {
                self.give_up_blocks(victim);
                self.requeued.push(victim);
                self.stats.num_recompute_preemptions += 1;
            }
            PreemptionMode::Swap => {
                self.swap_out(victim);
                self.stats.num_swap_preemptions += 1;
            }
        }
        self.store.group_mut(victim).stats.num_preemptions += 1;
        self.outputs.preempted.push((victim, mode));
    }

    /// The configured mode, or one by group size; swap only if the host has enough free blocks.
    fn preemption_mode(&self, group: GroupHandle) -> PreemptionMode {
        let by_size = || match self.store.group(group).num_budgeted_seqs() {
            1 => PreemptionMode::Recompute,
            _ => PreemptionMode::Swap,
        };
        let wanted = self.config.preemption_mode.unwrap_or_else(by_size);
        if wanted == PreemptionMode::Swap && self.space.can_swap_out(&self.store, group) {
            PreemptionMode::Swap
        } else {
            PreemptionMode::Recompute
        }
    }

    /// Drops the blocks of a group that is in no queue, which then waits; the caller puts it
    /// into the waiting queue.
    pub(super) fn give_up_blocks(&mut self, group: GroupHandle) {
        self.release_blocks(group);
        let mut num_given_up = 0;
        self.store.for_each_seq(group, |_, seq| {
            num_given_up += seq.num_computed_tokens;
            seq.reset_computed();
        });
        self.stats.num_recomputed_tokens += num_given_up;
        let entry = self.store.group_mut(group);
        entry.stats.num_recomputed_tokens += num_given_up;
        entry.status = SequenceStatus::Waiting;
        entry.is_prefill = true;
    }

    /// Moves the blocks of a group that is in no queue to the host.
    fn swap_out(&mut self, group: GroupHandle) {
        self.space.swap_out(&mut self.store, group, &mut self.outputs.moves);
        self.store.group_mut(group).status = SequenceStatus::Swapped;
        // Victims go from the last to the first: each is queued before the earlier ones of a step.
        let preempted = self.outputs.preempted.iter();
        let num_before = preempted.filter(|(_, mode)| *mode == PreemptionMode::Swap).count();
        let num_passed = if self.config.choices.reverse_swapped_order { 0 } else { num_before };
        let position = self.queues.swapped.len() - num_passed;
        self.queues.swapped.insert(position, group);
    }

    /// Under the priority policy, lets the first waiting group take the place of running ones
    /// that rank after it, until it fits.  Both queues are in order of priority then.
    pub(super) fn preempt_for_priority(&mut self, budget: &mut SchedulingBudget) {
        let first = self.queues.waiting.front().copied();
        self.sort_by_priority();
        let Some(first) = first else { return };
        let num_tokens: usize = self.store.seqs_of(first).map(Sequence::len).sum();
        let num_in_step = num_tokens.min(self.config.max_num_batched_tokens);
        let num_seqs = self.store.group(first).num_budgeted_seqs();
        while let Some(&last) = self.queues.running.back() {
            let status = self.space.can_allocate(&self.store, first, || num_in_step);
            let fits = status == AllocStatus::Ok && budget.can_schedule(num_in_step, num_seqs);
            if fits || goes_before(&self.store, last, first).is_le() {
                break;
            }
            self.queues.running.pop_back();
            budget.give_seqs(self.store.group(last).num_budgeted_seqs());
            self.preempt(last);
        }
        self.queues.waiting.extend(self.requeued.drain(..));
        self.sort_by_priority();
    }

    /// Whether the first waiting group goes before a swapped one by its priority.
    pub(super) fn waits_before(&self, swapped: GroupHandle) -> bool {
        self.config.policy == Policy::Priority
            && self
                .queues
                .waiting
                .front()
                .is_some_and(|first| goes_before(&self.store, *first, swapped).is_lt())
    }

    fn sort_by_priority(&mut self) {
        let store = &self.store;
        for queue in [&mut self.queues.waiting, &mut self.queues.running] {
            queue.make_contiguous().sort_by(|a, b| goes_before(store, *a, *b));
        }
    }
}

/// The order of the priority policy: the smallest number, then the earliest arrival.
fn goes_before(store: &SequenceStore, a: GroupHandle, b: GroupHandle) -> Ordering {
    let (a, b) = (store.group(a), store.group(b));
    a.priority.cmp(&b.priority).then(a.arrival_time.total_cmp(&b.arrival_time))
}
