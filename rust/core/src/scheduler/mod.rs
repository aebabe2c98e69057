//! The scheduler: which sequences run in the next step, and their tokens and blocks.
//!
//! Owns everything: queues, sequences, blocks.  One caller at a time; the clock is an
//! argument; equal calls give equal decisions.  Invariants:
//! 1. A step is open from a `schedule` that was not empty to its `update`, `update_async` or
//!    `abandon`; between the two no decision is made, and an abort waits.
//! 2. Waiting work implies progress: a step that schedules nothing has ended or preempted a
//!    group, or nothing waits.
//! 3. The tokens of a step, and the sequences and adapters of the running groups, stay within the
//!    limits; so do the encoder tokens that begin in it, unless they belong to one encoder.
//! 4. A group that waits, for blocks, for sequences or for an adapter slot, waits for a bounded
//!    number of others, except groups of higher priority and under choices of vLLM 0.6.2.
//!
//! Costs a step: O(rows), and O(1) more a group admitted, moved or ended; steady decode
//! allocates only where a token list or a table grows.

mod adapters;
mod admission;
mod budget;
mod check;
mod delay;
mod drafts;
mod phases;
mod preempt;
mod queues;
mod rows;
mod unresolved;
mod update;

use budget::SchedulingBudget;
pub use drafts::Drafts;
pub use queues::Queues;
pub use update::{SampledOutputs, Updated};

use crate::config::{CacheConfig, SchedulerConfig};
use crate::error::{Error, Result};
use crate::inputs::{self, InputBuffers};
use crate::outputs::{IgnoredReason, SchedulerOutputs};
use crate::scheduler::adapters::AdapterSlots;
use crate::scheduler::delay::PromptDelay;
use crate::scheduler::rows::PhaseRows;
use crate::scheduler::unresolved::Unresolved;
use crate::sequence::{GroupHandle, GroupStats, Request, SeqHandle, Sequence, SequenceStore};
use crate::space::BlockSpaceManager;
use crate::table::num_blocks_for;

/// Running totals since the scheduler was created.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct Stats {
    /// Preemptions by recompute.
    pub num_recompute_preemptions: usize,
    /// Preemptions by swap.
    pub num_swap_preemptions: usize,
    /// Tokens computed and discarded, by recompute or `abandon`.
    pub num_recomputed_tokens: usize,
    /// Tokens looked up in the prefix cache, counted per admission.
    pub num_looked_up_tokens: usize,
    /// Looked-up tokens that the prefix cache had.
    pub num_cached_tokens: usize,
    /// Total seconds that groups waited from arrival to their first step.
    pub queue_seconds: f64,
}

/// Scheduler of sequences and their KV blocks; the crate documentation shows a whole step.
#[derive(Clone, Debug)]
pub struct Scheduler {
    config: SchedulerConfig,
    store: SequenceStore,
    space: BlockSpaceManager,
    queues: Queues,
    adapters: AdapterSlots,
    outputs: SchedulerOutputs,
    step_rows: PhaseRows,
    /// Tokens of the longest sequence of the step.
    longest: usize,
    /// Largest number of keys that a row of the step attends to.
    most_keys: usize,
    delay: PromptDelay,
    /// Groups preempted by recompute in the step being decided, lowest first.
    requeued: Vec<GroupHandle>,
    /// Scratch of `order_running`.
    ranked: Vec<(u8, GroupHandle)>,
    is_step_open: bool,
    unresolved: Unresolved,
    next_step_id: u64,
    now: f64,
    aborted: Vec<GroupHandle>,
    output_handles: Vec<SeqHandle>,
    ended: Vec<(GroupHandle, GroupStats)>,
    stats: Stats,
}

impl Scheduler {
    /// Creates a scheduler with all blocks free and empty queues.
    ///
    /// # Errors
    /// [`Error::Config`] from the validation of either configuration.
    pub fn new(config: SchedulerConfig, cache: &CacheConfig) -> Result<Self> {
        config.validate()?;
        cache.validate()?;
        cache.validate_for(&config)?;
        let rounds_chunks = config.choices.whole_block_chunks && config.enable_chunked_prefill;
        if rounds_chunks
            && cache.enable_prefix_caching
            && !config.max_num_batched_tokens.is_multiple_of(cache.block_size)
        {
            return Err(Error::Config(format!(
                "max_num_batched_tokens is {}; with whole_block_chunks it must be a multiple of \
                 block_size, {}",
                config.max_num_batched_tokens, cache.block_size
            )));
        }
        let space = BlockSpaceManager::new(
            cache,
            config.num_lookahead_slots,
            config.max_num_batched_tokens,
        )?;
        Ok(Self {
            store: SequenceStore::new(cache.block_size, cache.groups.len()),
            outputs: SchedulerOutputs::new(space.num_groups()),
            space,
            queues: Queues::default(),
            adapters: AdapterSlots::new(config.max_loras),
            step_rows: PhaseRows::default(),
            longest: 0,
            most_keys: 0,
            delay: PromptDelay::default(),
            requeued: Vec::new(),
            ranked: Vec::new(),
            is_step_open: false,
            unresolved: Unresolved::default(),
            next_step_id: 0,
            now: 0.0,
            aborted: Vec::new(),
            output_handles: Vec::new(),
            ended: Vec::new(),
            stats: Stats::default(),
            config,
        })
    }

    /// Queues a request.
    ///
    /// # Errors
    /// [`Error::Request`] for an empty prompt, a negative token, an arrival time that is not
    /// finite, more sequences than `max_num_seqs`, an adapter where none are configured, or an
    /// encoder without a salt where prefixes are shared or without a KV group of cross attention.
    pub fn add_seq_group(&mut self, request: &Request<'_>) -> Result<(GroupHandle, SeqHandle)> {
        self.check_request(request)?;
        let (group, seq) = self.store.add_group(request);
        self.queues.waiting.push_back(group);
        Ok((group, seq))
    }

    fn check_request(&self, request: &Request<'_>) -> Result<()> {
        request.check(self.space.config())?;
        let Request { arrival_time, max_num_running_seqs: num_seqs, key, .. } = *request;
        let refusal = if !arrival_time.is_finite() {
            format!("arrival_time is {arrival_time}; it must be finite")
        } else if num_seqs == 0 || num_seqs > self.config.max_num_seqs {
            format!(
                "max_num_running_seqs is {num_seqs}; it must be from 1 to max_num_seqs, {}",
                self.config.max_num_seqs
            )
        } else if key.adapter != 0 && self.config.max_loras.is_none() {
            format!("the request names adapter {}; max_loras is None, no adapters", key.adapter)
        } else {
            return Ok(());
        };
        Err(Error::Request(refusal))
    }

    /// Aborts a group in any queue.  Its blocks are freed at once, or at the end of the open step.
    /// Returns its statistics; `None` if it has already ended.
    pub fn abort(&mut self, group: GroupHandle) -> Option<GroupStats> {
        let stats = self.store.find_group(group).ok()?.stats;
        if self.aborted.contains(&group) {
            return None;
        }
        if self.is_step_open {
            self.aborted.push(group);
        } else {
            self.end_group(group);
        }
        Some(stats)
    }

    /// Returns the statistics of a live group.
    ///
    /// # Errors
    /// [`Error::StaleHandle`].
    pub fn group_stats(&self, group: GroupHandle) -> Result<GroupStats> {
        Ok(self.store.find_group(group)?.stats)
    }

    /// Decides the next step at time `now` (seconds, not decreasing).
    ///
    /// # Errors
    /// [`Error::Step`] while a step is open, or when `now` is not finite or before the last call.
    pub fn schedule(&mut self, now: f64) -> Result<&SchedulerOutputs> {
        if self.is_step_open {
            return Err(Error::Step(format!(
                "step {} is open; finish it with update or abandon before the next schedule",
                self.outputs.step_id
            )));
        }
        if !(now.is_finite() && now >= self.now) {
            return Err(Error::Step(format!(
                "now is {now}; it must be finite and not before the last step's {}",
                self.now
            )));
        }
        self.now = now;
        self.outputs.reset(self.next_step_id);
        (self.longest, self.most_keys) = (0, 0);
        self.space.begin_step(self.next_step_id);
        self.run_phases();
        self.finish_outputs();
        self.is_step_open = !self.outputs.is_empty();
        self.next_step_id += 1;
        Ok(&self.outputs)
    }

    /// Orders the rows and counts the step.
    fn finish_outputs(&mut self) {
        let outputs = &mut self.outputs;
        self.step_rows.drain_into(outputs);
        let has_decodes = outputs.num_prefill_groups < outputs.scheduled_seq_groups.len();
        if has_decodes {
            outputs.num_lookahead_slots = self.config.num_lookahead_slots;
        }
        let num_slots = self.most_keys + outputs.num_lookahead_slots;
        outputs.max_num_blocks = num_blocks_for(num_slots, self.space.block_size());
        let seqs = || outputs.rows.iter().map(|row| self.store.seq(row.seq));
        let max_num_blocks = outputs.max_num_blocks;
        self.space.table_widths(max_num_blocks, seqs, &mut outputs.table_widths);
        outputs.running_queue_size = self.queues.running.len();
    }

    /// Writes the model's inputs for the open step.
    ///
    /// # Errors
    /// [`Error::Step`] when no step is open; [`Error::Arrays`] when an array is too short, or one
    /// for configured adapters or KV groups is missing; then nothing was written.
    pub fn prepare_inputs(&self, buffers: &mut InputBuffers<'_>) -> Result<()> {
        if !self.is_step_open {
            return Err(Error::Step(
                "no step is open; prepare_inputs follows a schedule that was not empty".to_owned(),
            ));
        }
        if buffers.adapter_slots.is_none() && self.config.max_loras.is_some() {
            return Err(Error::Arrays(
                "adapter_slots is missing; max_loras is not None".to_owned(),
            ));
        }
        inputs::fill(buffers, &self.outputs, &self.store, &self.space)?;
        Ok(())
    }

    /// Frees the blocks of a group and removes it.
    fn end_group(&mut self, group: GroupHandle) {
        let status = self.store.group(group).status;
        self.release_blocks(group);
        self.queues.remove(group, status);
        self.store.remove_group(group);
    }

    fn release_blocks(&mut self, group: GroupHandle) {
        for index in 0..self.store.group(group).seqs.len() {
            let seq = self.store.group(group).seqs[index];
            self.space.free(&mut self.store, seq);
        }
    }

    /// Ends a group that cannot continue.
    fn ignore(&mut self, group: GroupHandle, reason: IgnoredReason) {
        let stats = self.store.group(group).stats;
        self.end_group(group);
        self.outputs.ignored_seq_groups.push((group, reason, stats));
    }

    /// Drops every cached prefix.  Returns false, without effect, while a block is used.
    pub fn reset_prefix_cache(&mut self) -> bool {
        self.space.reset_prefix_cache()
    }

    /// Whether a step is open: see invariant 1.
    pub fn is_step_open(&self) -> bool {
        self.is_step_open
    }

    /// The decisions of the last step.
    pub fn outputs(&self) -> &SchedulerOutputs {
        &self.outputs
    }

    /// Looks up a live sequence.
    ///
    /// # Errors
    /// [`Error::StaleHandle`].
    pub fn sequence(&self, seq: SeqHandle) -> Result<&Sequence> {
        self.store.find_seq(seq)
    }

    /// The live sequences and groups.
    pub fn store(&self) -> &SequenceStore {
        &self.store
    }

    /// The blocks of both tiers.
    pub fn space(&self) -> &BlockSpaceManager {
        &self.space
    }

    /// The three queues.
    pub fn queues(&self) -> &Queues {
        &self.queues
    }

    /// Running totals.
    pub fn stats(&self) -> Stats {
        self.stats
    }
}
