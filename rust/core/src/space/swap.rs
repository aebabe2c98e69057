//! Swap: blocks of a group between the tiers.
//!
//! Every block gets a twin in the other tier, shared as it was.  With prefix caching both tiers
//! keep contents: full blocks that the other tier still holds are reused and not moved.

use std::collections::BTreeMap;

use crate::block::{Allocator, Prefix};
use crate::ids::{BlockId, BlockPair, TokenId};
use crate::outputs::Moves;
use crate::sequence::{Chain, GroupHandle, SeqHandle, SequenceStore};
use crate::space::group::{GroupBlocks, Tiers, moves_of};
use crate::space::{AllocStatus, BlockSpaceManager, PROMISED};

/// Direction of a swap.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Direction {
    Out,
    In,
}

impl Direction {
    /// The tier that blocks leave, and the one they go to.
    fn tiers(self, tiers: &mut Tiers) -> (&mut Allocator, &mut Allocator) {
        match self {
            Self::Out => (&mut tiers.gpu, &mut tiers.cpu),
            Self::In => (&mut tiers.cpu, &mut tiers.gpu),
        }
    }

    /// The list of pairs for this direction.
    fn pairs(self, moves: &mut Moves) -> &mut Vec<BlockPair> {
        match self {
            Self::Out => &mut moves.swap_out,
            Self::In => &mut moves.swap_in,
        }
    }
}

impl BlockSpaceManager {
    /// Whether the host has enough free blocks for a running group, and the device enough to swap
    /// it in again.
    pub fn can_swap_out(&self, store: &SequenceStore, group: GroupHandle) -> bool {
        self.num_unique_blocks(store, group) <= self.cpu().num_free()
            && self.num_blocks_to_swap_in(store, group) <= self.gpu().num_total()
            && self.groups.iter().enumerate().all(|(index, other)| {
                let Some(tiers) = other.own_tiers() else { return true };
                let (num_held, num_to_return) = self.held_and_to_return(index, store, group);
                num_held <= tiers.cpu.num_free() && num_to_return <= tiers.gpu.num_total()
            })
    }

    /// Moves a running group's blocks to the host; the pairs (device, host) go to `moves`.
    pub(crate) fn swap_out(
        &mut self,
        store: &mut SequenceStore,
        group: GroupHandle,
        moves: &mut [Moves],
    ) {
        self.move_group(store, group, Direction::Out, moves);
        store.for_each_seq(group, |_, seq| {
            seq.num_cached_tokens = 0;
            seq.chain = Chain::default();
        });
    }

    /// Whether a swapped group can be swapped in.  The result is not [`AllocStatus::Never`]: such a
    /// group is not swapped out.
    pub fn can_swap_in(&self, store: &SequenceStore, group: GroupHandle) -> AllocStatus {
        let num_blocks = self.num_blocks_to_swap_in(store, group);
        let has_blocks = |(index, other): (usize, &GroupBlocks)| {
            let Some(tiers) = other.own_tiers() else { return true };
            self.held_and_to_return(index, store, group).1 <= tiers.gpu.num_free()
        };
        match self.judge(num_blocks, num_blocks, true) {
            AllocStatus::Ok if !self.groups.iter().enumerate().all(has_blocks) => {
                AllocStatus::Later
            }
            status => status,
        }
    }

    /// Moves a swapped group's blocks to the device; the pairs (host, device) go to `moves`.
    pub(crate) fn swap_in(
        &mut self,
        store: &mut SequenceStore,
        group: GroupHandle,
        moves: &mut [Moves],
    ) {
        self.move_group(store, group, Direction::In, moves);
    }

    fn move_group(
        &mut self,
        store: &mut SequenceStore,
        group: GroupHandle,
        direction: Direction,
        moves: &mut [Moves],
    ) {
        let mut twins: BTreeMap<BlockId, BlockId> = BTreeMap::new();
        for position in 0..store.group(group).seqs.len() {
            let seq = store.group(group).seqs[position];
            self.move_seq(store, seq, direction, &mut twins, direction.pairs(&mut moves[0]));
        }
        for (index, other) in self.groups.iter_mut().enumerate() {
            let pairs = direction.pairs(moves_of(moves, index, other));
            let (from, to) = direction.tiers(other.tiers_mut(&mut self.tiers));
            let first = pairs.len();
            store.for_each_seq(group, |_, seq| {
                for block in seq.tables[index].blocks_mut() {
                    let twin = from.hand_over(*block, seq.last_step, to, pairs, first);
                    *block = twin.expect(PROMISED);
                }
            });
        }
    }

    fn move_seq(
        &mut self,
        store: &mut SequenceStore,
        seq: SeqHandle,
        direction: Direction,
        twins: &mut BTreeMap<BlockId, BlockId>,
        pairs: &mut Vec<BlockPair>,
    ) {
        let mut chain = self.chain_at(store, store.seq(seq), 0);
        let block_size = self.config.block_size;
        for place in 0..store.seq(seq).table.blocks().len() {
            let entry = store.seq(seq);
            let block = entry.table.blocks()[place];
            let end = (place + 1) * block_size;
            let is_full = end <= entry.num_computed_tokens;
            let before = chain.prefix.filter(|_| is_full);
            let lookup = before.and_then(|before| self.lookup(entry, place, before));
            let twin = if let Some(twin) = twins.get(&block) {
                direction.tiers(&mut self.tiers).1.fork(*twin);
                *twin
            } else {
                let (twin, is_moved) = match self.blank_twin(direction, block, lookup.is_some()) {
                    Some(twin) => (twin, true),
                    None => self.twin(direction, lookup, end),
                };
                self.note_origin(direction, block, twin);
                if is_moved {
                    pairs.push((block, twin));
                }
                let step_id = self.step_id;
                if let (Some(cache), true) =
                    (direction.tiers(&mut self.tiers).1.cached_mut(), is_full)
                {
                    cache.mark_pending(twin, step_id);
                }
                twins.insert(block, twin);
                twin
            };
            let last_step = entry.last_step;
            store.seq_mut(seq).table.replace(place, twin);
            let (from, to) = direction.tiers(&mut self.tiers);
            from.free(block, last_step);
            if let (Some(cache), true) = (to.cached(), is_full) {
                chain = Chain { num_blocks: place + 1, prefix: cache.prefix_of(twin) };
            }
        }
        store.seq_mut(seq).chain = chain;
    }

    /// The device block that a partly filled host block was swapped out of, if it still has those
    /// contents.  Found only if blocks without full contents are evicted in order too.
    fn blank_twin(
        &mut self,
        direction: Direction,
        host: BlockId,
        is_full: bool,
    ) -> Option<BlockId> {
        if direction == Direction::Out || is_full {
            return None;
        }
        let origin = self.tiers.cpu.cached()?.origin(host)?;
        self.tiers.gpu.cached_mut()?.retake(origin)
    }

    fn note_origin(&mut self, direction: Direction, block: BlockId, twin: BlockId) {
        if let (Direction::Out, Some(gpu), Some(cpu)) =
            (direction, self.tiers.gpu.cached(), self.tiers.cpu.cached_mut())
        {
            cpu.set_origin(twin, gpu.stamped(block));
        }
    }

    /// Takes a block of the other tier for a block of a group; returns whether the contents must be
    /// moved there.  `lookup` is the lookup key of a full block.
    fn twin(
        &mut self,
        direction: Direction,
        lookup: Option<(Prefix, &[TokenId])>,
        num_prefix_tokens: usize,
    ) -> (BlockId, bool) {
        let (step_id, moves_all) = (self.step_id, self.config.choices.swap_in_cached_blocks);
        let (_, to) = direction.tiers(&mut self.tiers);
        let Some((prefix, tokens)) = lookup else {
            return (to.allocate(num_prefix_tokens).expect(PROMISED), true);
        };
        let known = to.cached().and_then(|cache| cache.find(prefix, tokens));
        if let (Some(cache), Some(known)) = (to.cached_mut(), known)
            && (moves_all || cache.is_usable(known, step_id))
        {
            cache.acquire_found(known);
            return (known, moves_all);
        }
        let twin = to.allocate(num_prefix_tokens).expect(PROMISED);
        if let (Some(cache), None) = (to.cached_mut(), known) {
            cache.register(twin, prefix, tokens);
        }
        (twin, true)
    }
}
