//! Adapter slots: memory on the device for the weights of adapters.
//!
//! Owns which adapter has which slot.  Invariants:
//! 1. No adapter has two slots, and that of every running group has one.
//! 2. A slot passes to another adapter only while no running group has the one in it; of several
//!    such slots the least recently used is taken.
//! 3. No row runs before its adapter's load: that is a part of the first step in which the adapter
//!    has rows in the slot, and of the next such step where that one was abandoned.
//!
//! Costs: O(slots) a group that has an adapter; a comparison for others.

use crate::hash::PrefixKey;

/// Adapter slots that were ever needed at once; an adapter keeps its slot until another needs it.
#[derive(Clone, Debug)]
pub(super) struct AdapterSlots {
    limit: usize,
    slots: Vec<Slot>,
}

#[derive(Clone, Copy, Debug)]
struct Slot {
    adapter: u32,
    /// The last step in which the adapter had rows.
    last_used: u64,
    /// The step that loads the adapter, unless it was abandoned or is still to come.
    loaded_in: Option<u64>,
}

/// The slot of rows without an adapter.
const NO_SLOT: i32 = -1;

impl AdapterSlots {
    /// At most `max_loras` slots, all empty.
    pub(super) fn new(max_loras: Option<usize>) -> Self {
        Self { limit: max_loras.unwrap_or(0), slots: Vec::new() }
    }

    /// The adapters in slots, by slot.
    pub(super) fn adapters(&self) -> impl Iterator<Item = u32> {
        self.slots.iter().map(|slot| slot.adapter)
    }

    /// The adapter that has had its slot longest, 0 if none has one.
    pub(super) fn oldest(&self) -> u32 {
        let loaded = self.slots.iter().filter(|slot| slot.loaded_in.is_some());
        loaded.min_by_key(|slot| slot.loaded_in).map_or(0, |slot| slot.adapter)
    }

    /// Assigns a slot to `adapter` (0 for none) if it has none yet: an empty one, or that of an
    /// adapter that is not `active`.  The budget guarantees that one exists.
    pub(super) fn assign(&mut self, adapter: u32, active: &[u32]) {
        if adapter == 0 || self.adapters().any(|other| other == adapter) {
            return;
        }
        let assigned = Slot { adapter, last_used: 0, loaded_in: None };
        if self.slots.len() < self.limit {
            self.slots.push(assigned);
            return;
        }
        let free = self.slots.iter_mut().filter(|slot| !active.contains(&slot.adapter));
        *free.min_by_key(|slot| slot.last_used).expect("fewer adapters are active than slots") =
            assigned;
    }

    /// The slot of a group's rows in step `step_id`; adds what must be loaded first to `loads`.
    /// The key is not read if no adapter has a slot: it would be a cache miss a group.
    pub(super) fn enter(
        &mut self,
        key: &PrefixKey,
        step_id: u64,
        loads: &mut Vec<(u32, i32)>,
    ) -> i32 {
        if self.slots.is_empty() || key.adapter == 0 {
            return NO_SLOT;
        }
        let adapter = key.adapter;
        let position = self.adapters().position(|other| other == adapter);
        let position = position.expect("a running group's adapter has a slot, invariant 1");
        let number = i32::try_from(position).expect("max_loras is validated");
        let slot = &mut self.slots[position];
        slot.last_used = step_id;
        if slot.loaded_in.is_none() {
            slot.loaded_in = Some(step_id);
            loads.push((adapter, number));
        }
        number
    }

    /// Abandons the steps from `step_id` on: their adapters, loaded or not, are loaded again.
    pub(super) fn abandon_since(&mut self, step_id: u64) {
        for slot in &mut self.slots {
            slot.loaded_in = slot.loaded_in.filter(|loaded| *loaded < step_id);
        }
    }
}
