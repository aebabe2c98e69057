//! `BlockSpaceManager`: the blocks of both tiers and their allocation to sequences.
//!
//! Owns the allocators, and is the only module that changes block tables.  Queries (`can_*`) change
//! nothing; the action of the same name may be called if the query allowed it.
//!
//! The first KV group keeps all keys and values of a sequence, and names the prefixes by which all
//! groups find cached blocks; its blocks are allocated with the prompt.  The others, in a list,
//! follow the rules of their kind: see `group.rs`.  Every method below handles all of them.
//!
//! Invariants of the first group:
//! 1. A block's reference count is the number of block tables that name it.
//! 2. The tables of waiting groups are empty, those of running groups name device blocks,
//!    those of swapped groups host blocks.
//! 3. No block is written while shared: `append_slots` copies first.  The exception is equal
//!    prefixes computed at once, whose owners all write the same contents.
//! 4. A sequence counts tokens as computed without computing them only if they are computed in the
//!    prefix cache, or by a row of the same step.
//!
//! Costs: allocate and free O(blocks); a decode step of a sequence O(1); swap O(blocks of the
//! group).

mod check;
mod demand;
mod group;
mod prefix;
mod standalone;
mod swap;

use crate::block::{Allocator, CachedBlockAllocator, UncachedBlockAllocator, check_memory};
use crate::config::{CacheConfig, KvKind};
use crate::error::Result;
use crate::ids::BlockPair;
use crate::outputs::Moves;
use crate::sequence::{GroupHandle, SeqHandle, Sequence, SequenceStore};
use crate::space::group::{GroupBlocks, Tiers, moves_of};
use crate::table::{BlockTable, SpanTable, num_blocks_for};

pub use demand::SharedPrefix;
pub use standalone::StandaloneSpace;

/// Whether the blocks that a group needs can be allocated.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum AllocStatus {
    /// They can be allocated now.
    Ok,
    /// They can be allocated after others release blocks.
    Later,
    /// They exceed the whole pool.
    Never,
}

/// KV blocks of the device and of the host.
#[derive(Clone, Debug)]
pub struct BlockSpaceManager {
    config: CacheConfig,
    watermark_blocks: usize,
    num_lookahead_slots: usize,
    /// Maximum number of physical blocks of a sequence, under a sliding window.
    ring: Option<usize>,
    tiers: Tiers,
    /// KV groups beside the first.
    groups: Box<[GroupBlocks]>,
    /// The step being decided: rows of one step may share what one of them computes.
    step_id: u64,
    /// Maximum number of tokens of a sequence that one step computes.
    max_num_batched_tokens: usize,
}

const PROMISED: &str = "the action follows a query that allowed it";

impl BlockSpaceManager {
    /// Creates both tiers with all blocks free; every decoding sequence gets `num_lookahead_slots`
    /// after its next token, and a step computes `max_num_batched_tokens`.  `config` is valid.
    ///
    /// # Errors
    /// [`crate::error::Error::Config`], if there is no memory for a pool.
    pub fn new(
        config: &CacheConfig,
        num_lookahead_slots: usize,
        max_num_batched_tokens: usize,
    ) -> Result<Self> {
        let block_size = config.block_size;
        let num_kept = if config.enable_prefix_caching { block_size } else { 0 };
        let groups = config.groups.iter().map(|group| (group.num_gpu_blocks, group.num_cpu_blocks));
        for (num_gpu, num_cpu) in groups.chain([(config.num_gpu_blocks, config.num_cpu_blocks)]) {
            check_memory(num_gpu, num_kept)?;
            check_memory(num_cpu, num_kept)?;
        }
        let tier = |num_blocks| {
            if config.enable_prefix_caching {
                let is_classic = config.choices.evict_blank_blocks_in_order;
                Allocator::Cached(CachedBlockAllocator::new(num_blocks, block_size, is_classic))
            } else {
                Allocator::Uncached(UncachedBlockAllocator::new(num_blocks))
            }
        };
        Ok(Self {
            watermark_blocks: config.watermark_blocks(),
            // The lookahead must not overwrite blocks that a query still sees.
            ring: config
                .sliding_window
                .map(|window| num_blocks_for(window + num_lookahead_slots, block_size)),
            num_lookahead_slots,
            tiers: Tiers { gpu: tier(config.num_gpu_blocks), cpu: tier(config.num_cpu_blocks) },
            groups: (config.groups.iter())
                .map(|group| GroupBlocks::new(*group, config, num_lookahead_slots))
                .collect(),
            step_id: 0,
            max_num_batched_tokens,
            config: config.clone(),
        })
    }

    /// The device blocks of the first group.
    pub fn gpu(&self) -> &Allocator {
        &self.tiers.gpu
    }

    /// The host blocks of the first group.
    pub fn cpu(&self) -> &Allocator {
        &self.tiers.cpu
    }

    /// Configuration of the manager.
    pub fn config(&self) -> &CacheConfig {
        &self.config
    }

    /// The kinds of the KV groups beside the first.
    pub(crate) fn kinds(&self) -> impl Iterator<Item = KvKind> {
        self.groups.iter().map(|group| group.kind)
    }

    /// KV groups, the first included.
    pub fn num_groups(&self) -> usize {
        1 + self.groups.len()
    }

    /// Writes the number of entries of the longest table of `seqs` in each group beside the first
    /// to `widths`; that of the first group has `max_num_blocks`.
    pub(crate) fn table_widths<'a, I: Iterator<Item = &'a Sequence>>(
        &self,
        max_num_blocks: usize,
        seqs: impl Fn() -> I,
        widths: &mut Vec<usize>,
    ) {
        for (index, group) in self.groups.iter().enumerate() {
            let tables = seqs().map(|seq| &seq.tables[index]);
            widths.push(group.width(max_num_blocks, tables));
        }
    }

    /// Used fractions of the fullest pool on the device and of the fullest in host memory.  Pools
    /// of states, which have a block for every running sequence, are left out.
    pub fn usage(&self) -> (f64, f64) {
        let others = self.groups.iter().filter(|group| !group.has_room_for_all());
        let pools = others.filter_map(GroupBlocks::own_tiers).chain([&self.tiers]);
        pools.fold((0.0, 0.0), |(gpu, cpu), pool| {
            (pool.gpu.usage().max(gpu), pool.cpu.usage().max(cpu))
        })
    }

    /// Tokens a block holds.
    pub fn block_size(&self) -> usize {
        self.config.block_size
    }

    /// Blocks available to new groups above the watermark.
    pub fn num_usable_blocks(&self) -> usize {
        self.gpu().num_total() - self.watermark_blocks
    }

    /// Begins the decisions of step `step_id`.
    pub(crate) fn begin_step(&mut self, step_id: u64) {
        self.step_id = step_id;
    }

    /// Whether blocks for a waiting group can be allocated: in the first KV group for all its
    /// tokens, in the others for the `num_tokens` that its first step computes.
    ///
    /// The watermark decides for a group that has not run yet.  One that had blocks before
    /// may use the last ones if no other group holds any: it must be able to run again.
    pub fn can_allocate(
        &self,
        store: &SequenceStore,
        group: GroupHandle,
        num_tokens: impl FnOnce() -> usize,
    ) -> AllocStatus {
        let has_run = store.group(group).first_scheduled_time.is_some();
        let num_blocks = self.num_blocks_to_allocate(store, group);
        let status = match self.judge(num_blocks, num_blocks, has_run) {
            AllocStatus::Later if self.config.choices.count_cached_blocks => {
                let num_new = num_blocks - self.num_held_by_others(store, group);
                self.judge(num_blocks, num_new, has_run)
            }
            status => status,
        };
        if status != AllocStatus::Ok || self.groups.is_empty() {
            return status;
        }
        self.can_begin(store, group, num_tokens())
    }

    /// Whether `num_blocks` can be allocated, of which `num_new` are taken from the free ones.
    fn judge(&self, num_blocks: usize, num_new: usize, may_use_watermark: bool) -> AllocStatus {
        let reserved = if may_use_watermark { 0 } else { self.watermark_blocks };
        if num_blocks + reserved > self.gpu().num_total() {
            AllocStatus::Never
        } else if num_new + self.watermark_blocks <= self.gpu().num_free()
            || (may_use_watermark && self.gpu().num_used() == 0)
        {
            AllocStatus::Ok
        } else {
            AllocStatus::Later
        }
    }

    /// Allocates device blocks for all tokens of a waiting group.  A sequence starts after its
    /// cached prefix.  Each of several sequences shares the full blocks that it has in common with
    /// an earlier one, and counts them as computed: rows of earlier sequences are always scheduled
    /// first.
    pub(crate) fn allocate(&mut self, store: &mut SequenceStore, group: GroupHandle) {
        for (position, shared) in self.shared_prefixes(store, group).into_iter().enumerate() {
            let seqs = &store.group(group).seqs;
            let (seq, donor) = (seqs[position], seqs[shared.donor]);
            let mut table = BlockTable::new(self.ring);
            for block in &store.seq(donor).table.blocks()[..shared.num_blocks] {
                self.tiers.gpu.fork(*block);
                table.push(*block);
            }
            store.seq_mut(seq).table = table;
            self.fill_from_cache(store, seq, shared.num_blocks);
            self.grow_table(store, seq, 0);
        }
        if !self.groups.is_empty() {
            self.begin_groups(store, group);
        }
    }

    /// Starts a group in the KV groups beside the first.  If one of these does not follow the
    /// first, the first sequence starts after the prefix that all groups have cached, and the other
    /// sequences compute all their tokens.
    fn begin_groups(&mut self, store: &mut SequenceStore, group: GroupHandle) {
        let first = store.group(group).seqs[0];
        if !self.follow_first() {
            let num_cached = self.num_cached_tokens(store, store.seq(first));
            store.for_each_seq(group, |_, seq| seq.num_computed_tokens = 0);
            let entry = store.seq(first);
            let num_blocks = num_cached / self.config.block_size;
            let contents: Vec<_> = self.usable_blocks(store, entry).take(num_blocks).collect();
            let tables = self.groups.iter_mut().map(|group| group.begin(&contents)).collect();
            let entry = store.seq_mut(first);
            entry.tables = tables;
            (entry.num_computed_tokens, entry.num_cached_tokens) = (num_cached, num_cached);
        }
        let num_blocks =
            num_blocks_for(store.group(group).num_encoder_tokens, self.config.block_size);
        for index in 0..self.groups.len() {
            if self.groups[index].kind == KvKind::Cross {
                self.allocate_cross(store, group, index, num_blocks);
            }
        }
    }

    /// Allocates one table of the encoder's blocks for all sequences.
    fn allocate_cross(
        &mut self,
        store: &mut SequenceStore,
        group: GroupHandle,
        index: usize,
        num_blocks: usize,
    ) {
        let gpu = &mut self.tiers.gpu;
        let blocks = (0..num_blocks).map(|_| gpu.allocate(0).expect(PROMISED)).collect();
        let table = SpanTable::new(0..0, blocks);
        for _ in 1..store.group(group).seqs.len() {
            table.blocks().iter().for_each(|block| gpu.fork(*block));
        }
        store.for_each_seq(group, |_, seq| seq.tables[index] = table.clone());
    }

    /// Maps logical blocks until there are slots for the tokens and `num_lookahead_slots` more,
    /// and registers the full ones.
    fn grow_table(
        &mut self,
        store: &mut SequenceStore,
        seq: SeqHandle,
        num_lookahead_slots: usize,
    ) {
        let block_size = self.config.block_size;
        let entry = store.seq_mut(seq);
        let num_slots = entry.len() + num_lookahead_slots;
        let table = &mut entry.table;
        // No division: most decode rows map nothing, and it would cost them more than the rest.
        while table.len() * block_size < num_slots {
            if table.is_ring_full() {
                table.reuse_oldest();
            } else {
                let num_prefix_tokens = (table.len() + 1) * block_size;
                table.push(self.tiers.gpu.allocate(num_prefix_tokens).expect(PROMISED));
            }
        }
        if self.tiers.gpu.cached().is_some() {
            self.register_full_blocks(store, seq);
        }
    }

    /// Whether a running group can be given blocks for rows of `num_tokens` tokens together and for
    /// the lookahead.
    #[inline]
    pub fn can_append_slots(
        &self,
        store: &SequenceStore,
        group: GroupHandle,
        num_tokens: usize,
    ) -> bool {
        // A prefill got its slots at admission; the classic choice requires more all the same.
        let needs_none = store.group(group).is_prefill && self.config.choices.exact_append_demand;
        (needs_none || self.can_append_first(store, group))
            && (self.groups.is_empty()
                || store.seqs_of(group).all(|seq| seq.len() < seq.tables_fit_until)
                || self.can_map(store, group, num_tokens))
    }

    /// Whether the first KV group has the slots of a running group's next tokens.
    #[inline]
    fn can_append_first(&self, store: &SequenceStore, group: GroupHandle) -> bool {
        let free = self.tiers.gpu.num_free();
        let has_lookahead = self.num_lookahead_slots > 0;
        // Without lookahead a sequence takes at most one block; the exact sum, if configured, is
        // computed only when that bound exceeds the free blocks.
        (!has_lookahead && store.group(group).seqs.len() <= free)
            || ((self.config.choices.exact_append_demand || has_lookahead)
                && self.append_demand(store, group) <= free)
    }

    /// Whether the last group of the queue fits in the free blocks by an exact count: it must not
    /// be preempted when preempting it would gain nothing.
    pub(crate) fn fits_alone(
        &self,
        store: &SequenceStore,
        group: GroupHandle,
        num_tokens: usize,
    ) -> bool {
        self.holds_all_used_blocks(store, group)
            && (self.groups.is_empty() || self.can_map(store, group, num_tokens))
            && (store.group(group).is_prefill
                || self.append_demand(store, group) <= self.tiers.gpu.num_free())
    }

    /// Whether no other group has blocks of the first KV group.
    pub(crate) fn holds_all_used_blocks(&self, store: &SequenceStore, group: GroupHandle) -> bool {
        self.num_unique_blocks(store, group) == self.tiers.gpu.num_used()
    }

    /// Device blocks of the pool that a running group has outgrown with rows of `num_tokens`
    /// tokens, even alone on the device.
    pub(crate) fn outgrown_limit(
        &self,
        store: &SequenceStore,
        group: GroupHandle,
        num_tokens: usize,
    ) -> usize {
        let outgrown = (self.groups.iter().enumerate())
            .filter(|_| self.can_append_first(store, group))
            .find(|(index, _)| !self.can_map_in(*index, store, group, num_tokens));
        outgrown.map_or(&self.tiers, |(_, other)| other.tiers(&self.tiers)).gpu.num_total()
    }

    /// Allocates slots for the next token and lookahead of the sequences of a running group in the
    /// first KV group; a prefill got them at admission.
    pub(crate) fn append_slots(
        &mut self,
        store: &mut SequenceStore,
        group: GroupHandle,
        moves: &mut [Moves],
    ) {
        if store.group(group).is_prefill {
            return;
        }
        for index in 0..store.group(group).seqs.len() {
            let seq = store.group(group).seqs[index];
            self.append_seq(store, seq, &mut moves[0].copy);
        }
    }

    /// Begins a row of `num_tokens` tokens: marks them as pending, and maps blocks in the KV groups
    /// beside the first.
    #[inline]
    pub(crate) fn begin_row(&mut self, seq: &mut Sequence, num_tokens: usize, moves: &mut [Moves]) {
        let end = seq.num_computed_tokens + num_tokens;
        if !self.groups.is_empty() && end >= seq.tables_fit_until {
            self.map(seq, num_tokens, moves);
        }
        self.mark_pending(seq, end);
    }

    #[inline(never)] // few models need it: kept out of the common path
    fn map(&mut self, seq: &mut Sequence, num_tokens: usize, moves: &mut [Moves]) {
        let (computed, last_step) = (seq.num_computed_tokens, seq.last_step);
        for (index, group) in self.groups.iter_mut().enumerate() {
            let copies = &mut moves_of(moves, index, group).copy;
            group.map(&mut seq.tables[index], computed, num_tokens, last_step, copies);
        }
        seq.tables_fit_until = self.fit_until(seq);
    }

    /// As [`GroupBlocks::fits_until`], of the KV groups beside the first together.
    fn fit_until(&self, seq: &Sequence) -> usize {
        let each =
            self.groups.iter().zip(&seq.tables).map(|(group, table)| group.fits_until(table));
        each.min().unwrap_or(usize::MAX)
    }

    /// Allocates slots for the next token and lookahead of a decoding sequence.  A shared block
    /// that would be written is replaced, and the copy added to `copies`.  A block that becomes
    /// full and is in the prefix cache already is exchanged for the cached one.
    fn append_seq(
        &mut self,
        store: &mut SequenceStore,
        seq: SeqHandle,
        copies: &mut Vec<BlockPair>,
    ) {
        if self.tiers.gpu.cached().is_some() {
            self.exchange_last_full_block(store, seq);
        }
        if self.tiers.gpu.num_shared() > 0 || self.config.choices.share_partial_blocks {
            self.copy_shared_blocks(store, seq, copies);
        }
        self.grow_table(store, seq, self.num_lookahead_slots);
    }

    /// Replaces the mapped blocks that a sequence is about to write by unshared ones.  A block that
    /// was found by its first tokens may hold more, of a sequence that has ended.
    fn copy_shared_blocks(
        &mut self,
        store: &mut SequenceStore,
        seq: SeqHandle,
        copies: &mut Vec<BlockPair>,
    ) {
        let block_size = self.config.block_size;
        let entry = store.seq_mut(seq);
        let num_slots = entry.len() + self.num_lookahead_slots;
        let num_kept = entry.num_computed_tokens.max(entry.num_cached_tokens);
        let written = num_kept / block_size..num_blocks_for(num_slots, block_size);
        for (place, index) in entry.table.places(written.clone()).zip(written) {
            // After a block that is yet to be mapped, the ring may wrap around to an old one.
            let Some(&shared) = entry.table.blocks().get(place) else { continue };
            if self.tiers.gpu.is_shared(shared) {
                let own = self.tiers.gpu.allocate((index + 1) * block_size).expect(PROMISED);
                entry.table.replace(place, own);
                self.tiers.gpu.free(shared, entry.last_step);
                copies.push((shared, own));
            } else if let Some(cache) = self.tiers.gpu.cached_mut() {
                cache.overwrite(shared);
            }
        }
    }

    /// Counts the references of a child that was made with its parent's tables.
    pub(crate) fn fork(&mut self, child: &Sequence) {
        child.table.blocks().iter().for_each(|block| self.tiers.gpu.fork(*block));
        for (group, table) in self.groups.iter_mut().zip(&child.tables) {
            let tiers = group.tiers_mut(&mut self.tiers);
            table.blocks().iter().for_each(|block| tiers.gpu.fork(*block));
        }
    }

    /// Frees the blocks of a sequence on the tier of its group.
    pub(crate) fn free(&mut self, store: &mut SequenceStore, seq: SeqHandle) {
        let status = store.group(store.seq(seq).group()).status;
        let entry = store.seq_mut(seq);
        let last_step = entry.last_step;
        for block in entry.table.drain() {
            self.tiers.free(block, status, last_step);
        }
        entry.tables_fit_until = 0;
        for (group, table) in self.groups.iter_mut().zip(&mut entry.tables) {
            let tiers = group.tiers_mut(&mut self.tiers);
            table.drain().for_each(|block| tiers.free(block, status, last_step));
        }
    }

    /// Drops every cached prefix.  Returns false, without effect, while a block is used.
    pub(crate) fn reset_prefix_cache(&mut self) -> bool {
        // A sequence with blocks of any group has some of the first: this check covers all groups.
        if self.config.enable_prefix_caching && self.tiers.is_used() {
            return false;
        }
        let Tiers { gpu, cpu } = &mut self.tiers;
        let first = [gpu, cpu].into_iter().filter_map(Allocator::cached_mut);
        let others = self.groups.iter_mut().filter_map(GroupBlocks::cache_mut);
        first.chain(others).all(CachedBlockAllocator::reset)
    }
}
