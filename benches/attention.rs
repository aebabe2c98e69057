//! Paged attention on the CPU beside what the machine can do in the same minute.
//!
//! Decoding is printed as a share of the bandwidth of reading, that of a plain sum of vectors over
//! memory that no cache holds; prompts as a share of the rate of float32 multiply-adds, which
//! bfloat16 can exceed.  Both are measured in turns on as many threads, and the lower decile of
//! short times counts: other load only adds to them.
//!
//! The pools are larger than the caches, and rows' blocks are scattered.
//! `PAGEDSERVE_BENCH_THREADS` (1) sets the number of threads; they wait between calls as torch's
//! do, spinning.  An argument chooses the cases whose names contain it:
//! `cargo bench -p pagedserve-cpu --bench attention -- decode`.
#![allow(unsafe_code, reason = "the call takes pointers, and multiply-adds are intrinsics")]
#![allow(clippy::disallowed_methods, reason = "a bench's setting comes from its environment")]
#![allow(clippy::print_stdout, clippy::disallowed_macros, reason = "a table is what it makes")]
#![allow(clippy::disallowed_types, reason = "a team shares a board; the scheduler has no threads")]
#![allow(clippy::cast_precision_loss, reason = "bytes and products become rates")]

use std::hint::black_box;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{JoinHandle, Thread};
use std::time::Instant;

use pagedserve_cpu::attention::{
    CacheDType, Memory, Options, Rows, Shape, Tokens, paged_attention,
};
use pagedserve_cpu::{DType, Execution, InstructionSet, Team};

type Work<'a> = &'a (dyn Fn() + Sync);

/// State that the threads of a team share with their leader.
#[derive(Default)]
struct Board {
    /// The work of a turn; only read between its start and its end.
    work: Mutex<Option<Work<'static>>>,
    /// Number of turns begun.
    turn: AtomicUsize,
    /// Number of members at work.
    busy: AtomicUsize,
    is_closed: AtomicBool,
}

/// Threads that wait for work, spinning for a while before they sleep.
struct Parked {
    board: Arc<Board>,
    members: Vec<JoinHandle<()>>,
}

/// Looks before a waiting thread sleeps: some milliseconds.
const SPINS: usize = 200_000;

impl Board {
    /// Main loop of each thread except the leader's.
    fn serve(&self) {
        let mut seen = 0;
        loop {
            let mut num_looks = 0;
            while self.turn.load(Ordering::Acquire) == seen {
                if self.is_closed.load(Ordering::Acquire) {
                    return;
                }
                num_looks += 1;
                if num_looks < SPINS { std::hint::spin_loop() } else { std::thread::park() }
            }
            seen += 1;
            let work = *self.work.lock().unwrap_or_else(PoisonError::into_inner);
            work.expect("a turn has work")();
            self.busy.fetch_sub(1, Ordering::Release);
        }
    }
}

impl Parked {
    fn new(num_threads: usize) -> Self {
        let board = Arc::new(Board::default());
        let member = || {
            let board = Arc::clone(&board);
            std::thread::spawn(move || board.serve())
        };
        Self { members: (1..num_threads).map(|_| member()).collect(), board }
    }

    fn threads(&self) -> impl Iterator<Item = &Thread> {
        self.members.iter().map(JoinHandle::thread)
    }
}

impl Team for Parked {
    /// Runs `work` on all threads, whatever their number.
    fn run(&self, _num_threads: usize, work: Work<'_>) {
        // SAFETY: members read it before this call returns, and not after.
        let lent = unsafe { std::mem::transmute::<Work<'_>, Work<'static>>(work) };
        *self.board.work.lock().unwrap_or_else(PoisonError::into_inner) = Some(lent);
        self.board.busy.store(self.members.len(), Ordering::Relaxed);
        self.board.turn.fetch_add(1, Ordering::Release);
        self.threads().for_each(Thread::unpark);
        work();
        while self.board.busy.load(Ordering::Acquire) > 0 {
            std::hint::spin_loop();
        }
    }
}

impl Drop for Parked {
    fn drop(&mut self) {
        self.board.is_closed.store(true, Ordering::Release);
        self.threads().for_each(Thread::unpark);
        for member in self.members.drain(..) {
            assert!(member.join().is_ok(), "a member of the team panicked");
        }
    }
}

/// Elements of memory that a token of a step takes, and the step's rows.
struct Step {
    shape: Shape,
    pool: Vec<Line>,
    tokens: Vec<Line>,
    output: Vec<Line>,
    block_tables: Vec<i32>,
    query_start: Vec<i32>,
    seq_lens: Vec<i32>,
    slot_mapping: Vec<i64>,
}

fn int(number: usize) -> i32 {
    i32::try_from(number).expect("a small number")
}

/// Memory that a cache moves at once; torch's memory begins with one, too.
#[derive(Clone, Copy)]
#[repr(align(64))]
struct Line {
    _words: [u32; 16],
}

/// Memory of `num_bytes` bytes, all elements of value one.
fn ones(dtype: DType, num_bytes: usize) -> Vec<Line> {
    let word = match dtype {
        DType::Float32 => 1.0_f32.to_bits(),
        DType::BFloat16 => 0x3f80_3f80,
        DType::Float16 => 0x3c00_3c00,
    };
    vec![Line { _words: [word; 16] }; num_bytes.div_ceil(64)]
}

impl Step {
    /// Rows of `context` keys and `queries` queries.
    fn new(shape: Shape, num_rows: usize, context: usize, queries: usize) -> Self {
        let width = context.div_ceil(shape.block_size);
        // Enough rows that a pass over the pool finds nothing in a cache, whatever the step.
        let row_bytes = width * shape.block_bytes();
        let num_places = num_rows.max((192 << 20) / row_bytes);
        let num_blocks = num_places * width;
        let shape = Shape { num_blocks, ..shape };
        let num_tokens = num_rows * queries;
        let stride = shape.num_heads * shape.key_size;
        let mut step = Self {
            pool: ones(shape.dtype, num_blocks * shape.block_bytes()),
            tokens: ones(shape.dtype, num_tokens * stride * shape.dtype.size()),
            output: ones(shape.dtype, num_tokens * stride * shape.dtype.size()),
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

    fn run(&mut self, machine: &Machine) {
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
        let options = Options {
            scale: 0.1,
            window: None,
            softcap: None,
            sinks: None,
            alibi: None,
            position_bias: None,
            causal: true,
        };
        let (instructions, num_threads) = (InstructionSet::detect(), machine.num_threads());
        let execution = Execution { instructions, team: &machine.team, num_threads };
        // SAFETY: the memory is this step's and has the sizes of its shape.
        unsafe { paged_attention(&self.shape, &memory, &rows, &options, &execution) }
            .expect("a correct step");
    }
}

fn shapes() -> Vec<(String, Shape)> {
    let mut shapes = Vec::new();
    for (num_heads, num_kv_heads, size) in [(9, 3, 64), (32, 8, 128)] {
        for (name, dtype, cache_dtype) in [
            ("f32", DType::Float32, CacheDType::Auto),
            ("bf16", DType::BFloat16, CacheDType::Auto),
            ("f32 int8", DType::Float32, CacheDType::Int8),
            ("bf16 int8", DType::BFloat16, CacheDType::Int8),
            ("bf16 e4m3", DType::BFloat16, CacheDType::Float8E4M3),
            ("bf16 e5m2", DType::BFloat16, CacheDType::Float8E5M2),
        ] {
            shapes.push((
                format!("{num_heads}x{num_kv_heads}x{size} {name}"),
                Shape {
                    dtype,
                    cache_dtype,
                    num_heads,
                    num_kv_heads,
                    key_size: size,
                    value_size: size,
                    num_blocks: 0,
                    block_size: 16,
                },
            ));
        }
    }
    shapes
}

/// The threads, and the rates that they can reach.
struct Machine {
    team: Parked,
    words: Vec<u64>,
}

/// Seconds that `work` takes.
fn seconds(work: impl FnOnce()) -> f64 {
    let start = Instant::now();
    work();
    start.elapsed().as_secs_f64()
}

impl Machine {
    fn new(num_threads: usize) -> Self {
        Self { team: Parked::new(num_threads), words: vec![1; (256 << 20) / 8] }
    }

    fn num_threads(&self) -> usize {
        self.team.members.len() + 1
    }

    /// Bytes a second of a sum over memory that no cache holds, the `turn`-th part of it.
    fn read_rate(&self, turn: usize) -> f64 {
        const PARTS: usize = 16;
        let words = self.words.chunks(self.words.len() / PARTS).nth(turn % PARTS);
        let words = words.expect("one of the parts");
        let share = words.len().div_ceil(self.num_threads());
        let next = AtomicUsize::new(0);
        let seconds = seconds(|| {
            self.team.run(self.num_threads(), &|| {
                let part = next.fetch_add(1, Ordering::Relaxed);
                black_box(sum(words.chunks(share).nth(part).expect("a share a thread")));
            });
        });
        (words.len() * 8) as f64 / seconds
    }

    /// Multiply-adds of float32 a second, each two operations.
    fn multiply_rate(&self) -> f64 {
        const ROUNDS: usize = 1 << 17;
        let num_done = AtomicUsize::new(0);
        let seconds = seconds(|| {
            self.team.run(self.num_threads(), &|| {
                num_done.fetch_add(multiply_adds(ROUNDS), Ordering::Relaxed);
            });
        });
        2.0 * num_done.into_inner() as f64 / seconds
    }
}

fn sum(words: &[u64]) -> u64 {
    #[cfg(target_arch = "x86_64")]
    {
        #[target_feature(enable = "avx2")]
        fn with_avx2(words: &[u64]) -> u64 {
            words.iter().fold(0, |sum, &word| sum.wrapping_add(word))
        }
        if InstructionSet::Avx2.is_available() {
            // SAFETY: the CPU has it.
            return unsafe { with_avx2(words) };
        }
    }
    words.iter().fold(0, |sum, &word| sum.wrapping_add(word))
}

/// Computes products of float32 with the widest vectors; returns how many.
fn multiply_adds(rounds: usize) -> usize {
    const CHAINS: usize = 12; // more than latency times throughput
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{_mm256_fmadd_ps, _mm256_set1_ps, _mm512_fmadd_ps, _mm512_set1_ps};

        #[target_feature(enable = "avx512f")]
        fn with_avx512(rounds: usize) {
            let factor = _mm512_set1_ps(0.5);
            let mut sums = [factor; CHAINS];
            for _ in 0..rounds {
                for sum in &mut sums {
                    *sum = _mm512_fmadd_ps(*sum, factor, factor);
                }
            }
            black_box(sums);
        }
        #[target_feature(enable = "avx2,fma")]
        fn with_avx2(rounds: usize) {
            let factor = _mm256_set1_ps(0.5);
            let mut sums = [factor; CHAINS];
            for _ in 0..rounds {
                for sum in &mut sums {
                    *sum = _mm256_fmadd_ps(*sum, factor, factor);
                }
            }
            black_box(sums);
        }
        if InstructionSet::Avx512.is_available() {
            // SAFETY: the CPU has it.
            unsafe { with_avx512(rounds) };
            return rounds * CHAINS * 16;
        }
        if InstructionSet::Avx2.is_available() {
            // SAFETY: the CPU has it.
            unsafe { with_avx2(rounds) };
            return rounds * CHAINS * 8;
        }
    }
    let mut sums = [[0.5_f32; 16]; CHAINS];
    for _ in 0..rounds {
        for number in sums.as_flattened_mut() {
            *number = *number * 0.5 + 0.5;
        }
    }
    black_box(sums);
    rounds * CHAINS * 16
}

/// The number that a tenth of them lie below.
fn lower_decile(mut numbers: Vec<f64>) -> f64 {
    numbers.sort_by(f64::total_cmp);
    numbers[numbers.len() / 10]
}

/// Prints a case: the time of a call, its rate, and the rate as a share of the machine's.
fn report(name: &str, amount: f64, machine_rate: impl Fn(usize) -> f64, mut call: impl FnMut()) {
    const SAMPLES: usize = 200;
    const FEW_SAMPLES: usize = 11; // of what takes long
    const SAMPLE_SECONDS: f64 = 5e-4; // short enough to find the machine idle now and then
    let once = seconds(&mut call).min(seconds(&mut call));
    let mut num_calls = 1;
    while once * f64::from(num_calls) < SAMPLE_SECONDS {
        num_calls += 1;
    }
    let (mut times, mut machine_times) = (Vec::new(), Vec::new());
    let start = Instant::now();
    for turn in 0..SAMPLES {
        if turn >= FEW_SAMPLES && start.elapsed().as_secs_f64() > 1.0 {
            break;
        }
        machine_times.push(1.0 / machine_rate(turn));
        times.push(seconds(|| (0..num_calls).for_each(|_| call())) / f64::from(num_calls));
    }
    let (time, rate) = (lower_decile(times), 1.0 / lower_decile(machine_times));
    println!(
        "{name:36} {:10.1} us {:8.1} G/s of {:8.1}: {:5.1} %",
        time * 1e6,
        amount / time / 1e9,
        rate / 1e9,
        amount / time / rate * 100.0
    );
}

fn main() {
    let num_threads = std::env::var("PAGEDSERVE_BENCH_THREADS")
        .map_or(1, |text| text.parse().expect("a number of threads"));
    let chosen = std::env::args().skip(1).find(|argument| !argument.starts_with('-'));
    let is_chosen = |name: &str| chosen.as_ref().is_none_or(|chosen| name.contains(chosen));
    let machine = Machine::new(num_threads);
    for (shape_name, shape) in shapes() {
        for context in [128, 512, 2048, 4096, 8192] {
            for num_rows in [1, 16] {
                let name = format!("decode {shape_name} {num_rows}x{context}");
                let bytes = num_rows * context / 16 * shape.block_bytes();
                if !is_chosen(&name) || bytes > 1 << 30 {
                    continue;
                }
                let mut step = Step::new(shape, num_rows, context, 1);
                let mut turn = 0;
                report(
                    &name,
                    bytes as f64,
                    |turn| machine.read_rate(turn),
                    || {
                        turn += 1;
                        step.place(turn);
                        step.run(&machine);
                    },
                );
            }
        }
        for context in [512, 2048] {
            let name = format!("prefill {shape_name} {context}");
            if !is_chosen(&name) {
                continue;
            }
            let mut step = Step::new(shape, 1, context, context);
            // Two operations for each pair of elements that meet, of keys and of values.
            let pairs = context * (context + 1) / 2;
            let operations = 4 * pairs * shape.num_heads * shape.key_size;
            report(&name, operations as f64, |_| machine.multiply_rate(), || step.run(&machine));
        }
    }
}
