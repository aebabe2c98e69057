//! Memory as a model that knows nothing but the moves sees it: hashes for keys.

use std::collections::BTreeMap;

use pagedserve_core::ids::BlockPair;

/// What lies in each slot: the token whose keys were written there and all before it, hashed.
pub type Slots = BTreeMap<usize, u64>;

pub fn at(value: i32) -> usize {
    usize::try_from(value).unwrap()
}

/// What a copied block writes: each slot of its target, and what is in that of its source.
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
