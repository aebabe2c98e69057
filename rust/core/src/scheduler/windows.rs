//! Window blocks: where layers that see a window keep the end of each sequence.
//!
//! Owns the blocks of both tiers, apart from those of the layers that see everything.  Invariants:
//! 1. Waiting sequences have no window blocks, running ones have them on the device, swapped ones
//!    on the host; a block's reference count is the number of window tables that name it.
//! 2. Between steps a table begins with the first block that a later query sees; a row maps what it
//!    writes, and its update takes what has passed.
//! 3. No row writes a block that another sequence has: it gets its own and a copy first.
//! 4. There are blocks for as many sequences as may run and for the tokens of a step, so whoever may
//!    run can have them.
//! 5. A sequence that begins computes all tokens of its own, also those whose keys a sibling writes
//!    in the layers that see everything.
//!
//! Costs: O(blocks that come and go) a row; without windows a comparison a row.

use crate::block::UncachedBlockAllocator;
use crate::config::{CacheConfig, SchedulerConfig};
use crate::error::{Error, Result};
use crate::ids::BlockPair;
use crate::inputs::{int32, int64};
use crate::outputs::{Row, SchedulerOutputs};
use crate::sequence::{GroupHandle, SeqHandle, Sequence, SequenceStatus, SequenceStore};
use crate::table::num_blocks_for;

/// The window blocks of the device and of the host.
#[derive(Clone, Debug)]
pub(super) struct WindowBlocks {
    /// Tokens that a query sees, itself included; 0 without windows.
    window: usize,
    block_size: usize,
    num_lookahead_slots: usize,
    device: UncachedBlockAllocator,
    host: UncachedBlockAllocator,
}

const PROMISED: &str = "window blocks for all sequences that may run, invariant 4";

impl WindowBlocks {
    /// All free.
    ///
    /// # Errors
    /// [`Error::Config`] for fewer than `config` can need.
    pub(super) fn new(config: &SchedulerConfig, cache: &CacheConfig) -> Result<Self> {
        let group = cache.window_group.unwrap_or_default();
        if group.window > 0 {
            let least = config.num_window_blocks(group.window, cache.block_size);
            if group.num_gpu_blocks < least {
                return Err(Error::Config(format!(
                    "num_gpu_blocks of window_group is {}; {} sequences of a window of {} tokens need {least}",
                    group.num_gpu_blocks, config.max_num_seqs, group.window
                )));
            }
        }
        Ok(Self {
            window: group.window,
            block_size: cache.block_size,
            num_lookahead_slots: config.num_lookahead_slots,
            device: UncachedBlockAllocator::new(group.num_gpu_blocks),
            host: UncachedBlockAllocator::new(group.num_cpu_blocks),
        })
    }

    /// Whether layers with a window have blocks of their own.
    pub(super) fn is_on(&self) -> bool {
        self.window > 0
    }

    /// The blocks of the tier that groups of `status` are on; none for those that wait.
    pub(super) fn tier(&self, status: SequenceStatus) -> Option<&UncachedBlockAllocator> {
        match status {
            SequenceStatus::Waiting => None,
            SequenceStatus::Running => Some(&self.device),
            SequenceStatus::Swapped => Some(&self.host),
        }
    }

    /// The first logical block that a query behind `num_computed_tokens` sees.
    pub(super) fn first_seen(&self, num_computed_tokens: usize) -> usize {
        (num_computed_tokens + 1).saturating_sub(self.window) / self.block_size
    }

    /// Has every sequence of a group that begins compute everything.
    pub(super) fn begin(&self, store: &mut SequenceStore, group: GroupHandle) {
        if self.is_on() {
            store.for_each_seq(group, |_, seq| seq.num_computed_tokens = 0);
        }
    }

    /// Lets a child have its parent's blocks until one of them writes.
    pub(super) fn fork(&mut self, child: &Sequence) {
        for block in child.window_table.blocks() {
            self.device.fork(*block);
        }
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
                    let own = self.device.allocate().expect(PROMISED);
                    self.device.free(*block);
                    copies.push((*block, own));
                    *block = own;
                }
            }
        }
        let num_slots = seq.num_computed_tokens + num_tokens + self.num_lookahead_slots;
        for _ in table.end()..num_blocks_for(num_slots, self.block_size) {
            table.push(self.device.allocate().expect(PROMISED));
        }
    }

    /// Takes the blocks back that no later query of a sequence sees.
    #[inline(never)] // what few models need stays out of the way of the rest
    pub(super) fn pass(&mut self, seq: &mut Sequence) {
        let first = self.first_seen(seq.num_computed_tokens);
        for block in seq.window_table.drain_before(first) {
            self.device.free(block);
        }
    }

    /// Takes the blocks of a sequence back, of the tier of its group.
    pub(super) fn free(&mut self, store: &mut SequenceStore, seq: SeqHandle) {
        if !self.is_on() {
            return;
        }
        let is_swapped = store.group(store.seq(seq).group()).status == SequenceStatus::Swapped;
        let tier = if is_swapped { &mut self.host } else { &mut self.device };
        for block in store.seq_mut(seq).window_table.drain() {
            tier.free(block);
        }
    }

    /// Whether the host has room for the window blocks of a running group.
    pub(super) fn can_swap_out(&self, store: &SequenceStore, group: GroupHandle) -> bool {
        // One each is more than is needed where they are shared.
        let num_blocks = |seq: &Sequence| seq.window_table.blocks().len();
        !self.is_on() || store.seqs_of(group).map(num_blocks).sum::<usize>() <= self.host.num_free()
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
        for (entries, Row { seq, num_tokens, .. }) in rows.zip(&outputs.rows) {
            let seq = store.seq(*seq);
            let (computed, table) = (seq.num_computed_tokens, &seq.window_table);
            entries.fill(0);
            for (entry, block) in entries.iter_mut().skip(table.first()).zip(table.blocks()) {
                *entry = int32(block.index());
            }
            for (position, slot) in (computed..computed + num_tokens).zip(&mut slots) {
                let block = table.block(position / self.block_size).index();
                *slot = int64(block * self.block_size + position % self.block_size);
            }
        }
    }
}

/// Every window block of a group gets a twin in the other tier, shared as it was.
fn move_group(
    store: &mut SequenceStore,
    group: GroupHandle,
    from: &mut UncachedBlockAllocator,
    to: &mut UncachedBlockAllocator,
    pairs: &mut Vec<BlockPair>,
) {
    let first = pairs.len();
    store.for_each_seq(group, |_, seq| {
        for block in seq.window_table.blocks_mut() {
            *block = from.hand_over(*block, to, pairs, first).expect(PROMISED);
        }
    });
}
