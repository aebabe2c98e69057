//! Inputs that are turned before they become bytes: each 64 are multiplied with a Hadamard matrix.
//!
//! Rows are turned, and 64ths of weights, which changes no product: the matrix times itself is 64
//! times the identity.  A number far larger than the others of its row spreads over 64, so that one scale
//! is fine enough for a row (Ashkboos et al., "`QuaRot`", section 3).
//!
//! Costs: 6 additions a number, and 4 exchanges of lanes.
#![expect(unsafe_code, reason = "numbers are addresses")]
#![expect(clippy::inline_always, reason = "must become part of a function with the instructions")]

use crate::element::Element;
use crate::number::PANEL;
use crate::vectors::Vectors;

/// Inputs that are turned together.
pub(crate) const TURNED: usize = 64;
/// Vectors of these.
const VECTORS: usize = TURNED / PANEL;

/// Turns 64 numbers, which may be turned in their place.  The result is that of additions in one
/// order, with any instructions.
///
/// # Safety
/// The CPU has the instructions; 64 numbers can be read and written.
#[inline(always)]
pub(crate) unsafe fn turn<I: Vectors, E: Element>(from: *const E, to: *mut f32) {
    // SAFETY: the caller's promise.
    unsafe {
        let mut vectors: [I::V; VECTORS] =
            std::array::from_fn(|index| E::load::<I>(from.add(index * PANEL)));
        for vector in &mut vectors {
            *vector = turn_lanes::<I, 1>(*vector);
            *vector = turn_lanes::<I, 2>(*vector);
            *vector = turn_lanes::<I, 4>(*vector);
            *vector = turn_lanes::<I, 8>(*vector);
        }
        let [a, b, c, d] = vectors;
        let ([a, b], [c, d]) = (turn_pair::<I>(a, b), turn_pair::<I>(c, d));
        let ([a, c], [b, d]) = (turn_pair::<I>(a, c), turn_pair::<I>(b, d));
        for (index, vector) in [a, b, c, d].into_iter().enumerate() {
            I::store(vector, to.add(index * PANEL));
        }
    }
}

/// The sums and differences of lanes at a distance.
#[inline(always)]
unsafe fn turn_lanes<I: Vectors, const DISTANCE: usize>(numbers: I::V) -> I::V {
    let signs = const { signs::<DISTANCE>() };
    // SAFETY: the caller's promise; the products are exact.
    unsafe { I::multiply_add(numbers, I::load(signs.as_ptr()), I::exchange::<DISTANCE>(numbers)) }
}

/// The sums and differences of two vectors.
#[inline(always)]
unsafe fn turn_pair<I: Vectors>(a: I::V, b: I::V) -> [I::V; 2] {
    // SAFETY: the caller's promise; the product is exact.
    unsafe { [I::add(a, b), I::multiply_add(b, I::splat(-1.0), a)] }
}

/// -1 for the second of two lanes at a distance, 1 for the first.
const fn signs<const DISTANCE: usize>() -> [f32; PANEL] {
    let (mut signs, mut lane) = ([1.0; PANEL], 0);
    while lane < PANEL {
        if lane & DISTANCE != 0 {
            signs[lane] = -1.0;
        }
        lane += 1;
    }
    signs
}

#[cfg(test)]
pub(crate) mod tests {
    /// A row whose every 64 numbers are multiplied with the Hadamard matrix, by its recursion.
    pub(crate) fn turned(row: &[f32]) -> Vec<f32> {
        let mut row = row.to_vec();
        for numbers in row.chunks_mut(64) {
            for distance in [1, 2, 4, 8, 16, 32] {
                let before = numbers.to_vec();
                for (index, number) in numbers.iter_mut().enumerate() {
                    let other = before[index ^ distance];
                    *number = if index & distance == 0 {
                        before[index] + other
                    } else {
                        other - before[index]
                    };
                }
            }
        }
        row
    }

    /// The matrix is symmetric, and its own inverse but for a factor.
    #[test]
    fn what_is_turned_twice_is_64_times_itself() {
        for index in 0..64 {
            let mut row = vec![0.0; 64];
            row[index] = 3.0;
            let once = turned(&row);
            assert!(once.iter().all(|number| [3.0, -3.0].contains(number)));
            row[index] *= 64.0;
            assert_eq!(turned(&once), row);
        }
    }
}
