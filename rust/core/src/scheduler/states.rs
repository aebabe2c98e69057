//! State slots: the places in which layers keep what is neither key nor value, as recurrences do.
//!
//! Owns the slots of both tiers.  A slot is like a block of which a sequence has exactly one: forks
//! share it until they run.  Invariants:
//! 1. Waiting sequences have no slot, running ones one on the device, swapped ones one on the host;
//!    a slot's reference count is the number of sequences that have it.
//! 2. No row runs in a shared slot: its sequence first gets a separate slot and a copy of the
//!    state, and the last of the sharers keeps the slot.
//! 3. There are slots for as many sequences as may run, so every sequence that may run can have
//!    one.
//! 4. A row whose first position is 0 begins with a fresh state, whatever lies in its slot.  A
//!    sequence that begins computes all tokens of its own, also those whose keys a sibling writes.
//!
//! Costs: O(1) a sequence that joins, leaves, moves or runs; without slots a comparison a group.

use crate::block::{Allocator, UncachedBlockAllocator};
use crate::ids::BlockPair;
use crate::outputs::{Row, SchedulerOutputs};
use crate::sequence::{GroupHandle, SeqHandle, Sequence, SequenceStatus, SequenceStore};

/// The slots of the device and of the host.
#[derive(Clone, Debug)]
pub(super) struct StateSlots {
    device: Allocator,
    host: Allocator,
}

const HAS_SLOT: &str = "a sequence that is not waiting has a state slot, invariant 1";
const PROMISED: &str = "as many slots as sequences may run, invariant 3";

impl StateSlots {
    /// All free.
    pub(super) fn new(num_slots: usize, num_cpu_slots: usize) -> Self {
        let tier = |num_slots| Allocator::Uncached(UncachedBlockAllocator::new(num_slots));
        Self { device: tier(num_slots), host: tier(num_cpu_slots) }
    }

    /// Whether layers keep states at all.
    pub(super) fn is_on(&self) -> bool {
        self.device.num_total() > 0
    }

    /// The slots of the tier that groups of `status` are on; none for those that wait.
    pub(super) fn tier(&self, status: SequenceStatus) -> Option<&Allocator> {
        match status {
            SequenceStatus::Waiting => None,
            SequenceStatus::Running => Some(&self.device),
            SequenceStatus::Swapped => Some(&self.host),
        }
    }

    /// Gives every sequence of a group that begins a slot, and everything to compute.
    pub(super) fn allocate(&mut self, store: &mut SequenceStore, group: GroupHandle) {
        if self.is_on() {
            let device = &mut self.device;
            store.for_each_seq(group, |_, seq| {
                seq.state_slot = Some(device.allocate(0).expect(PROMISED));
                seq.num_computed_tokens = 0;
            });
        }
    }

    /// Lets a child have its parent's slot until one of them runs.
    pub(super) fn fork(&mut self, child: &Sequence) {
        if let Some(slot) = child.state_slot {
            self.device.fork(slot);
        }
    }

    /// Gives a running sequence a separate slot; a copy that this needs goes to `copies`.
    #[inline(never)] // what few models need stays out of the way of the rest
    pub(super) fn unshare(&mut self, seq: &mut Sequence, copies: &mut Vec<BlockPair>) {
        let Some(slot) = seq.state_slot.filter(|slot| self.device.ref_count(*slot) > 1) else {
            return;
        };
        let own = self.device.allocate(0).expect(PROMISED);
        self.device.free(slot, seq.last_step);
        seq.state_slot = Some(own);
        copies.push((slot, own));
    }

    /// Frees the slot of a sequence on the tier of its group.
    pub(super) fn free(&mut self, store: &mut SequenceStore, seq: SeqHandle) {
        if !self.is_on() {
            return;
        }
        let is_swapped = store.group(store.seq(seq).group()).status == SequenceStatus::Swapped;
        let entry = store.seq_mut(seq);
        if let Some(slot) = entry.state_slot.take() {
            if is_swapped { &mut self.host } else { &mut self.device }.free(slot, entry.last_step);
        }
    }

    /// Whether the host has slots for a running group.
    pub(super) fn can_swap_out(&self, store: &SequenceStore, group: GroupHandle) -> bool {
        // One each is more than is needed where they are shared.
        !self.is_on() || store.group(group).seqs.len() <= self.host.num_free()
    }

    /// Moves a running group's states to the host; the pairs (device, host) go to `pairs`.
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

    /// Moves a swapped group's states to the device; the pairs (host, device) go to `pairs`.
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

    /// Writes the slot of each row of a step, -1 where layers keep no states.
    #[inline(never)] // what few models need stays out of the way of the rest
    pub(super) fn fill(
        &self,
        slots: &mut [i32],
        outputs: &SchedulerOutputs,
        store: &SequenceStore,
    ) {
        if !self.is_on() {
            slots[..outputs.rows.len()].fill(-1);
            return;
        }
        for (slot, Row { seq, .. }) in slots.iter_mut().zip(&outputs.rows) {
            let own = store.seq(*seq).state_slot.expect(HAS_SLOT);
            *slot = i32::try_from(own.index()).expect("num_state_slots is validated");
        }
    }
}

/// Every slot of a group gets a twin in the other tier, shared as it was.
fn move_group(
    store: &mut SequenceStore,
    group: GroupHandle,
    from: &mut Allocator,
    to: &mut Allocator,
    pairs: &mut Vec<BlockPair>,
) {
    let first = pairs.len();
    store.for_each_seq(group, |_, seq| {
        let slot = seq.state_slot.expect(HAS_SLOT);
        let twin = from.hand_over(slot, seq.last_step, to, pairs, first);
        seq.state_slot = Some(twin.expect(PROMISED));
    });
}
