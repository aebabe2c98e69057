//! Number of blocks that a group needs: the one formula of every `can_*`.

use std::borrow::Cow;
use std::collections::BTreeSet;

use smallvec::{SmallVec, smallvec};

use crate::config::KvKind;
use crate::ids::{BlockId, TokenId};
use crate::sequence::{GroupHandle, Sequence, SequenceStore};
use crate::space::group::{GroupBlocks, Tiers};
use crate::space::{AllocStatus, BlockSpaceManager};
use crate::table::num_blocks_for;

/// Leading full blocks that a sequence can share with an earlier one of its group.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SharedPrefix {
    /// Position of the earlier sequence in the group; meaningless without blocks.
    pub donor: usize,
    /// Blocks in common.
    pub num_blocks: usize,
}

impl BlockSpaceManager {
    /// Blocks that a sequence of `num_tokens` tokens holds.
    pub fn num_blocks_of(&self, num_tokens: usize) -> usize {
        let num_blocks = num_blocks_for(num_tokens, self.config.block_size);
        self.ring.map_or(num_blocks, |ring| num_blocks.min(ring))
    }

    /// Device blocks for all tokens of a group without blocks, counting once the blocks that its
    /// sequences have in common, and those for its encoder.
    pub fn num_blocks_to_allocate(&self, store: &SequenceStore, group: GroupHandle) -> usize {
        let shared = self.shared_prefixes(store, group);
        let demand = |(seq, shared): (&Sequence, SharedPrefix)| {
            self.num_blocks_of(seq.len()) - shared.num_blocks
        };
        self.num_cross_blocks(store, group)
            + store.seqs_of(group).zip(shared).map(demand).sum::<usize>()
    }

    /// Blocks of the first group's pool that cross attention takes.
    fn num_cross_blocks(&self, store: &SequenceStore, group: GroupHandle) -> usize {
        let num_groups = self.kinds().filter(|kind| *kind == KvKind::Cross).count();
        let num_tokens = store.group(group).num_encoder_tokens;
        num_groups * num_blocks_for(num_tokens, self.config.block_size)
    }

    /// For each sequence of a group, the longest run of full blocks that it has in common
    /// with an earlier one.  The last token of either is left out: it is computed last, and a
    /// donor may hold it back while its siblings catch up.
    pub(super) fn shared_prefixes(
        &self,
        store: &SequenceStore,
        group: GroupHandle,
    ) -> SmallVec<[SharedPrefix; 1]> {
        let num_seqs = store.group(group).seqs.len();
        let mut prefixes: SmallVec<[SharedPrefix; 1]> = smallvec![SharedPrefix::default()];
        if num_seqs == 1 || self.ring.is_some() {
            // A ring holds the end of a sequence, not its start.
            prefixes.resize(num_seqs, SharedPrefix::default());
            return prefixes;
        }
        let seqs: SmallVec<[Cow<'_, [TokenId]>; 4]> =
            store.seqs_of(group).map(Sequence::token_ids).collect();
        for (position, seq) in seqs.iter().enumerate().skip(1) {
            let shared = |donor: usize| SharedPrefix {
                donor,
                num_blocks: num_common_tokens(seq, &seqs[donor]) / self.config.block_size,
            };
            let best = (0..position).map(shared).max_by_key(|prefix| prefix.num_blocks);
            prefixes.push(best.unwrap_or_default());
        }
        prefixes
    }

    /// Tokens of a waiting group that are computed for an earlier one of its sequences.
    pub(crate) fn num_shared_tokens(&self, store: &SequenceStore, group: GroupHandle) -> usize {
        if store.group(group).seqs.len() == 1 || !self.follow_first() {
            return 0;
        }
        let shared = self.shared_prefixes(store, group);
        shared.iter().map(|prefix| prefix.num_blocks).sum::<usize>() * self.config.block_size
    }

    /// Device blocks that the slots of a running group's uncomputed tokens and the lookahead
    /// take: new ones, and copies of shared ones.  At most one copy too many for each set of
    /// sharers, the last of which keeps the block.
    pub(crate) fn append_demand(&self, store: &SequenceStore, group: GroupHandle) -> usize {
        let block_size = self.config.block_size;
        let demand = |seq: &Sequence| {
            let blocks = seq.table.blocks();
            let num_slots = seq.len() + self.num_lookahead_slots;
            let written =
                seq.num_computed_tokens / block_size..num_blocks_for(num_slots, block_size);
            let takes_block =
                |place: &usize| blocks.get(*place).is_none_or(|block| self.gpu().is_shared(*block));
            let most = self.ring.unwrap_or(usize::MAX);
            seq.table.places(written).take(most).filter(takes_block).count()
        };
        store.seqs_of(group).map(demand).sum()
    }

    /// Device blocks that a group needs to be swapped in: its blocks, and for each sequence those
    /// that its next token and the lookahead can touch.
    pub(super) fn num_blocks_to_swap_in(&self, store: &SequenceStore, group: GroupHandle) -> usize {
        let num_touched = 1 + num_blocks_for(self.num_lookahead_slots, self.config.block_size);
        self.num_unique_blocks(store, group) + store.group(group).seqs.len() * num_touched
    }

    /// Physical blocks of the first group's pool that a running or swapped group has.
    pub(crate) fn num_unique_blocks(&self, store: &SequenceStore, group: GroupHandle) -> usize {
        let blocks = store.seqs_of(group).flat_map(|seq| seq.table.blocks());
        self.num_cross_blocks(store, group)
            + match store.group(group).seqs.len() {
                1 => blocks.count(),
                _ => blocks.collect::<BTreeSet<&BlockId>>().len(),
            }
    }

    /// Whether the KV groups beside the first have free blocks for a waiting group to begin with
    /// rows of `num_tokens` tokens together.
    #[inline(never)] // few models need it: kept out of the common path
    pub(super) fn can_begin(
        &self,
        store: &SequenceStore,
        group: GroupHandle,
        num_tokens: usize,
    ) -> AllocStatus {
        if self.follow_first() {
            return AllocStatus::Ok;
        }
        let num_cached = self.num_cached_tokens(store, store.first_seq_of(group));
        let judge = |other: &GroupBlocks| {
            let Some(Tiers { gpu, .. }) = other.own_tiers() else { return AllocStatus::Ok };
            let of_seq = |(position, seq): (usize, &Sequence)| {
                let num_cached = if position == 0 { num_cached } else { 0 };
                other.num_to_begin(seq, num_tokens, num_cached)
            };
            let num_needed: usize = store.seqs_of(group).enumerate().map(of_seq).sum();
            if num_needed <= gpu.num_free() {
                AllocStatus::Ok
            } else if num_needed <= gpu.num_total() {
                AllocStatus::Later
            } else {
                AllocStatus::Never
            }
        };
        self.groups.iter().map(judge).max().unwrap_or(AllocStatus::Ok)
    }

    /// Whether the KV groups beside the first have free blocks for rows of `num_tokens` tokens
    /// together of a running group.
    #[inline(never)] // few models need it: kept out of the common path
    pub(super) fn can_map(
        &self,
        store: &SequenceStore,
        group: GroupHandle,
        num_tokens: usize,
    ) -> bool {
        let num_seqs = store.group(group).seqs.len();
        self.groups.iter().enumerate().all(|(index, other)| {
            other.has_ample_room(num_seqs, num_tokens)
                || self.can_map_in(index, store, group, num_tokens)
        })
    }

    /// As [`can_map`](Self::can_map), in one KV group.
    pub(super) fn can_map_in(
        &self,
        index: usize,
        store: &SequenceStore,
        group: GroupHandle,
        num_tokens: usize,
    ) -> bool {
        let other = &self.groups[index];
        let of_seq = |seq: &Sequence| other.num_to_map(seq, &seq.tables[index], num_tokens);
        let num_needed: usize = store.seqs_of(group).map(of_seq).sum();
        num_needed <= other.tiers(&self.tiers).gpu.num_free()
    }

    /// Blocks that a running or swapped group has in the pool of KV group `index` beside the first,
    /// and those that it needs there to be swapped in; a block that several sequences share is
    /// counted for each.
    pub(super) fn held_and_to_return(
        &self,
        index: usize,
        store: &SequenceStore,
        group: GroupHandle,
    ) -> (usize, usize) {
        let num_held = store.seqs_of(group).map(|seq| seq.tables[index].blocks().len()).sum();
        let uncomputed =
            |seq: &Sequence| seq.num_uncomputed_tokens().min(self.max_num_batched_tokens);
        let nums_uncomputed = store.seqs_of(group).map(uncomputed);
        (num_held, self.groups[index].num_to_return(num_held, nums_uncomputed))
    }
}

fn num_common_tokens(a: &[TokenId], b: &[TokenId]) -> usize {
    let limit = a.len().min(b.len()) - 1;
    a[..limit].iter().zip(b).take_while(|(x, y)| x == y).count()
}
