//! Generational arena: storage whose keys die when the value is removed.
//!
//! Owns the values put into it.  Invariant:
//! 1. A handle resolves to the value it was made for, or to nothing: a reused slot has a newer
//!    generation, and a slot whose generations are used up is retired.
//!
//! Costs: insert, get, remove O(1); slots are reused, so steady churn allocates nothing.

use std::fmt;
use std::hash::{Hash, Hasher};
use std::marker::PhantomData;

/// Key of a value of type `T`, such as a sequence; dead once the value is removed.
pub struct Handle<T> {
    index: u32,
    generation: u32,
    kind: PhantomData<fn() -> T>,
}

impl<T> Handle<T> {
    fn new(index: u32, generation: u32) -> Self {
        Self { index, generation, kind: PhantomData }
    }

    /// The handle as one integer for foreign code, never negative.
    pub fn to_bits(self) -> i64 {
        (i64::from(self.generation) << 32) | i64::from(self.index)
    }

    /// The handle of an integer from [`Handle::to_bits`].  Any other integer makes a handle that
    /// resolves to nothing.
    pub fn from_bits(bits: i64) -> Self {
        let [_, _, _, _, i0, i1, i2, i3] = bits.to_be_bytes();
        let [g0, g1, g2, g3, ..] = bits.to_be_bytes();
        Self::new(u32::from_be_bytes([i0, i1, i2, i3]), u32::from_be_bytes([g0, g1, g2, g3]))
    }
}

// Derives would require the same traits of `T`, which a key does not need.
impl<T> Clone for Handle<T> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<T> Copy for Handle<T> {}
impl<T> PartialEq for Handle<T> {
    fn eq(&self, other: &Self) -> bool {
        self.to_bits() == other.to_bits()
    }
}
impl<T> Eq for Handle<T> {}
impl<T> Hash for Handle<T> {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.to_bits().hash(state);
    }
}
impl<T> fmt::Debug for Handle<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}v{}", self.index, self.generation)
    }
}

/// Aligned to a cache line, so that the fields that a step reads lie on as few lines as possible.
#[derive(Clone, Debug)]
#[repr(C, align(64))]
struct Slot<T> {
    generation: u32,
    value: Option<T>,
}

/// Not 0, so that no handle is the integer 0.
const FIRST_GENERATION: u32 = 1;

/// The last generation of a slot: 31 bits keep [`Handle::to_bits`] from being negative.
const LAST_GENERATION: u32 = u32::MAX >> 1;

/// Values addressed by [`Handle`].
#[derive(Clone, Debug)]
pub(crate) struct Arena<T> {
    slots: Vec<Slot<T>>,
    free: Vec<u32>,
}

impl<T> Default for Arena<T> {
    fn default() -> Self {
        Self { slots: Vec::new(), free: Vec::new() }
    }
}

impl<T> Arena<T> {
    /// Stores `value` under a new handle.
    ///
    /// # Panics
    /// If 2^32 values live at once.
    pub(crate) fn insert(&mut self, value: T) -> Handle<T> {
        if let Some(index) = self.free.pop() {
            let slot = &mut self.slots[index as usize];
            slot.value = Some(value);
            return Handle::new(index, slot.generation);
        }
        let index = u32::try_from(self.slots.len()).expect("an arena holds under 2^32 values");
        self.slots.push(Slot { generation: FIRST_GENERATION, value: Some(value) });
        Handle::new(index, FIRST_GENERATION)
    }

    fn slot(&self, handle: Handle<T>) -> Option<&Slot<T>> {
        self.slots.get(handle.index as usize).filter(|slot| slot.generation == handle.generation)
    }

    /// Returns the value, unless it was removed.
    pub(crate) fn get(&self, handle: Handle<T>) -> Option<&T> {
        self.slot(handle)?.value.as_ref()
    }

    /// Returns the value for modification, unless it was removed.
    pub(crate) fn get_mut(&mut self, handle: Handle<T>) -> Option<&mut T> {
        let slot = self.slots.get_mut(handle.index as usize)?;
        (slot.generation == handle.generation).then_some(slot.value.as_mut()).flatten()
    }

    /// Removes the value; its handle is dead afterwards.
    pub(crate) fn remove(&mut self, handle: Handle<T>) -> Option<T> {
        let slot = self.slots.get_mut(handle.index as usize)?;
        if slot.generation != handle.generation {
            return None;
        }
        let value = slot.value.take()?;
        if slot.generation < LAST_GENERATION {
            slot.generation += 1;
            self.free.push(handle.index);
        }
        Some(value)
    }

    /// All values with their handles, in slot order.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (Handle<T>, &T)> {
        (0u32..).zip(&self.slots).filter_map(|(index, slot)| {
            Some((Handle::new(index, slot.generation), slot.value.as_ref()?))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reused_slot_does_not_answer_to_the_old_handle() {
        let mut arena = Arena::default();
        let old = arena.insert("old");
        assert_eq!(arena.remove(old), Some("old"));
        let new = arena.insert("new");
        assert_eq!(arena.get(old), None);
        assert_eq!(arena.remove(old), None);
        assert_eq!(arena.get(new), Some(&"new"));
        assert_eq!(arena.iter().count(), 1);
    }

    #[test]
    fn handles_survive_a_trip_through_an_integer() {
        let mut arena = Arena::default();
        let first = arena.insert(1);
        arena.remove(first);
        let again = arena.insert(2);
        assert!(again.to_bits() >= 0);
        assert_eq!(arena.get(Handle::from_bits(again.to_bits())), Some(&2));
        for foreign in [-1, i64::MIN, i64::MAX, again.to_bits() + 1, first.to_bits()] {
            assert_eq!(arena.get(Handle::from_bits(foreign)), None);
        }
    }
}
