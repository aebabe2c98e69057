//! Window blocks: keys and values of the sliding-window layers.
//!
//! Owns the blocks of both tiers, apart from those of the layers that see everything.  Invariants:
//! 1. Waiting sequences have no window blocks, running ones have them on the device, swapped ones
//!    on the host; a block's reference count is the number of window tables that name it.
//! 2. Between steps a table begins with the first block that a later query sees; a row maps what it
//!    writes, and its update takes what has passed.
//! 3. No row writes a shared block: its sequence first gets a separate block and a copy.
//! 4. Each use is checked first: `can_allocate` for its row's tokens, `can_swap_in` for a group
//!    that returns.  A sequence alone on the device always fits.
//! 5. With prefix caching a full block is known by the contents by which the block beside it is,
//!    once it is computed.  A group's first sequence begins where that prefix is known in the
//!    layers that see everything and the blocks that its next query sees are known here; at least
//!    its last token is left, so no block that was found is written.  All else computes every token
//!    of its own, also those whose keys a sibling writes in the layers that see everything.
//!
//! Costs: O(blocks that come and go) a row, with prefix caching O(log n) each, and O(blocks of the
//! prompt) a prompt that is asked for; without windows a comparison a row.

use crate::block::{Allocator, CachedBlockAllocator, UncachedBlockAllocator};
use crate::config::{CacheConfig, SchedulerConfig};
use crate::error::{Error, Result};
use crate::ids::{BlockId, BlockPair};
use crate::inputs::{int32, int64};
use crate::outputs::SchedulerOutputs;
use crate::sequence::{GroupHandle, SeqHandle, Sequence, SequenceStatus, SequenceStore};
use crate::space::{AllocStatus, BlockSpaceManager};
use crate::table::{WindowTable, num_blocks_for};

/// The window blocks of the device and of the host.
#[derive(Clone, Debug)]
pub(super) struct WindowBlocks {
    /// Tokens that a query attends to, itself included; 0 without windows.
    window: usize,
    block_size: usize,
    num_lookahead_slots: usize,
    max_num_batched_tokens: usize,
    device: Allocator,
    host: Allocator,
}

const PROMISED: &str = "window blocks were checked first, invariant 4";

impl WindowBlocks {
    /// All free.
    ///
    /// # Errors
    /// [`Error::Config`] for fewer than `config` can need.
    pub(super) fn new(config: &SchedulerConfig, cache: &CacheConfig) -> Result<Self> {
        let group = cache.window_group.unwrap_or_default();
        if group.window > 0 {
            let least = config.num_window_blocks(1, group.window, cache.block_size);
            if group.num_gpu_blocks < least {
                return Err(Error::Config(format!(
                    "num_gpu_blocks of window_group is {}; a sequence with a window of {} tokens \
                     and a step of {} need {least}",
                    group.num_gpu_blocks, group.window, config.max_num_batched_tokens
                )));
            }
        }
        Ok(Self {
            window: group.window,
            block_size: cache.block_size,
            num_lookahead_slots: config.num_lookahead_slots,
            max_num_batched_tokens: config.max_num_batched_tokens,
            device: if cache.enable_prefix_caching {
                let (num_blocks, block_size) = (group.num_gpu_blocks, cache.block_size);
                Allocator::Cached(CachedBlockAllocator::new(num_blocks, block_size, false))
            } else {
                Allocator::Uncached(UncachedBlockAllocator::new(group.num_gpu_blocks))
            },
            host: Allocator::Uncached(UncachedBlockAllocator::new(group.num_cpu_blocks)),
        })
    }

    /// Whether sliding-window layers have a separate pool.
    pub(super) fn is_on(&self) -> bool {
        self.window > 0
    }

    /// Blocks of the device.
    pub(super) fn num_total(&self) -> usize {
        self.device.num_total()
    }

    /// The blocks of the tier that groups of `status` are on; none for those that wait.
    pub(super) fn tier(&self, status: SequenceStatus) -> Option<&Allocator> {
        match status {
            SequenceStatus::Waiting => None,
            SequenceStatus::Running => Some(&self.device),
            SequenceStatus::Swapped => Some(&self.host),
        }
    }

    /// The first logical block that a query after `num_computed_tokens` attends to.
    pub(super) fn first_seen(&self, num_computed_tokens: usize) -> usize {
        (num_computed_tokens + 1).saturating_sub(self.window) / self.block_size
    }

    /// Leading tokens of a waiting sequence that are cached for its next query in all layers.
    pub(super) fn num_cached_tokens(
        &self,
        space: &BlockSpaceManager,
        store: &SequenceStore,
        seq: &Sequence,
    ) -> usize {
        let Some(cache) = self.device.cached() else { return 0 };
        if space.config().choices.charge_cached_tokens {
            return 0;
        }
        let most = (seq.len() - 1) / self.block_size;
        let (mut first_known, mut num_cached) = (0, 0);
        for (index, (before, tokens)) in space.usable_blocks(store, seq).take(most).enumerate() {
            let end = (index + 1) * self.block_size;
            if !cache.find(before, tokens).is_some_and(|block| cache.is_computed(block)) {
                first_known = index + 1;
            }
            if first_known <= self.first_seen(end) {
                num_cached = end;
            }
        }
        num_cached
    }

    /// Starts the first sequence of a new group after its cached prefix; the others compute all
    /// their tokens.
    pub(super) fn begin(
        &mut self,
        space: &BlockSpaceManager,
        store: &mut SequenceStore,
        group: GroupHandle,
    ) {
        if !self.is_on() {
            return;
        }
        store.for_each_seq(group, |_, seq| seq.num_computed_tokens = 0);
        let first = store.group(group).seqs[0];
        let num_cached = self.num_cached_tokens(space, store, store.seq(first));
        let seen = self.first_seen(num_cached)..num_cached / self.block_size;
        let Some(cache) = self.device.cached_mut() else { return };
        let known = space.usable_blocks(store, store.seq(first)).take(seen.end).skip(seen.start);
        let blocks: Vec<BlockId> =
            known.map(|(before, tokens)| cache.find(before, tokens).expect(PROMISED)).collect();
        for block in &blocks {
            cache.acquire_found(*block);
        }
        let entry = store.seq_mut(first);
        entry.window_table = WindowTable::new(seen.start, blocks);
        (entry.num_computed_tokens, entry.num_cached_tokens) = (num_cached, num_cached);
    }

    /// Lets a child have its parent's blocks until one of them writes.
    pub(super) fn fork(&mut self, child: &Sequence) {
        for block in child.window_table.blocks() {
            self.device.fork(*block);
        }
    }

    /// Whether a group that waits or runs can have the blocks that rows of `num_tokens` tokens
    /// together take; a copy too many may be counted for each set of sharers.
    pub(super) fn can_allocate(
        &self,
        space: &BlockSpaceManager,
        store: &SequenceStore,
        group: GroupHandle,
        num_tokens: usize,
    ) -> AllocStatus {
        if !self.is_on() {
            return AllocStatus::Ok;
        }
        let num_needed = self.num_needed(space, store, group, num_tokens);
        if num_needed <= self.device.num_free() {
            AllocStatus::Ok
        } else if num_needed <= self.device.num_total() {
            AllocStatus::Later
        } else {
            AllocStatus::Never
        }
    }

    /// Blocks that rows of `num_tokens` tokens together take out of the free ones, at most.  Those
    /// that a group will find when it begins are counted, since most of them are free until then.
    #[inline(never)] // what few models need stays out of the way of the rest
    fn num_needed(
        &self,
        space: &BlockSpaceManager,
        store: &SequenceStore,
        group: GroupHandle,
        num_tokens: usize,
    ) -> usize {
        let num_slots = |seq: &Sequence, computed: usize| {
            computed + num_tokens.min(seq.len() - computed) + self.num_lookahead_slots
        };
        if store.group(group).status == SequenceStatus::Waiting {
            let of_seq = |(position, seq): (usize, &Sequence)| {
                let is_first = position == 0;
                let found = if is_first { self.num_cached_tokens(space, store, seq) } else { 0 };
                num_blocks_for(num_slots(seq, found), self.block_size) - self.first_seen(found)
            };
            return store.seqs_of(group).enumerate().map(of_seq).sum();
        }
        let of_seq = |seq: &Sequence| {
            let (table, computed) = (&seq.window_table, seq.num_computed_tokens);
            let end = num_blocks_for(num_slots(seq, computed), self.block_size);
            let num_new = end.saturating_sub(table.end());
            let written = (computed / self.block_size).saturating_sub(table.first());
            let is_shared = |block: &&BlockId| self.device.ref_count(**block) > 1;
            num_new + table.blocks().iter().skip(written).filter(is_shared).count()
        };
        store.seqs_of(group).map(of_seq).sum()
    }

    /// Gives a row of `num_tokens` tokens and the lookahead blocks of its own; the copies that this
    /// takes go to `copies`.
    #[inline(never)] // what few models need stays out of the way of the rest
    pub(super) fn map(
        &mut self,
        seq: &mut Sequence,
        num_tokens: usize,
        copies: &mut Vec<BlockPair>,
    ) {
        let table = &mut seq.window_table;
        let written = seq.num_computed_tokens / self.block_size - table.first();
        if self.device.num_shared() > 0 {
            for block in table.blocks_mut().iter_mut().skip(written) {
                if self.device.ref_count(*block) > 1 {
                    let own = self.device.allocate(0).expect(PROMISED);
                    self.device.free(*block, seq.last_step);
                    copies.push((*block, own));
                    *block = own;
                }
            }
        }
        let num_slots = seq.num_computed_tokens + num_tokens + self.num_lookahead_slots;
        for index in table.end()..num_blocks_for(num_slots, self.block_size) {
            let num_prefix_tokens = (index + 1) * self.block_size;
            table.push(self.device.allocate(num_prefix_tokens).expect(PROMISED));
        }
    }

    /// Notes what is in the blocks of a sequence that were filled in step `step_id`, from token
    /// `first` on, and takes those back that no later query of it sees.
    #[inline(never)] // what few models need stays out of the way of the rest
    pub(super) fn pass(
        &mut self,
        space: &BlockSpaceManager,
        store: &mut SequenceStore,
        seq: SeqHandle,
        first: usize,
        step_id: u64,
    ) {
        self.note_contents(space, store, store.seq(seq), first, step_id);
        let entry = store.seq_mut(seq);
        let first_seen = self.first_seen(entry.num_computed_tokens);
        for block in entry.window_table.drain_before(first_seen) {
            self.device.free(block, entry.last_step);
        }
    }

    fn note_contents(
        &mut self,
        space: &BlockSpaceManager,
        store: &SequenceStore,
        seq: &Sequence,
        first: usize,
        step_id: u64,
    ) {
        let Some(cache) = self.device.cached_mut() else { return };
        for index in first / self.block_size..seq.num_computed_tokens / self.block_size {
            let Some((before, tokens)) = space.contents(store, seq, index) else { continue };
            match cache.find(before, tokens) {
                Some(known) if cache.is_computed(known) => continue,
                Some(known) => cache.unregister(known), // of a step that was given up
                None => {}
            }
            let block = seq.window_table.block(index);
            cache.register(block, before, tokens);
            cache.mark_pending(block, step_id);
            cache.mark_computed(block);
        }
    }

    /// Drops what the abandoned steps from `step_id` on computed.
    pub(super) fn abandon_since(&mut self, step_id: u64) {
        if let Some(cache) = self.device.cached_mut() {
            cache.abandon_since(step_id);
        }
    }

    /// Forgets every cached prefix; no block is used.
    pub(super) fn reset_prefix_cache(&mut self) {
        self.device.cached_mut().map(CachedBlockAllocator::reset);
    }

    /// Frees the blocks of a sequence on the tier of its group.
    pub(super) fn free(&mut self, store: &mut SequenceStore, seq: SeqHandle) {
        if !self.is_on() {
            return;
        }
        let is_swapped = store.group(store.seq(seq).group()).status == SequenceStatus::Swapped;
        let tier = if is_swapped { &mut self.host } else { &mut self.device };
        let entry = store.seq_mut(seq);
        for block in entry.window_table.drain() {
            tier.free(block, entry.last_step);
        }
    }

    /// Whether the host has enough free window blocks for a running group, and the device enough to
    /// swap it in again.
    pub(super) fn can_swap_out(&self, store: &SequenceStore, group: GroupHandle) -> bool {
        !self.is_on()
            || (num_held(store, group) <= self.host.num_free()
                && self.num_to_return(store, group) <= self.device.num_total())
    }

    /// Whether a swapped group can have its blocks back, and those that its next rows take.
    pub(super) fn can_swap_in(&self, store: &SequenceStore, group: GroupHandle) -> bool {
        !self.is_on() || self.num_to_return(store, group) <= self.device.num_free()
    }

    fn num_to_return(&self, store: &SequenceStore, group: GroupHandle) -> usize {
        let touched = |seq: &Sequence| {
            let num_tokens = seq.num_uncomputed_tokens().min(self.max_num_batched_tokens);
            num_blocks_for(num_tokens + self.num_lookahead_slots, self.block_size) + 1
        };
        num_held(store, group) + store.seqs_of(group).map(touched).sum::<usize>()
    }

    /// Moves a running group's window blocks to the host; the pairs (device, host) go to `pairs`.
    pub(super) fn swap_out(
        &mut self,
        store: &mut SequenceStore,
        group: GroupHandle,
        pairs: &mut Vec<BlockPair>,
    ) {
        if self.is_on() {
            move_group(store, group, &mut self.device, &mut self.host, pairs);
        }
    }

    /// Moves a swapped group's window blocks to the device; the pairs (host, device) go to `pairs`.
    pub(super) fn swap_in(
        &mut self,
        store: &mut SequenceStore,
        group: GroupHandle,
        pairs: &mut Vec<BlockPair>,
    ) {
        if self.is_on() {
            move_group(store, group, &mut self.host, &mut self.device, pairs);
        }
    }

    /// Writes the window blocks of each row, 0 where none is seen, and the slot of each token.
    #[inline(never)] // what few models need stays out of the way of the rest
    pub(super) fn fill(
        &self,
        tables: &mut [i32],
        slots: &mut [i64],
        outputs: &SchedulerOutputs,
        store: &SequenceStore,
    ) {
        let mut slots = slots.iter_mut();
        // A step of moves alone has no rows, and tables of no width.
        let rows = tables.chunks_exact_mut(outputs.max_num_blocks.max(1));
        for (entries, row) in rows.zip(&outputs.rows) {
            let seq = store.seq(row.seq);
            let (computed, table) = (seq.num_computed_tokens, &seq.window_table);
            let end = computed + row.num_tokens + row.num_drafts;
            entries.fill(0);
            for (entry, block) in entries.iter_mut().skip(table.first()).zip(table.blocks()) {
                *entry = int32(block.index());
            }
            for (position, slot) in (computed..end).zip(&mut slots) {
                let block = table.block(position / self.block_size).index();
                *slot = int64(block * self.block_size + position % self.block_size);
            }
        }
    }
}

/// Window blocks of a group, those that several sequences share counted for each.
fn num_held(store: &SequenceStore, group: GroupHandle) -> usize {
    store.seqs_of(group).map(|seq| seq.window_table.blocks().len()).sum()
}

/// Every window block of a group gets a twin in the other tier, shared as it was.
fn move_group(
    store: &mut SequenceStore,
    group: GroupHandle,
    from: &mut Allocator,
    to: &mut Allocator,
    pairs: &mut Vec<BlockPair>,
) {
    let first = pairs.len();
    store.for_each_seq(group, |_, seq| {
        for block in seq.window_table.blocks_mut() {
            let twin = from.hand_over(*block, seq.last_step, to, pairs, first);
            *block = twin.expect(PROMISED);
        }
    });
}
