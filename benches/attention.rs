//! Paged attention on the CPU: bytes of keys and values read in a second, beside what the
//! memory gives to a plain sum.
//!
//! The pools are larger than the caches, and rows' blocks are scattered.  Threads are started
//! anew for each call here, as criterion has no torch: `PAGEDSERVE_BENCH_THREADS` (1) says how
//! many, and with more than one, small cases measure the start of threads.
#![allow(missing_docs, reason = "criterion's macros")]
#![allow(unsafe_code, reason = "the call takes pointers")]
#![allow(clippy::disallowed_methods, reason = "a bench's setting comes from its environment")]

use std::hint::black_box;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use pagedserve_cpu::attention::{Memory, Options, Rows, Shape, Tokens, paged_attention};
use pagedserve_cpu::{DType, Execution, InstructionSet, Team};

/// Threads started for each call.
struct Started;

impl Team for Started {
    fn run(&self, num_threads: usize, work: &(dyn Fn() + Sync)) {
        std::thread::scope(|scope| {
            for _ in 1..num_threads {
                scope.spawn(work);
            }
            work();
        });
    }
}

fn num_threads() -> usize {
    std::env::var("PAGEDSERVE_BENCH_THREADS").map_or(1, |text| text.parse().expect("a number"))
}

/// Elements of memory that a token of a step takes, and the step's rows.
struct Step {
    shape: Shape,
    pool: Vec<u32>,
    tokens: Vec<u32>,
    output: Vec<u32>,
    block_tables: Vec<i32>,
    query_start: Vec<i32>,
    seq_lens: Vec<i32>,
    slot_mapping: Vec<i64>,
}

fn int(number: usize) -> i32 {
    i32::try_from(number).expect("a small number")
}

/// Words that hold `len` elements, all of value one or nearly so.
fn ones(dtype: DType, len: usize) -> Vec<u32> {
    let word = match dtype {
        DType::Float32 => 1.0_f32.to_bits(),
        DType::BFloat16 => 0x3f80_3f80,
        DType::Float16 => 0x3c00_3c00,
    };
    vec![word; (len * dtype.size()).div_ceil(4)]
}

impl Step {
    /// Rows of `context` keys and `queries` queries.
    fn new(shape: Shape, num_rows: usize, context: usize, queries: usize) -> Self {
        let width = context.div_ceil(shape.block_size);
        // Enough rows that a pass over the pool finds nothing in a cache, whatever the step.
        let row_bytes = width * shape.block_elements() * shape.dtype.size();
        let num_places = num_rows.max((192 << 20) / row_bytes);
        let num_blocks = num_places * width;
        let shape = Shape { num_blocks, ..shape };
        let num_tokens = num_rows * queries;
        let stride = shape.num_heads * shape.key_size;
        let mut step = Self {
            pool: ones(shape.dtype, num_blocks * shape.block_elements()),
            tokens: ones(shape.dtype, num_tokens * stride),
            output: ones(shape.dtype, num_tokens * stride),
            block_tables: vec![0; num_rows * width],
            query_start: (0..=num_rows).map(|row| int(row * queries)).collect(),
            seq_lens: vec![int(context); num_rows],
            slot_mapping: vec![-1; num_tokens],
            shape,
        };
        step.place(0);
        step
    }

    /// Gives the rows the blocks of the `turn`-th places, each row's spread over the pool.
    fn place(&mut self, turn: usize) {
        let width = self.block_tables.len() / self.seq_lens.len();
        let num_places = self.shape.num_blocks / width;
        for row in 0..self.seq_lens.len() {
            let place = (turn * self.seq_lens.len() + row) % num_places;
            for index in 0..width {
                // An odd factor scatters the numbers of a power of two; others nearly so.
                let scattered = (index * num_places + place) * 7919 % self.shape.num_blocks;
                self.block_tables[row * width + index] = int(scattered);
            }
        }
    }

    fn run(&mut self, instructions: InstructionSet, num_threads: usize) {
        let Shape { num_heads, num_kv_heads, key_size, .. } = self.shape;
        let tokens = |heads: usize| Tokens {
            pointer: self.tokens.as_ptr().cast(),
            token_stride: heads * key_size,
            head_stride: key_size,
        };
        let memory = Memory {
            query: tokens(num_heads),
            key: tokens(num_kv_heads),
            value: tokens(num_kv_heads),
            pool: self.pool.as_mut_ptr().cast(),
            output: self.output.as_mut_ptr().cast(),
        };
        let rows = Rows {
            block_tables: &self.block_tables,
            query_start: &self.query_start,
            seq_lens: &self.seq_lens,
            slot_mapping: &self.slot_mapping,
        };
        let options = Options { scale: 0.1, window: None, softcap: None, sinks: None, alibi: None };
        let execution = Execution { instructions, team: &Started, num_threads };
        // SAFETY: the memory is this step's and has the sizes of its shape.
        unsafe { paged_attention(&self.shape, &memory, &rows, &options, &execution) }
            .expect("a correct step");
    }
}

fn shapes() -> Vec<(&'static str, Shape)> {
    let shape = |dtype, num_heads, num_kv_heads, size| Shape {
        dtype,
        num_heads,
        num_kv_heads,
        key_size: size,
        value_size: size,
        num_blocks: 0,
        block_size: 16,
    };
    vec![
        ("9x3x64-f32", shape(DType::Float32, 9, 3, 64)),
        ("9x3x64-bf16", shape(DType::BFloat16, 9, 3, 64)),
        ("32x8x128-f32", shape(DType::Float32, 32, 8, 128)),
        ("32x8x128-bf16", shape(DType::BFloat16, 32, 8, 128)),
    ]
}

/// The sum of memory that no cache holds: what can be read in a second.
fn read(criterion: &mut Criterion) {
    let words = vec![1_u64; (256 << 20) / 8];
    let mut group = criterion.benchmark_group("attention/read");
    group.throughput(Throughput::Bytes(256 << 20)).sample_size(10);
    group.bench_function("sum", |bencher| {
        bencher.iter(|| {
            let share = words.len().div_ceil(num_threads());
            std::thread::scope(|scope| {
                for part in words.chunks(share) {
                    scope.spawn(move || {
                        black_box(part.iter().fold(0_u64, |sum, &word| sum.wrapping_add(word)))
                    });
                }
            });
        });
    });
    group.finish();
}

fn decode(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("attention/decode");
    group.sample_size(10);
    for (name, shape) in shapes() {
        for context in [128, 1024, 4096, 8192] {
            for num_rows in [1, 64] {
                let bytes = num_rows * context / 16 * shape.block_elements() * shape.dtype.size();
                if bytes > 1 << 30 {
                    continue;
                }
                let mut step = Step::new(shape, num_rows, context, 1);
                group.throughput(Throughput::Bytes(bytes as u64));
                let id = BenchmarkId::new(name, format!("{num_rows}x{context}"));
                let mut turn = 0;
                group.bench_function(id, |bencher| {
                    bencher.iter(|| {
                        turn += 1;
                        step.place(turn);
                        step.run(InstructionSet::detect(), num_threads());
                    });
                });
            }
        }
    }
    group.finish();
}

/// Queries of a prompt with the products they make: two of each visible pair of elements.
fn prefill(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("attention/prefill");
    group.sample_size(10);
    for (name, shape) in shapes() {
        for context in [512, 2048] {
            let mut step = Step::new(shape, 1, context, context);
            let pairs = context * (context + 1) / 2;
            let flops = 4 * pairs * shape.num_heads * shape.key_size;
            group.throughput(Throughput::Elements(flops as u64));
            group.bench_function(BenchmarkId::new(name, context), |bencher| {
                bencher.iter(|| step.run(InstructionSet::detect(), num_threads()));
            });
        }
    }
    group.finish();
}

criterion_group!(benches, read, decode, prefill);
criterion_main!(benches);
