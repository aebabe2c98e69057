//! Swap: blocks of a group between the tiers.
//!
//! On the way out every block goes to the host, shared as it was.  On the way in, blocks that
//! the prefix cache still has on the device are taken from there and not moved.

use std::collections::BTreeMap;

use crate::block::Prefix;
use crate::ids::{BlockId, BlockPair, TokenId};
use crate::sequence::{Chain, GroupHandle, SeqHandle, SequenceStore};
use crate::space::{AllocStatus, BlockSpaceManager, PROMISED};

impl BlockSpaceManager {
    /// Whether the host has room for a running group, and the device enough to have it back.
    pub fn can_swap_out(&self, store: &SequenceStore, group: GroupHandle) -> bool {
        Self::num_unique_blocks(store, group) <= self.cpu.num_free()
            && self.num_blocks_to_swap_in(store, group) <= self.gpu.num_total()
    }

    /// Moves a running group's blocks to the host; the pairs (device, host) go to `pairs`.
    pub(crate) fn swap_out(
        &mut self,
        store: &mut SequenceStore,
        group: GroupHandle,
        pairs: &mut Vec<BlockPair>,
    ) {
        let mut twins: BTreeMap<BlockId, BlockId> = BTreeMap::new();
        let mut twin_of = |space: &mut Self, block: BlockId, last_step: u64| {
            let twin = if let Some(twin) = twins.get(&block) {
                space.cpu.fork(*twin);
                *twin
            } else {
                let twin = space.cpu.allocate().expect(PROMISED);
                twins.insert(block, twin);
                pairs.push((block, twin));
                twin
            };
            space.gpu.free(block, last_step);
            twin
        };
        store.for_each_seq(group, |seq| {
            for place in 0..seq.table.blocks().len() {
                let twin = twin_of(self, seq.table.blocks()[place], seq.last_step);
                seq.table.replace(place, twin);
            }
            seq.num_cached_tokens = 0;
            seq.chain = Chain::default();
        });
        let step_id = self.step_id;
        let cross_table = &mut store.group_mut(group).cross_table;
        for place in 0..cross_table.blocks().len() {
            let twin = twin_of(self, cross_table.blocks()[place], step_id);
            cross_table.replace(place, twin);
        }
    }

    /// Whether a swapped group can have its blocks back on the device.  Never is no answer:
    /// such a group is not swapped out.
    pub fn can_swap_in(&self, store: &SequenceStore, group: GroupHandle) -> AllocStatus {
        let num_blocks = self.num_blocks_to_swap_in(store, group);
        self.judge(num_blocks, num_blocks, true)
    }

    /// Moves a swapped group's blocks to the device; the pairs (host, device) go to `pairs`.
    pub(crate) fn swap_in(
        &mut self,
        store: &mut SequenceStore,
        group: GroupHandle,
        pairs: &mut Vec<BlockPair>,
    ) {
        let mut twins: BTreeMap<BlockId, BlockId> = BTreeMap::new();
        for position in 0..store.group(group).seqs.len() {
            let seq = store.group(group).seqs[position];
            self.swap_seq_in(store, seq, &mut twins, pairs);
        }
        let cross_table = &mut store.group_mut(group).cross_table;
        for place in 0..cross_table.blocks().len() {
            let twin = self.gpu.allocate(0).expect(PROMISED);
            let block = cross_table.replace(place, twin);
            pairs.push((block, twin));
            self.cpu.free(block);
        }
    }

    fn swap_seq_in(
        &mut self,
        store: &mut SequenceStore,
        seq: SeqHandle,
        twins: &mut BTreeMap<BlockId, BlockId>,
        pairs: &mut Vec<BlockPair>,
    ) {
        let mut chain = self.chain_at(store, store.seq(seq), 0);
        let block_size = self.config.block_size;
        for place in 0..store.seq(seq).table.blocks().len() {
            let entry = store.seq(seq);
            let host = entry.table.blocks()[place];
            let end = (place + 1) * block_size;
            let is_full = end <= entry.num_computed_tokens;
            let before = chain.prefix.filter(|_| is_full);
            let lookup = before.and_then(|before| self.lookup(store.seq(seq), place, before));
            let twin = if let Some(twin) = twins.get(&host) {
                self.gpu.fork(*twin);
                *twin
            } else {
                let (twin, is_moved) = self.device_twin(lookup, end);
                let is_target = || pairs.iter().any(|(_, target)| *target == twin);
                if is_moved || (self.config.swap_in_cached_blocks && !is_target()) {
                    pairs.push((host, twin));
                }
                twins.insert(host, twin);
                twin
            };
            store.seq_mut(seq).table.replace(place, twin);
            self.cpu.free(host);
            if let (Some(cache), true) = (self.gpu.cached(), is_full) {
                chain = Chain { num_blocks: place + 1, prefix: cache.prefix_of(twin) };
            }
        }
        store.seq_mut(seq).chain = chain;
    }

    /// A device block for what the host holds, and whether it must be moved there.  `lookup` is
    /// what a full block would be found by.
    fn device_twin(
        &mut self,
        lookup: Option<(Prefix, &[TokenId])>,
        num_prefix_tokens: usize,
    ) -> (BlockId, bool) {
        let Some((prefix, tokens)) = lookup else {
            return (self.gpu.allocate(num_prefix_tokens).expect(PROMISED), true);
        };
        let known = self.gpu.cached().and_then(|cache| cache.find(prefix, tokens));
        if let (Some(cache), Some(known)) = (self.gpu.cached_mut(), known)
            && cache.is_computed(known)
        {
            cache.acquire_found(known);
            return (known, false);
        }
        let twin = self.gpu.allocate(num_prefix_tokens).expect(PROMISED);
        if let (Some(cache), None) = (self.gpu.cached_mut(), known) {
            cache.register(twin, prefix, tokens);
            cache.mark_pending(twin, self.step_id);
        }
        (twin, true)
    }
}
