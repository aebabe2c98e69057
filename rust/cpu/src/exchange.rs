//! Sums over processes of one machine, through memory that all of them map.
//!
//! Owns the layout: a word for each rank that counts the chunks it has written, and two buffers of
//! one chunk for each, used alternately.
//!
//! # Invariants
//!
//! 1. Ranks exchange the same sizes in the same order.
//! 2. A chunk is overwritten when all ranks have read it: the writer of the chunk after next has
//!    seen that all have written the next one, which each does when it has read this one.
//! 3. Numbers are added in the order of ranks, in float32, and rounded once: all ranks have the
//!    same sum, to the last bit.
//! 4. No call waits longer than its timeout: a call that timed out continues when it is repeated.
//!
//! # Costs
//!
//! A bump and a wake-up for each chunk, some 10 us; each byte is written once and read by each
//! rank.
#![expect(unsafe_code, reason = "places are addresses in memory that other processes map")]

use std::time::Duration;

use crate::error::{Error, Result};
use crate::futex;
use crate::number::{BFloat16, DType, Float16, Stored};

/// Words are in separate cache lines, as buffers are.
const LINE: usize = 64;
/// Numbers that are added up at once.
const BLOCK: usize = 256;

// SAFETY: any thread may hold an address; the caller of `sum` and `gather` upholds the rest.
unsafe impl Send for Exchange {}

/// One rank's part in the exchange.
#[derive(Debug)]
pub struct Exchange {
    memory: *mut u8,
    rank: usize,
    num_ranks: usize,
    piece_bytes: usize,
    /// Number of chunks that this rank has written.
    num_written: u32,
    /// Whether the next chunk of the continued call is among them.
    is_written: bool,
    /// Bytes of that call that are done.
    num_done: usize,
}

impl Exchange {
    /// Bytes of the shared memory.
    pub const fn num_bytes(num_ranks: usize, piece_bytes: usize) -> usize {
        num_ranks * (LINE + 2 * piece_bytes)
    }

    /// Creates a rank's part over memory that was zero before the first rank started.
    ///
    /// # Errors
    /// A rank that does not exist, chunks of no whole cache lines, a null or misaligned address.
    ///
    /// # Safety
    /// [`Exchange::num_bytes`] of memory are mapped there for as long as this lives, and each rank
    /// uses them through one of these alone.
    pub unsafe fn new(
        memory: *mut u8,
        (rank, num_ranks): (usize, usize),
        piece_bytes: usize,
    ) -> Result<Self> {
        if rank >= num_ranks {
            return Err(Error(format!("rank must be below {num_ranks}; got {rank}")));
        }
        if piece_bytes == 0 || !piece_bytes.is_multiple_of(LINE) {
            let text = format!("piece_bytes must be a multiple of {LINE}; got {piece_bytes}");
            return Err(Error(text));
        }
        if memory.is_null() || !memory.addr().is_multiple_of(LINE) {
            let text = format!("memory must lie at a multiple of {LINE} bytes; got {memory:?}");
            return Err(Error(text));
        }
        let (num_written, is_written, num_done) = (0, false, 0);
        Ok(Self { memory, rank, num_ranks, piece_bytes, num_written, is_written, num_done })
    }

    /// Adds up `num` numbers over the ranks, in place; false if a rank did not write within
    /// `patience`, or [`futex::wait`] returned early: then the same call must be repeated.
    ///
    /// # Errors
    /// An odd address.
    ///
    /// # Safety
    /// No other code accesses the numbers until a call returns true.
    pub unsafe fn sum(
        &mut self,
        values: *mut u8,
        num: usize,
        dtype: DType,
        patience: Duration,
    ) -> Result<bool> {
        dtype.check_address("values", values)?;
        let add_up = match dtype {
            DType::Float32 => add_up::<f32>,
            DType::BFloat16 => add_up::<BFloat16>,
            DType::Float16 => add_up::<Float16>,
        };
        while let Some((start, len)) = self.piece(num * dtype.size()) {
            // SAFETY: the chunk lies in the numbers.
            let piece = unsafe { values.add(start) };
            // SAFETY: the same.
            if !unsafe { self.meet(piece, len, patience) } {
                return Ok(false);
            }
            // SAFETY: all places hold a chunk, and no rank writes them before this rank's next.
            unsafe { add_up(piece, len / dtype.size(), self) };
            self.go_on(len);
        }
        self.num_done = 0;
        Ok(true)
    }

    /// Concatenates the bytes of all ranks, in order; false as in [`Exchange::sum`].
    ///
    /// # Safety
    /// `from` has `num_bytes`, `to` as many for each rank, and no other code accesses them until a
    /// call has returned true.
    pub unsafe fn gather(
        &mut self,
        (from, to): (*const u8, *mut u8),
        num_bytes: usize,
        patience: Duration,
    ) -> bool {
        while let Some((start, len)) = self.piece(num_bytes) {
            // SAFETY: the chunk lies in the bytes.
            if !unsafe { self.meet(from.add(start), len, patience) } {
                return false;
            }
            for rank in 0..self.num_ranks {
                // SAFETY: as in `sum`, and the output can hold all chunks.
                unsafe {
                    let place = to.add(rank * num_bytes + start);
                    place.copy_from_nonoverlapping(self.place(rank), len);
                }
            }
            self.go_on(len);
        }
        self.num_done = 0;
        true
    }

    /// Start and length of the next chunk of a call of this many bytes.
    fn piece(&self, num_bytes: usize) -> Option<(usize, usize)> {
        let len = self.piece_bytes.min(num_bytes.saturating_sub(self.num_done));
        (len > 0).then_some((self.num_done, len))
    }

    /// Publishes a chunk; returns whether all ranks have published theirs.
    unsafe fn meet(&mut self, piece: *const u8, len: usize, patience: Duration) -> bool {
        if !self.is_written {
            self.num_written = self.num_written.wrapping_add(1);
            self.is_written = true;
            // SAFETY: the place is this rank's to write, by the second invariant.
            unsafe {
                self.place(self.rank).copy_from_nonoverlapping(piece, len);
                futex::bump(self.word(self.rank));
            }
        }
        let before = self.num_written.wrapping_sub(1);
        (0..self.num_ranks).all(|rank| {
            // SAFETY: the words are mapped.
            unsafe { futex::wait(self.word(rank), before, patience) != before }
        })
    }

    const fn go_on(&mut self, len: usize) {
        self.num_done += len;
        self.is_written = false;
    }

    const fn word(&self, rank: usize) -> *mut u32 {
        // SAFETY: the memory begins with a line for each rank, and lines are aligned.
        unsafe { self.memory.add(rank * LINE).cast() }
    }

    /// Buffer of a rank's chunk of this turn.
    const fn place(&self, rank: usize) -> *mut u8 {
        let turn = (self.num_written % 2) as usize;
        let start = self.num_ranks * LINE + (turn * self.num_ranks + rank) * self.piece_bytes;
        // SAFETY: the memory has two places for each rank.
        unsafe { self.memory.add(start) }
    }
}

/// Writes the sums of the chunks in the places.
unsafe fn add_up<N: Stored>(to: *mut u8, num: usize, exchange: &Exchange) {
    // SAFETY: the caller has as many numbers there, and in every place.
    let to = unsafe { std::slice::from_raw_parts_mut(to.cast::<N>(), num) };
    for (block, numbers) in to.chunks_mut(BLOCK).enumerate() {
        let mut sums = [0.0_f32; BLOCK];
        for rank in 0..exchange.num_ranks {
            let place = exchange.place(rank).cast::<N>().cast_const();
            // SAFETY: the same.
            let parts =
                unsafe { std::slice::from_raw_parts(place.add(block * BLOCK), numbers.len()) };
            for (sum, part) in sums.iter_mut().zip(parts) {
                *sum += part.to_f32();
            }
        }
        for (number, sum) in numbers.iter_mut().zip(sums) {
            *number = N::from_f32(sum);
        }
    }
}
