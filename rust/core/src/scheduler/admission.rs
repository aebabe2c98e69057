//! Admission: which waiting groups are admitted, and why others are not.

use std::cell::LazyCell;

use crate::outputs::{IgnoredReason, PromptRefusal, Refusal};
use crate::scheduler::rows::Phase;
use crate::scheduler::{Scheduler, SchedulingBudget};
use crate::sequence::{GroupHandle, Sequence, SequenceStatus};
use crate::space::AllocStatus;

/// Number of groups after a head that does not fit that are searched for a smaller one: bounds the
/// cost of a step over a long queue.  After a head that lacks an adapter slot it is a whole batch.
const BYPASS_REACH: usize = 32;

/// The first groups that could not be admitted in a pass over the waiting queue.
#[derive(Clone, Copy, Debug, Default)]
struct PassedOver {
    /// The first group that lacks blocks, tokens or sequences, at this position: `max_num_bypasses`
    /// groups may pass it, and then none.
    blocked: Option<(usize, GroupHandle)>,
    /// The first group that lacks an adapter slot, at this position: a whole batch, `max_num_seqs`,
    /// may pass it, and then none whose adapter has held its slot longest.
    without_slot: Option<(usize, GroupHandle)>,
}

impl PassedOver {
    fn note(&mut self, position: usize, group: GroupHandle, refusal: Refusal) {
        if refusal == Refusal::NoAdapterSlot {
            self.without_slot.get_or_insert((position, group));
        } else {
            self.blocked.get_or_insert((position, group));
        }
    }

    fn groups(self) -> impl Iterator<Item = GroupHandle> {
        self.blocked.into_iter().chain(self.without_slot).map(|(_, group)| group)
    }
}

/// Decision about a waiting group.
enum Admission {
    Yes,
    NotNow(Refusal),
    Never(IgnoredReason),
}

impl Scheduler {
    /// Admits at most `most` waiting groups in order; returns how many.  Some that do not fit are
    /// skipped, see [`PassedOver`].
    pub(super) fn schedule_prefills(
        &mut self,
        budget: &mut SchedulingBudget,
        most: usize,
    ) -> usize {
        let nothing_runs = self.queues.running.is_empty();
        self.delay.begin_phase(self.now);
        let (mut position, mut num_admitted) = (0, 0);
        let mut passed_over = PassedOver::default();
        while let Some(&group) = self.queues.waiting.get(position)
            && num_admitted < most
        {
            if !nothing_runs && self.is_delayed(position) {
                self.outputs.refused.push((group, Refusal::Delayed));
                break;
            }
            match self.judge_admission(group, budget) {
                Admission::Never(reason) => self.ignore(group, reason),
                Admission::Yes => {
                    self.queues.waiting.remove(position);
                    self.queues.running.push_back(group);
                    self.admit(group, budget);
                    num_admitted += 1;
                    for passed in passed_over.groups() {
                        self.store.group_mut(passed).num_times_bypassed += 1;
                    }
                }
                Admission::NotNow(refusal) => {
                    self.outputs.refused.push((group, refusal));
                    passed_over.note(position, group, refusal);
                    position += 1;
                }
            }
            if !self.may_go_on(&passed_over, position, budget) {
                break;
            }
        }
        num_admitted
    }

    /// Whether the group at `position` may be admitted ahead of the skipped ones.
    fn may_go_on(
        &self,
        passed_over: &PassedOver,
        position: usize,
        budget: &mut SchedulingBudget,
    ) -> bool {
        let config = &self.config;
        let num_times = |group: GroupHandle| self.store.group(group).num_times_bypassed;
        let is_blocked = passed_over.blocked.is_some_and(|(first, head)| {
            num_times(head) >= config.max_num_bypasses || position - first > BYPASS_REACH
        });
        let without_slot = passed_over.without_slot.filter(|_| config.choices.drain_adapters);
        let Some((first, group)) = without_slot else { return !is_blocked };
        if num_times(group) >= config.max_num_seqs {
            budget.drain_adapter(self.adapters.oldest());
        }
        !is_blocked && position - first <= config.max_num_seqs
    }

    /// Whether the delay applies to the groups from `position` on.
    fn is_delayed(&self, position: usize) -> bool {
        let arrival = |group: &GroupHandle| self.store.group(*group).arrival_time;
        let arrivals = self.queues.waiting.iter().skip(position).map(arrival);
        self.delay.holds_back(self.now, self.config.delay_factor, arrivals)
    }

    fn judge_admission(&self, group: GroupHandle, budget: &SchedulingBudget) -> Admission {
        if let Some(reason) = self.prompt_too_long(group, budget) {
            return Admission::Never(reason);
        }
        let num_tokens = LazyCell::new(|| self.num_tokens_to_admit(group, budget));
        match self.space.can_allocate(&self.store, group, || *num_tokens) {
            AllocStatus::Ok => {}
            AllocStatus::Later => return Admission::NotNow(Refusal::NoBlocks),
            AllocStatus::Never => return Admission::Never(self.never_fits(group)),
        }
        if !budget.has_adapter_slot(self.store.group(group).key.adapter) {
            return Admission::NotNow(Refusal::NoAdapterSlot);
        }
        if !budget.can_encode(self.store.group(group).num_encoder_tokens) {
            return Admission::NotNow(Refusal::NoTokens);
        }
        self.judge_budget(*num_tokens, group, budget).map_or(Admission::Yes, Admission::NotNow)
    }

    pub(super) fn judge_budget(
        &self,
        num_tokens: usize,
        group: GroupHandle,
        budget: &SchedulingBudget,
    ) -> Option<Refusal> {
        if num_tokens == 0 || !budget.can_schedule(num_tokens, 0) {
            Some(Refusal::NoTokens)
        } else if !budget.can_schedule(0, self.store.group(group).num_budgeted_seqs()) {
            Some(Refusal::NoSequences)
        } else {
            None
        }
    }

    /// Tokens that a waiting group must be able to compute at once.  Without chunks that is
    /// all of them, except for a group that has more than a whole step, since it recomputes or its
    /// prompt has branches: it is admitted to an empty step and continues in the running phase.
    fn num_tokens_to_admit(&self, group: GroupHandle, budget: &SchedulingBudget) -> usize {
        let first = self.store.first_seq_of(group);
        let num_known = self.space.num_cached_tokens(&self.store, first)
            + self.space.num_shared_tokens(&self.store, group);
        let wanted = self.store.seqs_of(group).map(Sequence::len).sum::<usize>() - num_known;
        let entry = self.store.group(group);
        let may_exceed_step = entry.first_scheduled_time.is_some() || entry.seqs.len() > 1;
        let is_chunked =
            self.config.enable_chunked_prefill || (budget.is_whole() && may_exceed_step);
        if is_chunked { self.chunk(wanted, budget) } else { wanted }
    }

    /// The reason to refuse a prompt of too many tokens; generated tokens do not count.
    fn prompt_too_long(
        &self,
        group: GroupHandle,
        budget: &SchedulingBudget,
    ) -> Option<IgnoredReason> {
        let entry = self.store.group(group);
        let num_tokens = self.store.seqs_of(group).map(Sequence::len).max().unwrap_or(0);
        let limit = self.config.prompt_limit();
        // The classic choice checks the chunk that fits in the budget.
        let is_too_long = if self.config.choices.limit_chunked_prompts {
            num_tokens > limit
        } else {
            self.num_tokens_to_admit(group, budget) > limit
        };
        let is_new = entry.first_scheduled_time.is_none();
        (is_new && is_too_long).then_some(IgnoredReason::PromptTooLong { num_tokens, limit })
    }

    /// Why a prompt of `num_tokens` tokens of a decoder-only model can never run, or `None` if it
    /// can.
    pub fn prompt_refusal(&self, num_tokens: usize) -> Option<PromptRefusal> {
        let (config, space) = (&self.config, &self.space);
        let (max_model_len, max_num_batched_tokens) =
            (config.max_model_len, config.max_num_batched_tokens);
        let num_blocks = space.num_blocks_of(num_tokens);
        let num_usable_blocks = space.num_usable_blocks();
        if num_tokens >= max_model_len {
            Some(PromptRefusal::FillsModel { num_tokens, max_model_len })
        } else if num_tokens > max_num_batched_tokens && !config.enable_chunked_prefill {
            Some(PromptRefusal::ExceedsStep { num_tokens, max_num_batched_tokens })
        } else if num_blocks > num_usable_blocks {
            Some(PromptRefusal::ExceedsCache {
                num_tokens,
                block_size: space.block_size(),
                num_blocks,
                num_gpu_blocks: space.gpu().num_total(),
                num_usable_blocks,
            })
        } else {
            None
        }
    }

    fn never_fits(&self, group: GroupHandle) -> IgnoredReason {
        IgnoredReason::NeverFits {
            num_blocks: self.space.num_blocks_to_allocate(&self.store, group),
            limit: self.space.num_usable_blocks(),
        }
    }

    fn admit(&mut self, group: GroupHandle, budget: &mut SchedulingBudget) {
        self.space.allocate(&mut self.store, group);
        self.count_cache_hits(group);
        self.mark_running(group, budget);
        budget.take_encoder_tokens(self.store.group(group).num_encoder_tokens);
        self.delay.note_prompt();
        let chunk = self.chunk_to_run(group, budget);
        self.schedule_rows(group, chunk, budget, Phase::New);
    }

    /// Counts cached tokens; those that siblings share with the first sequence are no cache hits.
    fn count_cache_hits(&mut self, group: GroupHandle) {
        if self.space.gpu().cached().is_some() {
            let first = self.store.first_seq_of(group);
            let (num_tokens, num_cached_tokens) = (first.len(), first.num_cached_tokens);
            self.stats.num_looked_up_tokens += num_tokens;
            self.stats.num_cached_tokens += num_cached_tokens;
            let entry = self.store.group_mut(group);
            if entry.first_scheduled_time.is_none() {
                entry.stats.num_cached_tokens = num_cached_tokens;
            }
        }
    }

    pub(super) fn mark_running(&mut self, group: GroupHandle, budget: &mut SchedulingBudget) {
        let now = self.now;
        let entry = self.store.group_mut(group);
        entry.status = SequenceStatus::Running;
        entry.num_times_bypassed = 0;
        self.adapters.assign(entry.key.adapter, budget.adapters());
        budget.take_group(entry.num_budgeted_seqs(), entry.key.adapter);
        if entry.first_scheduled_time.is_none() {
            entry.first_scheduled_time = Some(now);
            self.stats.queue_seconds += (now - entry.arrival_time).max(0.0);
        }
    }
}
