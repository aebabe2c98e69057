//! A thread's memory between calls, divided into buffers.

use crate::number::PANEL;

/// Buffers of these lengths, of 32-bit numbers or units, each starting at a multiple of 64 bytes.
/// The memory only grows; the buffers are valid until it is used again.
pub(crate) fn pieces<T, const N: usize>(memory: &mut Vec<T>, lens: [usize; N]) -> [*mut T; N]
where
    T: Default + Clone,
{
    let lens = lens.map(|len| len.next_multiple_of(PANEL));
    let needed = lens.iter().sum::<usize>() + PANEL;
    if memory.len() < needed {
        memory.resize(needed, T::default());
    }
    let start = memory.as_mut_ptr();
    let mut next = start.wrapping_add(start.align_offset(64).min(PANEL));
    lens.map(|len| {
        let piece = next;
        next = next.wrapping_add(len);
        piece
    })
}
