//! `BlockSpaceManager`: the blocks of both tiers and their allocation to sequences.
//!
//! Owns the allocators, and is the only one to change block tables.  Queries (`can_*`)
//! change nothing; the action of the same name may be called if the query allowed it.
//! Invariants:
//! 1. A block's reference count is the number of block tables that name it.
//! 2. The tables of waiting groups are empty, those of running groups name device blocks,
//!    those of swapped groups host blocks.
//! 3. No block is written while shared, `append_slots` copies first; except with what its
//!    other owners would write too: equal prefixes being computed at once.
//! 4. A sequence counts tokens as computed without computing them only where the prefix cache
//!    has them computed, or a row of the same step computes them.
//!
//! Costs: allocate and free O(blocks); a decode step of a sequence O(1); swap O(blocks of the
//! group).

mod demand;
mod prefix;
mod standalone;
mod swap;

use crate::block::{Allocator, CachedBlockAllocator, UncachedBlockAllocator};
use crate::config::CacheConfig;
use crate::ids::{BlockId, BlockPair};
use crate::sequence::{GroupHandle, SeqHandle, SequenceStatus, SequenceStore};
use crate::table::{BlockTable, num_blocks_for};

pub use demand::SharedPrefix;
pub use standalone::StandaloneSpace;

/// Whether the blocks that a group needs can be allocated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
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
    /// Physical blocks of a sequence at most, under a sliding window.
    ring: Option<usize>,
    gpu: Allocator,
    cpu: Allocator,
    /// The step being decided: rows of one step may share what one of them computes.
    step_id: u64,
    has_encoders: bool,
}

const PROMISED: &str = "the act follows a yes of its question";

impl BlockSpaceManager {
    /// Creates both tiers with all blocks free; every decoding sequence gets `num_lookahead_slots`
    /// after its next token.  `config` is valid.
    pub fn new(config: &CacheConfig, num_lookahead_slots: usize) -> Self {
        let block_size = config.block_size;
        let tier = |num_blocks| {
            if config.enable_prefix_caching {
                let is_classic = config.choices.evict_blank_blocks_in_order;
                Allocator::Cached(CachedBlockAllocator::new(num_blocks, block_size, is_classic))
            } else {
                Allocator::Uncached(UncachedBlockAllocator::new(num_blocks))
            }
        };
        Self {
            watermark_blocks: config.watermark_blocks(),
            // The lookahead must not take the place of what is still seen.
            ring: config
                .sliding_window
                .map(|window| num_blocks_for(window + num_lookahead_slots, block_size)),
            num_lookahead_slots,
            gpu: tier(config.num_gpu_blocks),
            cpu: tier(config.num_cpu_blocks),
            step_id: 0,
            has_encoders: false,
            config: config.clone(),
        }
    }

    /// The device blocks.
    pub fn gpu(&self) -> &Allocator {
        &self.gpu
    }

    /// The host blocks.
    pub fn cpu(&self) -> &Allocator {
        &self.cpu
    }

    /// Configuration of the manager.
    pub fn config(&self) -> &CacheConfig {
        &self.config
    }

    /// Whether any group has ever had cross-attention blocks; otherwise the lookup is skipped.
    pub(crate) fn has_encoders(&self) -> bool {
        self.has_encoders
    }

    /// Tokens a block holds.
    pub fn block_size(&self) -> usize {
        self.config.block_size
    }

    /// Blocks available to new groups above the watermark.
    pub fn num_usable_blocks(&self) -> usize {
        self.gpu.num_total() - self.watermark_blocks
    }

    /// Begins the decisions of step `step_id`.
    pub(crate) fn begin_step(&mut self, step_id: u64) {
        self.step_id = step_id;
    }

    /// Whether blocks for all tokens of a waiting group can be allocated.
    ///
    /// The watermark decides for a group that has not run yet.  One that had blocks before
    /// may use the last ones if no other group holds any: it must be able to run again.
    pub fn can_allocate(&self, store: &SequenceStore, group: GroupHandle) -> AllocStatus {
        let has_run = store.group(group).first_scheduled_time.is_some();
        let num_blocks = self.num_blocks_to_allocate(store, group);
        match self.judge(num_blocks, num_blocks, has_run) {
            AllocStatus::Later if self.config.choices.count_cached_blocks => {
                let num_new = num_blocks - self.num_held_by_others(store, group);
                self.judge(num_blocks, num_new, has_run)
            }
            status => status,
        }
    }

    /// `num_blocks` in all, of which `num_new` are to come out of the free ones.
    fn judge(&self, num_blocks: usize, num_new: usize, may_use_watermark: bool) -> AllocStatus {
        let reserved = if may_use_watermark { 0 } else { self.watermark_blocks };
        if num_blocks + reserved > self.gpu.num_total() {
            AllocStatus::Never
        } else if num_new + self.watermark_blocks <= self.gpu.num_free()
            || (may_use_watermark && self.gpu.num_used() == 0)
        {
            AllocStatus::Ok
        } else {
            AllocStatus::Later
        }
    }

    /// Allocates device blocks for all tokens of a waiting group.  A sequence starts after its
    /// cached prefix; of several sequences each shares the full blocks of
    /// what it has in common with an earlier one, and counts them as computed: rows of
    /// earlier sequences are always scheduled first.
    pub(crate) fn allocate(&mut self, store: &mut SequenceStore, group: GroupHandle) {
        for (position, shared) in self.shared_prefixes(store, group).into_iter().enumerate() {
            let seqs = &store.group(group).seqs;
            let (seq, donor) = (seqs[position], seqs[shared.donor]);
            let mut table = BlockTable::new(self.ring);
            for block in &store.seq(donor).table.blocks()[..shared.num_blocks] {
                self.gpu.fork(*block);
                table.push(*block);
            }
            store.seq_mut(seq).table = table;
            self.fill_from_cache(store, seq, shared.num_blocks);
            self.grow_table(store, seq, 0);
        }
        let num_cross_tokens = store.group(group).num_encoder_tokens;
        self.has_encoders |= num_cross_tokens > 0;
        let mut cross_table = BlockTable::default();
        for _ in 0..num_blocks_for(num_cross_tokens, self.config.block_size) {
            cross_table.push(self.gpu.allocate(0).expect(PROMISED));
        }
        store.group_mut(group).cross_table = cross_table;
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
                table.push(self.gpu.allocate(num_prefix_tokens).expect(PROMISED));
            }
        }
        if self.gpu.cached().is_some() {
            self.register_full_blocks(store, seq);
        }
    }

    /// Whether every sequence of a running group can be given slots for its next token and
    /// lookahead.
    #[inline]
    pub fn can_append_slots(&self, store: &SequenceStore, group: GroupHandle) -> bool {
        let free = self.gpu.num_free();
        let has_lookahead = self.num_lookahead_slots > 0;
        // Without lookahead a sequence takes one block at most; ask for the sum when that is
        // tight, if the exact sum is wanted at all.
        (!has_lookahead && store.group(group).seqs.len() <= free)
            || ((self.config.choices.exact_append_demand || has_lookahead)
                && self.append_demand(store, group) <= free)
    }

    /// Allocates slots for the next token and lookahead of a decoding sequence.  A shared block
    /// that would be written is replaced, and the copy added to `copies`.  A block that becomes
    /// full and is in the prefix cache already is exchanged for the cached one.
    pub(crate) fn append_slots(
        &mut self,
        store: &mut SequenceStore,
        seq: SeqHandle,
        copies: &mut Vec<BlockPair>,
    ) {
        if self.gpu.cached().is_some() {
            self.exchange_last_full_block(store, seq);
        }
        if self.gpu.num_shared() > 0 || self.config.choices.share_partial_blocks {
            self.copy_shared_blocks(store, seq, copies);
        }
        self.grow_table(store, seq, self.num_lookahead_slots);
    }

    /// Replaces the mapped blocks that a sequence is about to write by unshared ones.  One that
    /// was found by the tokens in its beginning may hold more, of a sequence that has left.
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
            // Behind one that is yet to be mapped the ring may come round to an old one.
            let Some(&shared) = entry.table.blocks().get(place) else { continue };
            if self.gpu.is_shared(shared) {
                let own = self.gpu.allocate((index + 1) * block_size).expect(PROMISED);
                entry.table.replace(place, own);
                self.gpu.free(shared, entry.last_step);
                copies.push((shared, own));
            } else if let Some(cache) = self.gpu.cached_mut() {
                cache.overwrite(shared);
            }
        }
    }

    /// A second table over the blocks of a running sequence.
    pub(crate) fn fork(&mut self, store: &SequenceStore, seq: SeqHandle) -> BlockTable {
        let table = store.seq(seq).table.clone();
        for block in table.blocks() {
            self.gpu.fork(*block);
        }
        table
    }

    /// Frees the blocks of a sequence on the tier of its group.
    pub(crate) fn free(&mut self, store: &mut SequenceStore, seq: SeqHandle) {
        let is_swapped = store.group(store.seq(seq).group()).status == SequenceStatus::Swapped;
        let entry = store.seq_mut(seq);
        let last_step = entry.last_step;
        for block in entry.table.drain() {
            self.free_block(block, is_swapped, last_step);
        }
    }

    /// Frees the cross-attention blocks of a group.
    pub(crate) fn free_cross(&mut self, store: &mut SequenceStore, group: GroupHandle) {
        let entry = store.group_mut(group);
        let is_swapped = entry.status == SequenceStatus::Swapped;
        for block in entry.cross_table.drain() {
            self.free_block(block, is_swapped, self.step_id);
        }
    }

    fn free_block(&mut self, block: BlockId, is_swapped: bool, last_step: u64) {
        if is_swapped {
            self.cpu.free(block, last_step);
        } else {
            self.gpu.free(block, last_step);
        }
    }

    /// Drops every cached prefix.  Returns false, without effect, while a block is used.
    pub(crate) fn reset_prefix_cache(&mut self) -> bool {
        let [gpu, cpu] = [&mut self.gpu, &mut self.cpu];
        gpu.cached_mut().is_none_or(CachedBlockAllocator::reset)
            && cpu.cached_mut().is_none_or(CachedBlockAllocator::reset)
    }
}
