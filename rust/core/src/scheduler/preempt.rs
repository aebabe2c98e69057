//! Preemption: who gives blocks back, and how.
//!
//! The last of the running queue goes first.  A group that was preempted returns to the front
//! of its queue, those of one step in their old order.

use crate::config::PreemptionMode;
use crate::outputs::IgnoredReason;
use crate::scheduler::Scheduler;
use crate::sequence::{GroupHandle, SequenceStatus};
use crate::space::BlockSpaceManager;

impl Scheduler {
    /// Takes the blocks of the last running group, so that `asking` can have more; it may be
    /// `asking` itself.  A group that holds all used blocks alone is ended: preempting it
    /// would bring it back to the same place for ever.
    pub(super) fn preempt_last_running(&mut self, asking: GroupHandle) {
        let victim = self.queues.running.pop_back().expect("the asking group is in the queue");
        if victim == asking && self.holds_all_used_blocks(victim) {
            self.queues.running.push_back(victim);
            let limit = self.space.gpu().num_total();
            self.ignore(victim, IgnoredReason::OutgrewCache { limit });
            return;
        }
        let mode = self.preemption_mode(victim);
        match mode {
            PreemptionMode::Recompute => {
                self.recompute(victim);
                self.stats.num_recompute_preemptions += 1;
            }
            PreemptionMode::Swap => {
                self.swap_out(victim);
                self.stats.num_swap_preemptions += 1;
            }
        }
        self.outputs.preempted.push((victim, mode));
    }

    fn holds_all_used_blocks(&self, group: GroupHandle) -> bool {
        BlockSpaceManager::num_unique_blocks(&self.store, group) == self.space.gpu().num_used()
    }

    /// The configured mode, or by group size; swap only where the host has room for a group
    /// whose blocks are worth moving.
    fn preemption_mode(&self, group: GroupHandle) -> PreemptionMode {
        let entry = self.store.group(group);
        let wanted = self.config.preemption_mode.unwrap_or({
            if entry.num_budgeted_seqs() == 1 {
                PreemptionMode::Recompute
            } else {
                PreemptionMode::Swap
            }
        });
        if entry.is_prefill || !self.space.can_swap_out(&self.store, group) {
            PreemptionMode::Recompute
        } else {
            wanted
        }
    }

    /// Drops the blocks of a group that is in no queue; it waits, at the front.
    pub(super) fn recompute(&mut self, group: GroupHandle) {
        self.release_blocks(group);
        let mut num_given_up = 0;
        self.store.for_each_seq(group, |seq| {
            num_given_up += seq.num_computed_tokens;
            seq.num_computed_tokens = 0;
        });
        self.stats.num_recomputed_tokens += num_given_up;
        let entry = self.store.group_mut(group);
        entry.status = SequenceStatus::Waiting;
        entry.is_prefill = true;
        self.queues.waiting.push_front(group);
    }

    /// Moves the blocks of a group that is in no queue to the host.
    fn swap_out(&mut self, group: GroupHandle) {
        self.space.swap_out(&mut self.store, group, &mut self.outputs.blocks_to_swap_out);
        self.store.group_mut(group).status = SequenceStatus::Swapped;
        // Victims go from the last to the first: each one of this step before those of it.
        let preempted = self.outputs.preempted.iter();
        let num_before = preempted.filter(|(_, mode)| *mode == PreemptionMode::Swap).count();
        let position = self.queues.swapped.len() - num_before;
        self.queues.swapped.insert(position, group);
    }
}
