//! Eviction order of cached blocks.
//!
//! Owns the free blocks with cached contents.  Order: the least recent access first; of equals the
//! block with the longest prefix, so that a chain is evicted from its end; of those the one freed
//! first.  Invariant:
//! 1. A block is in the order at most once.
//!
//! Costs: add, remove, evict O(log n).

use std::cmp::Reverse;
use std::collections::BTreeSet;

use crate::ids::BlockId;

type Rank = (u64, Reverse<usize>, u64, BlockId);

/// Evictor of the least recently used block.
#[derive(Clone, Debug, Default)]
pub struct LRUEvictor {
    order: BTreeSet<Rank>,
    ranks: Vec<Option<Rank>>,
    num_added: u64,
}

impl LRUEvictor {
    /// Adds `block`, last accessed at `last_access` (any clock that does not go back) and
    /// holding the end of a prefix of `num_hashed_tokens`.  False when it was already added.
    pub fn add(&mut self, block: BlockId, last_access: u64, num_hashed_tokens: usize) -> bool {
        if self.contains(block) {
            return false;
        }
        let rank = (last_access, Reverse(num_hashed_tokens), self.num_added, block);
        self.num_added += 1;
        if self.ranks.len() <= block.index() {
            self.ranks.resize(block.index() + 1, None);
        }
        self.ranks[block.index()] = Some(rank);
        self.order.insert(rank)
    }

    /// Removes `block`, since it is used again; false when it was not added.
    pub fn remove(&mut self, block: BlockId) -> bool {
        let rank = self.ranks.get_mut(block.index()).and_then(Option::take);
        rank.is_some_and(|rank| self.order.remove(&rank))
    }

    /// Removes and returns the first block in order.
    pub fn evict(&mut self) -> Option<BlockId> {
        let (.., block) = self.order.pop_first()?;
        self.ranks[block.index()] = None;
        Some(block)
    }

    /// Whether `block` was added.
    pub fn contains(&self, block: BlockId) -> bool {
        self.ranks.get(block.index()).is_some_and(Option::is_some)
    }

    /// Number of blocks that can be evicted.
    pub fn len(&self) -> usize {
        self.order.len()
    }

    /// Whether no block can be evicted.
    pub fn is_empty(&self) -> bool {
        self.order.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[derive(Clone, Debug)]
    enum Op {
        Add(u32, usize),
        Remove(u32),
        Evict,
        Tick,
    }

    fn op() -> impl Strategy<Value = Op> {
        (0..8u8, 0..12u32, 0..4usize).prop_map(|(kind, block, depth)| match kind {
            0..4 => Op::Add(block, depth),
            4 => Op::Remove(block),
            5..7 => Op::Evict,
            _ => Op::Tick,
        })
    }

    proptest! {
        /// The naive model: a list in order of arrival, searched from end to end.
        #[test]
        fn the_order_is_that_of_a_list_searched_from_end_to_end(ops in prop::collection::vec(op(), 1..200)) {
            let (mut evictor, mut list, mut now) = (LRUEvictor::default(), Vec::new(), 0);
            for op in ops {
                match op {
                    Op::Add(block, depth) => {
                        let is_new = !list.iter().any(|(_, _, other)| *other == block);
                        prop_assert_eq!(evictor.add(BlockId::new(block), now, depth), is_new);
                        if is_new {
                            list.push((now, depth, block));
                        }
                    }
                    Op::Remove(block) => {
                        let before = list.len();
                        list.retain(|(_, _, other)| *other != block);
                        prop_assert_eq!(evictor.remove(BlockId::new(block)), list.len() < before);
                    }
                    Op::Evict => {
                        let oldest = list.iter().map(|(access, ..)| *access).min();
                        let of_oldest = list.iter().filter(|(access, ..)| Some(*access) == oldest);
                        let deepest = of_oldest.clone().map(|(_, depth, _)| *depth).max();
                        let victim = of_oldest.clone().find(|(_, depth, _)| Some(*depth) == deepest);
                        let victim = victim.map(|(.., block)| *block);
                        prop_assert_eq!(evictor.evict().map(BlockId::index), victim.map(|b| b as usize));
                        list.retain(|(_, _, other)| Some(*other) != victim);
                    }
                    Op::Tick => now += 1,
                }
                prop_assert_eq!(evictor.len(), list.len());
            }
        }
    }
}
