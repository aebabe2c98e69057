//! `prepare_inputs` alone: a step of decodes, a step of prompts.

#![allow(missing_docs, clippy::unwrap_used)]

mod arrays;

use arrays::{Arrays, BLOCK_SIZE};
use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use pagedserve_core::config::{CacheConfig, SchedulerConfig};
use pagedserve_core::scheduler::{SampledOutputs, Scheduler};
use pagedserve_core::sequence::Request;

/// A scheduler with a step open in which every sequence computes its whole prompt.
fn prefilling(num_seqs: usize, context: usize) -> Scheduler {
    let num_blocks = num_seqs * (context / BLOCK_SIZE + 2);
    let config = SchedulerConfig::new(num_seqs, num_seqs * context, 1 << 18);
    let cache = CacheConfig::new(BLOCK_SIZE, num_blocks).with(|cache| cache.watermark = 0.0);
    let mut scheduler = Scheduler::new(config, &cache).unwrap();
    let prompt: Vec<i32> = (0..).take(context).collect();
    for _ in 0..num_seqs {
        scheduler.add_seq_group(&Request::new(&prompt, 0.0)).unwrap();
    }
    assert_eq!(scheduler.schedule(0.0).unwrap().rows.len(), num_seqs);
    scheduler
}

/// The same scheduler one step later: every sequence decodes.
fn decoding(num_seqs: usize, context: usize) -> Scheduler {
    let mut scheduler = prefilling(num_seqs, context);
    let num_rows = i32::try_from(num_seqs).unwrap();
    let results = SampledOutputs {
        parent_rows: &(0..num_rows).collect::<Vec<_>>(),
        token_start: &(0..=num_rows).collect::<Vec<_>>(),
        tokens: &vec![1; num_seqs],
        finish: &vec![0; num_seqs],
    };
    let step_id = scheduler.outputs().step_id;
    scheduler.update(step_id, results).unwrap();
    scheduler.schedule(0.0).unwrap();
    scheduler
}

fn decode(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("inputs/decode");
    for (num_seqs, context) in [(64, 512), (256, 512), (1024, 512), (256, 4096)] {
        let (scheduler, mut arrays) = (decoding(num_seqs, context), Arrays::new(num_seqs, context));
        group.throughput(Throughput::Elements(num_seqs as u64));
        group.bench_function(BenchmarkId::new(num_seqs.to_string(), context), |bencher| {
            bencher.iter(|| arrays.fill(&scheduler));
        });
    }
    group.finish();
}

fn prefill(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("inputs/prefill");
    for (num_seqs, context) in [(1, 8192), (16, 512)] {
        let scheduler = prefilling(num_seqs, context);
        let mut arrays = Arrays::new(num_seqs, context);
        group.throughput(Throughput::Elements((num_seqs * context) as u64));
        group.bench_function(BenchmarkId::new(num_seqs.to_string(), context), |bencher| {
            bencher.iter(|| arrays.fill(&scheduler));
        });
    }
    group.finish();
}

criterion_group!(benches, decode, prefill);
criterion_main!(benches);
