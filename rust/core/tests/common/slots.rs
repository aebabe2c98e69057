//! Memory of a model that knows only the moves: hashes instead of keys.

use std::collections::BTreeMap;

use pagedserve_core::ids::BlockPair;

/// Contents of each slot: a hash of the token whose keys were written there and all before it.
pub type Slots = BTreeMap<usize, u64>;

pub fn at(value: i32) -> usize {
    usize::try_from(value).unwrap()
}

/// The writes of a block copy: each slot of its destination, and the contents of the source's.
pub fn copy_block(from: &Slots, (a, b): BlockPair, size: usize) -> Vec<(usize, Option<u64>)> {
    let slots = |block: usize| block * size..(block + 1) * size;
    slots(b.index()).zip(slots(a.index()).map(|slot| from.get(&slot).copied())).collect()
}

pub fn write(target: &mut Slots, values: Vec<(usize, Option<u64>)>) {
    for (slot, value) in values {
        match value {
            Some(value) => target.insert(slot, value),
            None => target.remove(&slot),
        };
    }
}
