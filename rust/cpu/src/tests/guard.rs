//! Tensors that end right before memory that must not be touched: no kernel reads or writes
//! past what it is given.
#![cfg(unix)]
#![allow(unsafe_code, reason = "maps memory, and the call under test takes pointers")]

use super::common::{CACHE_DTYPES, Case, DTYPES, Random, Step, Threads, available};
use super::numbers::Numbers;
use crate::attention::paged_attention;
use crate::embedding::gather;
use crate::linear::{Finish, Matrix, Panels, Weights, linear};
use crate::lora::{Adapters, Group, LowRank, Slice};
use crate::{DType, Execution, Norm, rms_norm};

/// Bytes whose last one is the last before a page that cannot be touched.
struct Guarded {
    map: *mut libc::c_void,
    map_len: usize,
    start: *mut u8,
    len: usize,
}

const PAGE: usize = 1 << 16; // a multiple of every page size

impl Guarded {
    fn new(bytes: &[u8]) -> Self {
        let data_len = bytes.len().next_multiple_of(PAGE);
        let map_len = data_len + PAGE;
        // SAFETY: a new private mapping; the copy fits before its last page.
        unsafe {
            let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
            let access = libc::PROT_READ | libc::PROT_WRITE;
            let map = libc::mmap(std::ptr::null_mut(), map_len, access, flags, -1, 0);
            assert_ne!(map, libc::MAP_FAILED);
            let end = map.cast::<u8>().add(data_len);
            assert_eq!(libc::mprotect(end.cast(), PAGE, libc::PROT_NONE), 0);
            let start = end.sub(bytes.len());
            start.copy_from_nonoverlapping(bytes.as_ptr(), bytes.len());
            Self { map, map_len, start, len: bytes.len() }
        }
    }

    fn bytes(&self) -> Vec<u8> {
        // SAFETY: initialised by `new`, and not written now.
        unsafe { std::slice::from_raw_parts(self.start, self.len).to_vec() }
    }
}

impl Drop for Guarded {
    fn drop(&mut self) {
        // SAFETY: mapped by `new` with this length.
        unsafe { libc::munmap(self.map, self.map_len) };
    }
}

#[test]
fn nothing_past_the_end_is_touched() {
    for (key_size, value_size) in [(64, 64), (80, 96), (7, 5), (33, 16), (16, 20)] {
        for block_size in [16, 5] {
            let has_panels = block_size % 16 + value_size % 16 == 0;
            let pools = &CACHE_DTYPES[..if has_panels { CACHE_DTYPES.len() } else { 1 }];
            for (dtype, &cache_dtype) in
                DTYPES.into_iter().flat_map(|dtype| pools.iter().map(move |pool| (dtype, pool)))
            {
                let rows = [(45, 1), (3, 20)];
                let plain = Case::plain(&rows);
                let case = Case { dtype, cache_dtype, key_size, value_size, block_size, ..plain };
                let step = Step::new(&case);
                let expected = step.expected();
                for instructions in available() {
                    let mut step = step.clone();
                    // The row whose last block is the pool's last: each block is that one in turn.
                    for shift in 0..step.shape.num_blocks {
                        rotate(&mut step, shift.min(1));
                        guarded_run(&mut step, &expected, instructions);
                    }
                }
            }
        }
    }
}

/// Renames all blocks, and moves their contents.
fn rotate(step: &mut Step, by: usize) {
    let num_blocks = step.shape.num_blocks;
    let block_bytes = step.shape.block_bytes();
    step.pool.bytes.rotate_right(by * block_bytes);
    for block in step.block_tables.iter_mut().filter(|block| **block >= 0) {
        let id = usize::try_from(*block).expect("not negative");
        *block = i32::try_from((id + by) % num_blocks).expect("a small number");
    }
    for slot in step.slot_mapping.iter_mut().filter(|slot| **slot >= 0) {
        let num_slots = i64::try_from(num_blocks * step.shape.block_size).expect("small");
        let shift = i64::try_from(by * step.shape.block_size).expect("small");
        *slot = (*slot + shift) % num_slots;
    }
}

fn guarded_run(step: &mut Step, expected: &[f64], instructions: crate::InstructionSet) {
    let query = Guarded::new(&step.query.numbers.bytes);
    let key = Guarded::new(&step.key.numbers.bytes);
    let value = Guarded::new(&step.value.numbers.bytes);
    let pool = Guarded::new(&step.pool.bytes);
    let output = Guarded::new(&step.output.bytes);
    let mut memory = step.memory();
    memory.query.pointer = query.start;
    memory.key.pointer = key.start;
    memory.value.pointer = value.start;
    memory.pool = pool.start;
    memory.output = output.start;
    let execution = Execution { instructions, team: &Threads, num_threads: 1 };
    // SAFETY: copies of the step's memory, of the same sizes.
    unsafe {
        paged_attention(&step.shape, &memory, &step.rows(), &step.options(), &execution)
            .expect("a correct step");
    }
    step.output.bytes = output.bytes();
    for (index, wanted) in expected.iter().enumerate() {
        assert!((f64::from(step.output.get(index)) - wanted).abs() < 1e-2, "{instructions:?}");
    }
}

/// Small whole numbers, all sums of which are exact.
fn small_numbers(random: &mut Random, dtype: DType, len: usize) -> Numbers {
    let mut numbers = Numbers::poisoned(dtype, len);
    for index in 0..len {
        numbers.set(index, (random.number() * 4.0).round());
    }
    numbers
}

/// Weights `[n, k]` in the layout that `linear.rs` describes.
fn packed(weights: &Numbers, depth: usize, num_features: usize) -> Vec<u8> {
    let (size, per_unit) = (weights.dtype.size(), 4 / weights.dtype.size());
    let mut bytes = vec![0; num_features.next_multiple_of(64) * depth * size];
    for feature in 0..num_features {
        for index in 0..depth {
            let unit = (feature / 64 * (depth / per_unit) + index / per_unit) * 64 + feature % 64;
            let (to, from) = (unit * 4 + index % per_unit * size, (feature * depth + index) * size);
            bytes[to..to + size].copy_from_slice(&weights.bytes[from..from + size]);
        }
    }
    bytes
}

/// A whole number from -127 to 127.
fn whole_number(random: &mut Random) -> i8 {
    i8::try_from(random.below(128)).expect("7 bits") * if random.below(2) == 0 { 1 } else { -1 }
}

/// As `packed`, for int8 weights.
fn packed_int8(values: &[i8], depth: usize, num_features: usize) -> Vec<u8> {
    let mut bytes = vec![0; num_features.next_multiple_of(64) * depth];
    for (index, value) in values.iter().enumerate() {
        let (feature, at) = (index / depth, index % depth);
        bytes[(feature / 64 * depth + at) * 64 + feature % 64] = value.to_le_bytes()[0];
    }
    bytes
}

#[test]
fn products_touch_nothing_past_the_end() {
    let mut random = Random::new(7);
    for (dtype, weight_dtype) in [
        (DType::Float32, DType::Float32),
        (DType::BFloat16, DType::BFloat16),
        (DType::Float32, DType::BFloat16),
        (DType::Float32, DType::Float16),
    ] {
        for (num_rows, depth, num_features) in
            [(1, 2, 1), (7, 34, 64), (25, 18, 70), (3, 2100, 130), (530, 6, 3)]
        {
            let weights = small_numbers(&mut random, weight_dtype, num_features * depth);
            let rows = small_numbers(&mut random, dtype, num_rows * depth);
            let panels = Guarded::new(&packed(&weights, depth, num_features));
            let input = Guarded::new(&rows.bytes);
            let last = num_rows - 1;
            let mut signs = |len: usize| -> Vec<f32> {
                (0..len).map(|_| f32::from(whole_number(&mut random) % 2)).collect()
            };
            let (a, b) = (signs(depth), signs(num_features));
            let slices = [Slice { first_feature: 0, rank: 1, a: &a, b: &b }];
            let low_rank = LowRank::pack(&slices, (depth, num_features), false).expect("it fits");
            let changed = [i32::try_from(last).expect("small")];
            let groups = [Group { low_rank: &low_rank, rows: &changed }];
            for instructions in available() {
                let output = Guarded::new(&vec![0xff; num_rows * num_features * 4]);
                let execution = Execution { instructions, team: &Threads, num_threads: 2 };
                // SAFETY: the mappings are as long as the sizes say.
                unsafe {
                    let len = panels.bytes().len() / 4;
                    #[expect(
                        clippy::cast_ptr_alignment,
                        reason = "ends at a page and holds whole units"
                    )]
                    let units = std::slice::from_raw_parts(panels.start.cast::<u32>(), len);
                    let weights = Weights {
                        dtype,
                        weight_dtype,
                        in_features: depth,
                        out_features: num_features,
                        panels: Panels::Units(units),
                        bias: None,
                    };
                    let input = Matrix { pointer: input.start, stride: depth };
                    let output = Matrix { pointer: output.start, stride: num_features };
                    let output = (output, DType::Float32);
                    linear(
                        &weights,
                        Finish::Store,
                        num_rows,
                        input,
                        output,
                        Adapters { groups: &groups, first_row: 0 },
                        &execution,
                    )
                    .expect("a correct call");
                }
                let found = Numbers { dtype: DType::Float32, bytes: output.bytes() };
                for index in 0..num_rows * num_features {
                    let (row, feature) = (index / num_features, index % num_features);
                    let product =
                        |at: usize| rows.get(row * depth + at) * weights.get(feature * depth + at);
                    let wanted: f32 = (0..depth).map(product).sum();
                    let hidden: f32 = (0..depth).map(|at| rows.get(row * depth + at) * a[at]).sum();
                    let added = if row == last { hidden * b[feature] } else { 0.0 };
                    let error = found.get(index) - wanted - added;
                    assert!(error.abs() < 0.5, "{instructions:?}");
                }
            }
        }
    }
}

#[test]
fn int8_products_touch_nothing_past_the_end() {
    let mut random = Random::new(8);
    for dtype in DTYPES {
        for (num_rows, depth, num_features) in
            [(1, 2, 1), (7, 34, 64), (25, 18, 70), (3, 2100, 130), (530, 6, 3)]
        {
            let values: Vec<i8> =
                (0..num_features * depth).map(|_| whole_number(&mut random)).collect();
            let rows = small_numbers(&mut random, dtype, num_rows * depth);
            let panels = Guarded::new(&packed_int8(&values, depth, num_features));
            let scales = vec![0.5; num_features];
            let input = Guarded::new(&rows.bytes);
            for instructions in available() {
                let output = Guarded::new(&vec![0xff; num_rows * num_features * 4]);
                let gathered = Guarded::new(&vec![0xff; depth * dtype.size()]);
                let execution = Execution { instructions, team: &Threads, num_threads: 2 };
                let last = num_features - 1;
                // SAFETY: the mappings are as long as the sizes say.
                unsafe {
                    let len = panels.bytes().len();
                    let values = std::slice::from_raw_parts(panels.start.cast::<i8>(), len);
                    let weights = Weights {
                        dtype,
                        weight_dtype: dtype,
                        in_features: depth,
                        out_features: num_features,
                        panels: Panels::Int8 { values, scales: &scales },
                        bias: None,
                    };
                    let input = Matrix { pointer: input.start, stride: depth };
                    let output = Matrix { pointer: output.start, stride: num_features };
                    let output = (output, DType::Float32);
                    linear(
                        &weights,
                        Finish::Store,
                        num_rows,
                        input,
                        output,
                        Adapters::default(),
                        &execution,
                    )
                    .expect("a correct call");
                    let features = [i32::try_from(last).expect("small")];
                    gather(&weights, &features, gathered.start, &execution)
                        .expect("a correct call");
                }
                let found = Numbers { dtype: DType::Float32, bytes: output.bytes() };
                let weight =
                    |feature: usize, at: usize| 0.5 * f32::from(values[feature * depth + at]);
                for index in 0..num_rows * num_features {
                    let (row, feature) = (index / num_features, index % num_features);
                    let product = |at: usize| rows.get(row * depth + at) * weight(feature, at);
                    let wanted: f32 = (0..depth).map(product).sum();
                    // Whole numbers below 2^24: every sum is exact.
                    assert!((found.get(index) - wanted).abs() < 0.1, "{instructions:?}");
                }
                let found = Numbers { dtype, bytes: gathered.bytes() };
                assert!((0..depth).all(|at| (found.get(at) - weight(last, at)).abs() < 0.1));
            }
        }
    }
}

#[test]
fn norms_touch_nothing_past_the_end() {
    let mut random = Random::new(9);
    for dtype in [DType::Float32, DType::BFloat16] {
        for len in [1, 15, 16, 33] {
            let rows = small_numbers(&mut random, dtype, 3 * len);
            let weight = vec![1.0; len];
            for instructions in available() {
                let memory = Guarded::new(&rows.bytes);
                let execution = Execution { instructions, team: &Threads, num_threads: 1 };
                let norm = Norm { weight: &weight, epsilon: 1e-3 };
                // SAFETY: the mapping holds three rows.
                unsafe {
                    rms_norm(norm, dtype, 3, (memory.start, memory.start), &execution)
                        .expect("a correct call");
                }
                let found = Numbers { dtype, bytes: memory.bytes() };
                let squares: f32 = (0..len).map(|at| found.get(at).powi(2)).sum();
                assert!(squares <= 1.02 * f32::from(u8::try_from(len).expect("small")));
            }
        }
    }
}
