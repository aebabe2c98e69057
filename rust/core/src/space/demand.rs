//! How many blocks a group needs: the one formula behind every `can_*`.

use std::collections::BTreeSet;

use smallvec::{SmallVec, smallvec};

use crate::ids::BlockId;
use crate::sequence::{GroupHandle, Sequence, SequenceStore};
use crate::space::BlockSpaceManager;
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
    /// Device blocks for all tokens of a group that has none, what its sequences have in
    /// common counted once.
    pub fn num_blocks_to_allocate(&self, store: &SequenceStore, group: GroupHandle) -> usize {
        let shared = self.shared_prefixes(store, group);
        let demand = |(seq, shared): (&Sequence, SharedPrefix)| {
            num_blocks_for(seq.len(), self.block_size) - shared.num_blocks
        };
        store.seqs_of(group).zip(shared).map(demand).sum()
    }

    /// For each sequence of a group, the longest run of full blocks that it has in common
    /// with an earlier one.  The last token of either is left out: it is computed last, and a
    /// donor may hold it back while its siblings catch up.
    pub(super) fn shared_prefixes(
        &self,
        store: &SequenceStore,
        group: GroupHandle,
    ) -> SmallVec<[SharedPrefix; 1]> {
        let seqs: SmallVec<[&Sequence; 4]> = store.seqs_of(group).collect();
        let mut prefixes: SmallVec<[SharedPrefix; 1]> = smallvec![SharedPrefix::default()];
        for (position, seq) in seqs.iter().enumerate().skip(1) {
            let shared = |donor: usize| SharedPrefix {
                donor,
                num_blocks: num_common_tokens(seq, seqs[donor]) / self.block_size,
            };
            let best = (0..position).map(shared).max_by_key(|prefix| prefix.num_blocks);
            prefixes.push(best.unwrap_or_default());
        }
        prefixes
    }

    /// Device blocks that the slots of a running group's uncomputed tokens take: new ones,
    /// and copies of shared ones.  At most one copy too many for each set of sharers, the
    /// last of which keeps the block.
    pub(super) fn append_demand(&self, store: &SequenceStore, group: GroupHandle) -> usize {
        let demand = |seq: &Sequence| {
            let blocks = seq.table.blocks();
            let first_written = (seq.num_computed_tokens / self.block_size).min(blocks.len());
            let num_copies =
                blocks[first_written..].iter().filter(|block| self.gpu.is_shared(**block)).count();
            num_copies + num_blocks_for(seq.len(), self.block_size) - blocks.len()
        };
        store.seqs_of(group).map(demand).sum()
    }

    /// Device blocks that a group needs to come back: its own, and one a sequence for the
    /// next token.
    pub(super) fn num_blocks_to_swap_in(store: &SequenceStore, group: GroupHandle) -> usize {
        Self::num_unique_blocks(store, group) + store.group(group).seqs.len()
    }

    /// Physical blocks behind the tables of a group.
    pub(crate) fn num_unique_blocks(store: &SequenceStore, group: GroupHandle) -> usize {
        let blocks = store.seqs_of(group).flat_map(|seq| seq.table.blocks());
        if store.group(group).seqs.len() == 1 {
            return blocks.count();
        }
        blocks.collect::<BTreeSet<&BlockId>>().len()
    }
}

fn num_common_tokens(a: &Sequence, b: &Sequence) -> usize {
    let (a, b) = (a.token_ids(), b.token_ids());
    let limit = a.len().min(b.len()) - 1;
    a[..limit].iter().zip(b).take_while(|(x, y)| x == y).count()
}
