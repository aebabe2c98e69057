//! Ranks as threads that share memory: their sums against plain ones, bit by bit.

#![cfg(target_os = "linux")]
#![expect(unsafe_code, reason = "numbers are addresses")]
#![allow(clippy::unwrap_used, clippy::cast_precision_loss, clippy::cast_possible_truncation)]
#![allow(missing_docs)]

use std::thread;
use std::time::Duration;

use crate::DType;
use crate::exchange::Exchange;
use proptest::prelude::*;

const LINE: usize = 64;
/// Small, so that most calls take several chunks.
const PIECE_BYTES: usize = 2 * LINE;
const SOON: Duration = Duration::from_millis(5);
const PATIENCE: Duration = Duration::from_secs(1);

/// Memory that ranks share: zero, with a line to spare for the alignment.
struct Memory {
    lines: Vec<[u64; LINE / 8]>,
    num_ranks: usize,
}

impl Memory {
    fn new(num_ranks: usize) -> Self {
        let num_lines = Exchange::num_bytes(num_ranks, PIECE_BYTES) / LINE + 1;
        Self { lines: vec![[0; LINE / 8]; num_lines], num_ranks }
    }

    /// Runs each rank in a separate thread; returns the results.
    fn run<T: Send>(&mut self, rank: impl Fn(usize, Exchange) -> T + Sync) -> Vec<T> {
        let start = self.lines.as_mut_ptr().cast::<u8>();
        let start = start.wrapping_add(start.align_offset(LINE));
        let exchanges = (0..self.num_ranks).map(|number| {
            // SAFETY: the memory outlives the threads.
            unsafe { Exchange::new(start, (number, self.num_ranks), PIECE_BYTES) }.unwrap()
        });
        let exchanges: Vec<Exchange> = exchanges.collect();
        let rank = &rank;
        thread::scope(|scope| {
            let threads = exchanges.into_iter().enumerate();
            let threads: Vec<_> =
                threads.map(|(n, exchange)| scope.spawn(move || rank(n, exchange))).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        })
    }
}

/// Repeats a call that was woken early, until it is done.
fn repeat(mut call: impl FnMut() -> bool) {
    assert!((0..200).any(|_| call()));
}

fn sum<T>(exchange: &mut Exchange, values: &mut [T], dtype: DType, patience: Duration) -> bool {
    let address = values.as_mut_ptr().cast();
    // SAFETY: the numbers are this thread's.
    unsafe { exchange.sum(address, values.len(), dtype, patience) }.unwrap()
}

/// Numbers that a rank contributes to a call.
fn numbers_of(rank: usize, call: usize, num: usize) -> Vec<f32> {
    let number = |place: usize| ((place * 37 + call * 11 + rank * 101) % 1009) as f32;
    (0..num).map(|place| (number(place) - 504.0).sin() * 3.0).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn every_rank_has_the_sum_in_the_order_of_ranks(
        num_ranks in 1_usize..5,
        sizes in prop::collection::vec(0_usize..200, 1..20),
    ) {
        let all = Memory::new(num_ranks).run(|rank, mut exchange| {
            let calls = sizes.iter().enumerate().map(|(call, num)| {
                let mut values = numbers_of(rank, call, *num);
                repeat(|| sum(&mut exchange, &mut values, DType::Float32, PATIENCE));
                values
            });
            calls.collect::<Vec<_>>()
        });
        for (call, num) in sizes.iter().enumerate() {
            let mut expected = vec![0.0_f32; *num];
            for rank in 0..num_ranks {
                let parts = numbers_of(rank, call, *num);
                expected.iter_mut().zip(parts).for_each(|(sum, part)| *sum += part);
            }
            for values in &all {
                prop_assert_eq!(&values[call], &expected);
            }
        }
    }

    #[test]
    fn bytes_of_all_ranks_lie_in_their_order(
        num_ranks in 1_usize..5,
        sizes in prop::collection::vec(0_usize..500, 1..20),
    ) {
        let of = |rank: usize, call: usize, num: usize| vec![(rank * 16 + call) as u8; num];
        let all = Memory::new(num_ranks).run(|rank, mut exchange| {
            let calls = sizes.iter().enumerate().map(|(call, num)| {
                let given = of(rank, call, *num);
                let mut found = vec![0_u8; num * num_ranks];
                let places = (given.as_ptr(), found.as_mut_ptr());
                // SAFETY: both are this thread's, and of these sizes.
                repeat(|| unsafe { exchange.gather(places, *num, PATIENCE) });
                found
            });
            calls.collect::<Vec<_>>()
        });
        for (call, num) in sizes.iter().enumerate() {
            let expected: Vec<u8> = (0..num_ranks).flat_map(|rank| of(rank, call, *num)).collect();
            for found in &all {
                prop_assert_eq!(&found[call], &expected);
            }
        }
    }
}

#[test]
fn halves_are_added_in_float32_and_rounded_once() {
    // 256 + 1 + 1 is 258; rounded after each, 256 + 1 is 256 in bfloat16.
    let bfloat16 = |number: f32| (number.to_bits() >> 16) as u16;
    let given = [bfloat16(256.0), bfloat16(1.0), bfloat16(1.0)];
    let sums = Memory::new(3).run(|rank, mut exchange| {
        let mut values = vec![given[rank]; 100];
        repeat(|| sum(&mut exchange, &mut values, DType::BFloat16, PATIENCE));
        values
    });
    assert_eq!(sums, vec![vec![bfloat16(258.0); 100]; 3]);
    // The same in binary16: 2048 + 1 + 1 is 2050.
    let given = [0x6800_u16, 0x3c00, 0x3c00];
    let sums = Memory::new(3).run(|rank, mut exchange| {
        let mut values = vec![given[rank]; 100];
        repeat(|| sum(&mut exchange, &mut values, DType::Float16, PATIENCE));
        values
    });
    assert_eq!(sums, vec![vec![0x6801; 100]; 3]);
}

#[test]
fn who_waits_for_a_rank_that_does_not_come_returns_and_may_go_on() {
    let waits = Memory::new(2).run(|rank, mut exchange| {
        let (mut num_waits, mut values) = (0, vec![1.0_f32; 100]);
        if rank == 1 {
            thread::sleep(4 * SOON);
        }
        while !sum(&mut exchange, &mut values, DType::Float32, SOON) {
            num_waits += 1;
        }
        assert_eq!(values, vec![2.0; 100]);
        num_waits
    });
    assert!(waits[0] > 0, "{waits:?}");
}

#[test]
fn what_cannot_be_is_refused() {
    let memory = std::ptr::without_provenance_mut::<u8>(LINE);
    let refusal = |memory, rank, piece_bytes| {
        // SAFETY: nothing is read.
        unsafe { Exchange::new(memory, rank, piece_bytes) }.unwrap_err().to_string()
    };
    assert_eq!(refusal(memory, (2, 2), LINE), "rank must be below 2; got 2");
    assert_eq!(refusal(memory, (0, 2), 100), "piece_bytes must be a multiple of 64; got 100");
    let odd = memory.wrapping_add(4);
    assert_eq!(refusal(odd, (0, 2), LINE), "memory must lie at a multiple of 64 bytes; got 0x44");
    // SAFETY: the address is refused before it is read.
    let mut exchange = unsafe { Exchange::new(memory, (0, 1), LINE) }.unwrap();
    let odd = std::ptr::without_provenance_mut(6);
    // SAFETY: the same.
    assert!(unsafe { exchange.sum(odd, 1, DType::Float32, SOON) }.is_err());
}
