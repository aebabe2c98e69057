//! One step of steady decode, and the calls around it: criterion groups `area/case/size`.

#![allow(missing_docs, clippy::unwrap_used)]
#![allow(clippy::disallowed_methods, reason = "a benchmark reads the clock")]

mod arrays;

use std::hint::black_box;

use arrays::{Arrays, BLOCK_SIZE};
use criterion::{BatchSize, BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use pagedserve_core::config::{CacheConfig, SchedulerConfig};
use pagedserve_core::scheduler::{SampledOutputs, Scheduler};
use pagedserve_core::sequence::Request;

const CONTEXT: usize = 512;
const SIZES: [usize; 5] = [1, 16, 64, 256, 1024];

/// State that a caller keeps from step to step.
struct Caller {
    parent_rows: Vec<i32>,
    token_start: Vec<i32>,
    tokens: Vec<i32>,
    finish: Vec<u8>,
    arrays: Arrays,
}

impl Caller {
    fn new(num_seqs: usize) -> Self {
        let end = i32::try_from(num_seqs).unwrap();
        Self {
            parent_rows: (0..end).collect(),
            token_start: (0..=end).collect(),
            tokens: vec![1; num_seqs],
            finish: vec![0; num_seqs],
            arrays: Arrays::new(num_seqs, 2 * CONTEXT),
        }
    }

    fn step(&mut self, scheduler: &mut Scheduler) {
        let step_id = black_box(scheduler.schedule(0.0).unwrap()).step_id;
        self.arrays.fill(scheduler);
        let results = SampledOutputs {
            parent_rows: &self.parent_rows,
            token_start: &self.token_start,
            tokens: &self.tokens,
            finish: &self.finish,
        };
        black_box(scheduler.update(step_id, results).unwrap());
    }
}

fn waiting(num_seqs: usize) -> Scheduler {
    let config = SchedulerConfig::new(num_seqs, num_seqs * CONTEXT, 1 << 16);
    let cache = CacheConfig::new(BLOCK_SIZE, num_seqs * 40);
    let mut scheduler = Scheduler::new(config, &cache).unwrap();
    let prompt: Vec<i32> = (0..).take(CONTEXT).collect();
    for _ in 0..num_seqs {
        scheduler.add_seq_group(&Request::new(&prompt, 0.0)).unwrap();
    }
    scheduler
}

/// Schedulers whose sequences have all computed their prompts.
fn decoding(num_seqs: usize) -> (Scheduler, Caller) {
    let (mut scheduler, mut caller) = (waiting(num_seqs), Caller::new(num_seqs));
    caller.step(&mut scheduler);
    (scheduler, caller)
}

fn decode(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("step/decode");
    for num_seqs in SIZES {
        group.throughput(Throughput::Elements(num_seqs as u64));
        group.bench_with_input(BenchmarkId::from_parameter(num_seqs), &num_seqs, |bencher, _| {
            // 64 steps and then afresh: the context stays near 512 tokens.
            bencher.iter_custom(|iterations| {
                let mut elapsed = std::time::Duration::ZERO;
                let mut left = iterations;
                while left > 0 {
                    let (mut scheduler, mut caller) = decoding(num_seqs);
                    let batch = left.min(64);
                    let start = std::time::Instant::now();
                    (0..batch).for_each(|_| caller.step(&mut scheduler));
                    elapsed += start.elapsed();
                    left -= batch;
                }
                elapsed
            });
        });
    }
    group.finish();
}

fn admit(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("step/admit");
    for num_seqs in [16, 256] {
        group.throughput(Throughput::Elements(num_seqs as u64));
        group.bench_with_input(BenchmarkId::from_parameter(num_seqs), &num_seqs, |bencher, _| {
            let mut caller = Caller::new(num_seqs);
            bencher.iter_batched_ref(
                || waiting(num_seqs),
                |scheduler| caller.step(scheduler),
                BatchSize::LargeInput,
            );
        });
    }
    group.finish();
}

criterion_group!(benches, decode, admit);
criterion_main!(benches);
