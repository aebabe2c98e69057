//! `BlockSpaceManager`: the blocks of both tiers and who may have them.
//!
//! Owns the allocators, and is the only one to change block tables.  Questions (`can_*`)
//! change nothing; the act of the same name may be called when the answer was yes.
//! Invariants:
//! 1. A block's reference count is the number of block tables that name it.
//! 2. The tables of waiting groups are empty, those of running groups name device blocks,
//!    those of swapped groups host blocks.
//! 3. No block is written while shared: `append_slots` copies first.  The one exception is a
//!    recompute, where a sequence writes what its siblings share because it is theirs too.
//!
//! Costs: allocate and free O(blocks); a decode step of a sequence O(1); swap O(blocks of the
//! group) and one hash map.

mod demand;

use std::collections::BTreeMap;

use crate::block::UncachedBlockAllocator;
use crate::config::CacheConfig;
use crate::ids::{BlockId, BlockPair};
use crate::sequence::{GroupHandle, SeqHandle, SequenceStore};
use crate::table::{BlockTable, num_blocks_for};

pub use demand::SharedPrefix;

/// Whether a group can have the blocks it asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AllocStatus {
    /// Now.
    Ok,
    /// When others have given theirs back.
    Later,
    /// Not even alone.
    Never,
}

/// The KV blocks of the device and of the host.
#[derive(Clone, Debug)]
pub struct BlockSpaceManager {
    block_size: usize,
    watermark_blocks: usize,
    gpu: UncachedBlockAllocator,
    cpu: UncachedBlockAllocator,
}

const PROMISED: &str = "the act follows a yes of its question";

impl BlockSpaceManager {
    /// All blocks of both tiers, free.  `config` is valid.
    pub fn new(config: &CacheConfig) -> Self {
        Self {
            block_size: config.block_size,
            watermark_blocks: config.watermark_blocks(),
            gpu: UncachedBlockAllocator::new(config.num_gpu_blocks),
            cpu: UncachedBlockAllocator::new(config.num_cpu_blocks),
        }
    }

    /// The device blocks.
    pub fn gpu(&self) -> &UncachedBlockAllocator {
        &self.gpu
    }

    /// The host blocks.
    pub fn cpu(&self) -> &UncachedBlockAllocator {
        &self.cpu
    }

    /// Tokens a block holds.
    pub fn block_size(&self) -> usize {
        self.block_size
    }

    /// Blocks that can be given to groups while the watermark is kept.
    pub fn num_usable_blocks(&self) -> usize {
        self.gpu.num_total() - self.watermark_blocks
    }

    /// Whether a waiting group can have blocks for all of its tokens.
    ///
    /// The watermark decides for a group that has not run yet.  One that had blocks before
    /// may use the last of them when nobody else holds any: it must be able to come back.
    pub fn can_allocate(&self, store: &SequenceStore, group: GroupHandle) -> AllocStatus {
        let has_run = store.group(group).first_scheduled_time.is_some();
        self.judge(self.num_blocks_to_allocate(store, group), has_run)
    }

    fn judge(&self, num_blocks: usize, may_use_watermark: bool) -> AllocStatus {
        let reserved = if may_use_watermark { 0 } else { self.watermark_blocks };
        if num_blocks + reserved > self.gpu.num_total() {
            AllocStatus::Never
        } else if num_blocks + self.watermark_blocks <= self.gpu.num_free()
            || (may_use_watermark && self.gpu.num_used() == 0)
        {
            AllocStatus::Ok
        } else {
            AllocStatus::Later
        }
    }

    /// Gives a waiting group device blocks for all of its tokens.  Of several sequences each
    /// shares the full blocks of what it has in common with an earlier one, and counts them
    /// as computed: rows of earlier sequences are always scheduled first.
    pub(crate) fn allocate(&mut self, store: &mut SequenceStore, group: GroupHandle) {
        for (position, shared) in self.shared_prefixes(store, group).into_iter().enumerate() {
            let seqs = &store.group(group).seqs;
            let (seq, donor) = (seqs[position], seqs[shared.donor]);
            let mut table = BlockTable::default();
            for block in &store.seq(donor).table.blocks()[..shared.num_blocks] {
                self.gpu.fork(*block);
                table.push(*block);
            }
            for _ in shared.num_blocks..num_blocks_for(store.seq(seq).len(), self.block_size) {
                table.push(self.gpu.allocate().expect(PROMISED));
            }
            let seq = store.seq_mut(seq);
            seq.num_computed_tokens = shared.num_blocks * self.block_size;
            seq.table = table;
        }
    }

    /// Whether every sequence of a running group can have the slots of its uncomputed tokens.
    pub fn can_append_slots(&self, store: &SequenceStore, group: GroupHandle) -> bool {
        let free = self.gpu.num_free();
        // Each sequence takes one block at most; the exact sum is wanted only when that is tight.
        store.group(group).seqs.len() <= free || self.append_demand(store, group) <= free
    }

    /// Gives a running sequence the slots of its uncomputed tokens, in blocks of its own: a
    /// shared block that would be written is exchanged, and the copy noted in `copies`.
    pub(crate) fn append_slots(
        &mut self,
        store: &mut SequenceStore,
        seq: SeqHandle,
        copies: &mut Vec<BlockPair>,
    ) {
        let seq = store.seq_mut(seq);
        let first_written = seq.num_computed_tokens / self.block_size;
        for index in first_written..seq.table.len() {
            let shared = seq.table.blocks()[index];
            if self.gpu.is_shared(shared) {
                let own = self.gpu.allocate().expect(PROMISED);
                seq.table.replace(index, own);
                self.gpu.free(shared);
                copies.push((shared, own));
            }
        }
        for _ in seq.table.len()..num_blocks_for(seq.len(), self.block_size) {
            seq.table.push(self.gpu.allocate().expect(PROMISED));
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

    /// Takes the device blocks of a running sequence back.
    pub(crate) fn free(&mut self, store: &mut SequenceStore, seq: SeqHandle) {
        for block in store.seq_mut(seq).table.drain() {
            self.gpu.free(block);
        }
    }

    /// Takes the host blocks of a swapped sequence back.
    pub(crate) fn free_swapped(&mut self, store: &mut SequenceStore, seq: SeqHandle) {
        for block in store.seq_mut(seq).table.drain() {
            self.cpu.free(block);
        }
    }

    /// Whether the host has room for a running group, and the device enough to have it back.
    pub fn can_swap_out(&self, store: &SequenceStore, group: GroupHandle) -> bool {
        Self::num_unique_blocks(store, group) <= self.cpu.num_free()
            && Self::num_blocks_to_swap_in(store, group) <= self.gpu.num_total()
    }

    /// Moves a running group's blocks to the host; the pairs (device, host) go to `pairs`.
    pub(crate) fn swap_out(
        &mut self,
        store: &mut SequenceStore,
        group: GroupHandle,
        pairs: &mut Vec<BlockPair>,
    ) {
        move_tables(store, group, &mut self.gpu, &mut self.cpu, pairs);
    }

    /// Whether a swapped group can have its blocks back on the device.  Never is no answer:
    /// such a group is not swapped out.
    pub fn can_swap_in(&self, store: &SequenceStore, group: GroupHandle) -> AllocStatus {
        self.judge(Self::num_blocks_to_swap_in(store, group), true)
    }

    /// Moves a swapped group's blocks to the device; the pairs (host, device) go to `pairs`.
    pub(crate) fn swap_in(
        &mut self,
        store: &mut SequenceStore,
        group: GroupHandle,
        pairs: &mut Vec<BlockPair>,
    ) {
        move_tables(store, group, &mut self.cpu, &mut self.gpu, pairs);
    }
}

/// Gives each block of the group a twin in the other tier, shared as the block was.
fn move_tables(
    store: &mut SequenceStore,
    group: GroupHandle,
    from: &mut UncachedBlockAllocator,
    to: &mut UncachedBlockAllocator,
    pairs: &mut Vec<BlockPair>,
) {
    let mut twins: BTreeMap<BlockId, BlockId> = BTreeMap::new();
    store.for_each_seq(group, |seq| {
        for index in 0..seq.table.len() {
            let block = seq.table.blocks()[index];
            let twin = if let Some(twin) = twins.get(&block) {
                to.fork(*twin);
                *twin
            } else {
                let twin = to.allocate().expect(PROMISED);
                twins.insert(block, twin);
                pairs.push((block, twin));
                twin
            };
            seq.table.replace(index, twin);
            from.free(block);
        }
    });
}
