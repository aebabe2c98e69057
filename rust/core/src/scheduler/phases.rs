//! The phases of one step, each a pass over one queue.
//!
//! Prefill first: new groups are admitted while they fit; only if none was, running groups
//! decode; only if none of them was preempted, swapped groups are swapped in.  (Kwon et al.,
//! `PagedAttention`, SOSP 2023, section 4.5; the order is that of vLLM's classic scheduler.)
//!
//! With chunked prefill all share one step: running groups, then swapped ones, then new
//! groups with what is left (Agrawal et al., Sarathi-Serve, OSDI 2024, section 4).

use crate::config::Policy;
use crate::outputs::Refusal;
use crate::scheduler::rows::{Phase, TokenChunk};
use crate::scheduler::{Scheduler, SchedulingBudget};
use crate::sequence::{GroupHandle, Sequence};
use crate::space::AllocStatus;

impl Scheduler {
    pub(super) fn run_phases(&mut self) {
        let mut budget = SchedulingBudget::new(
            self.config.max_num_batched_tokens,
            self.config.max_num_seqs,
            self.config.max_loras,
        );
        if self.config.enable_chunked_prefill {
            self.run_chunked_phases(&mut budget);
        } else {
            self.run_prefill_first_phases(&mut budget);
        }
        for group in self.requeued.drain(..) {
            self.queues.waiting.push_front(group);
        }
    }

    fn run_prefill_first_phases(&mut self, budget: &mut SchedulingBudget) {
        self.take_running_groups(budget);
        self.schedule_prefills_past_swapped(budget);
        if budget.is_whole() {
            if self.config.policy == Policy::Priority {
                self.preempt_for_priority(budget);
            }
            let num_ended = self.outputs.ignored_seq_groups.len();
            self.schedule_running(budget);
            if self.outputs.preempted.is_empty() {
                self.schedule_swapped(budget);
            }
            if budget.is_whole() && self.outputs.ignored_seq_groups.len() > num_ended {
                // A group that outgrew the cache left it empty; new groups can still fill the step.
                self.schedule_prefills_past_swapped(budget);
            }
        }
    }

    fn run_chunked_phases(&mut self, budget: &mut SchedulingBudget) {
        if self.config.policy == Policy::Priority {
            let mut of_running = budget.clone();
            self.take_running_groups(&mut of_running);
            self.preempt_for_priority(&mut of_running);
        }
        let num_served = self.schedule_running(budget);
        let num_running = self.queues.running.len();
        self.take_running_groups(budget);
        if self.outputs.preempted.is_empty() {
            self.schedule_swapped(budget);
        }
        self.order_running(num_served, num_running);
        if self.config.choices.admit_after_preemption {
            self.schedule_prefills(budget, usize::MAX);
        } else if self.outputs.preempted.is_empty() {
            self.schedule_prefills_past_swapped(budget);
        }
    }

    /// Admits new groups, but a bounded number ahead of a swapped one that does not fit.
    fn schedule_prefills_past_swapped(&mut self, budget: &mut SchedulingBudget) {
        let Some(&head) = self.queues.swapped.front() else {
            self.schedule_prefills(budget, usize::MAX);
            return;
        };
        if self.waits_before(head) {
            self.schedule_prefills(budget, 1);
            return;
        }
        let num_times = self.store.group(head).num_times_bypassed;
        if num_times < self.config.max_num_bypasses
            && self.space.can_swap_in(&self.store, head) != AllocStatus::Ok
        {
            let most = self.config.max_num_bypasses - num_times;
            let num_admitted = self.schedule_prefills(budget, most);
            self.store.group_mut(head).num_times_bypassed += num_admitted;
        }
    }

    /// Takes from the budget what the running groups have, or may still fork.
    fn take_running_groups(&self, budget: &mut SchedulingBudget) {
        if self.queues.waiting.is_empty() && self.queues.swapped.is_empty() {
            return; // no group to admit: the budget is not read
        }
        for group in &self.queues.running {
            let entry = self.store.group(*group);
            budget.take_group(entry.num_budgeted_seqs(), entry.key.adapter);
        }
    }

    /// Schedules the next tokens of every running group, in order, until the budget is spent.  A
    /// group that lacks blocks preempts a later one, at worst itself.  Returns how many groups ran:
    /// they lead the queue.
    fn schedule_running(&mut self, budget: &mut SchedulingBudget) -> usize {
        let mut position = 0;
        while let Some(&group) = self.queues.running.get(position) {
            let chunk = self.chunk_to_run(group, budget);
            if chunk.num_tokens == 0 {
                break;
            }
            let is_last = position + 1 == self.queues.running.len();
            let (space, num_tokens) = (&mut self.space, chunk.num_tokens);
            if space.can_append_slots(&self.store, group, num_tokens)
                || (is_last && space.fits_alone(&self.store, group, num_tokens))
            {
                space.append_slots(&mut self.store, group, &mut self.outputs.moves);
                self.schedule_rows(group, chunk, budget, Phase::Running);
                position += 1;
            } else {
                self.preempt_behind(position, chunk);
            }
        }
        position
    }

    /// Number of tokens that a group can compute now: all or a chunk.
    #[inline]
    pub(super) fn chunk_to_run(&self, group: GroupHandle, budget: &SchedulingBudget) -> TokenChunk {
        let entry = self.store.group(group);
        let wanted = self.store.seqs_of(group).map(Sequence::num_uncomputed_tokens).sum();
        let num_tokens = if wanted <= budget.remaining_tokens() {
            wanted
        } else if entry.is_prefill {
            self.chunk(wanted, budget)
        } else {
            0 // a decode is not cut
        };
        TokenChunk { num_tokens, is_sampled: num_tokens == wanted }
    }

    /// Chunk of `wanted` tokens that fits in the budget.
    pub(super) fn chunk(&self, wanted: usize, budget: &SchedulingBudget) -> usize {
        let left = budget.remaining_tokens();
        let block_size = self.space.block_size();
        if wanted > left
            && self.config.choices.whole_block_chunks
            && self.space.gpu().cached().is_some()
        {
            left / block_size * block_size
        } else {
            wanted.min(left)
        }
    }

    /// Swaps groups in, in order, until one does not fit; groups without a slot for their adapter
    /// are skipped.
    fn schedule_swapped(&mut self, budget: &mut SchedulingBudget) {
        let mut position = 0;
        while let Some(&group) = self.queues.swapped.get(position) {
            match self.judge_return(group, budget) {
                None => {
                    self.queues.swapped.remove(position);
                    self.queues.running.push_back(group);
                    self.bring_back(group, budget);
                }
                Some(refusal) => {
                    self.outputs.refused.push((group, refusal));
                    if refusal != Refusal::NoAdapterSlot {
                        break;
                    }
                    position += 1;
                }
            }
        }
    }

    fn judge_return(&self, group: GroupHandle, budget: &SchedulingBudget) -> Option<Refusal> {
        let entry = self.store.group(group);
        if self.space.can_swap_in(&self.store, group) != AllocStatus::Ok {
            return Some(Refusal::NoBlocks);
        }
        if !budget.has_adapter_slot(entry.key.adapter) {
            return Some(Refusal::NoAdapterSlot);
        }
        self.judge_budget(self.chunk_to_run(group, budget).num_tokens, group, budget)
    }

    fn bring_back(&mut self, group: GroupHandle, budget: &mut SchedulingBudget) {
        self.space.swap_in(&mut self.store, group, &mut self.outputs.moves);
        self.mark_running(group, budget);
        self.outputs.swapped_in.push(group);
        self.space.append_slots(&mut self.store, group, &mut self.outputs.moves);
        let chunk = self.chunk_to_run(group, budget);
        self.schedule_rows(group, chunk, budget, Phase::Running);
    }

    /// Puts the running queue in the order in which the next step serves it: groups that were not
    /// served, swapped-in ones, decodes, prefills.
    fn order_running(&mut self, num_served: usize, num_running: usize) {
        let mut ranked = std::mem::take(&mut self.ranked);
        for (position, group) in self.queues.running.drain(..).enumerate() {
            let is_prefill = u8::from(self.store.group(group).is_prefill);
            let rank = match position {
                served if served < num_served => 3 + is_prefill,
                waited if waited < num_running => 0,
                _ => 1 + is_prefill,
            };
            ranked.push((rank, group));
        }
        // Sorting allocates, and in steady decode the queue is sorted already.
        if !ranked.is_sorted_by_key(|(rank, _)| *rank) {
            ranked.sort_by_key(|(rank, _)| *rank);
        }
        self.queues.running.extend(ranked.drain(..).map(|(_, group)| group));
        self.ranked = ranked;
    }
}
