//! `prepare_inputs` alone: a step of decodes, a step of prompts.

#![allow(missing_docs, clippy::unwrap_used)]

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use pagedserve_core::config::{CacheConfig, SchedulerConfig};
use pagedserve_core::inputs::InputBuffers;
use pagedserve_core::scheduler::{Scheduler, StepResults};
use pagedserve_core::sequence::Request;

const BLOCK_SIZE: usize = 16;

/// The arrays of a caller, long enough for every bench here.
struct Arrays {
    int32: [Vec<i32>; 5],
    int64: [Vec<i64>; 3],
    block_tables: Vec<i32>,
}

impl Arrays {
    fn new(num_seqs: usize, context: usize) -> Self {
        let num_tokens = num_seqs * context + 1;
        Self {
            int32: std::array::from_fn(|_| vec![0; num_tokens]),
            int64: std::array::from_fn(|_| vec![0; num_tokens]),
            block_tables: vec![0; num_seqs * (context / BLOCK_SIZE + 2)],
        }
    }

    fn fill(&mut self, scheduler: &Scheduler) {
        let [token_ids, query_start, seq_lens, sample_index, sample_rows] = &mut self.int32;
        let [positions, slot_mapping, row_handles] = &mut self.int64;
        let mut buffers = InputBuffers {
            token_ids,
            positions,
            slot_mapping,
            query_start,
            seq_lens,
            block_tables: &mut self.block_tables,
            sample_index,
            sample_rows,
            row_handles,
        };
        scheduler.prepare_inputs(&mut buffers).unwrap();
    }
}

/// A scheduler with a step open in which every sequence computes its whole prompt.
fn prefilling(num_seqs: usize, context: usize) -> Scheduler {
    let num_blocks = num_seqs * (context / BLOCK_SIZE + 2);
    let config = SchedulerConfig::new(num_seqs, num_seqs * context, 1 << 18);
    let cache = CacheConfig { watermark: 0.0, ..CacheConfig::new(BLOCK_SIZE, num_blocks) };
    let mut scheduler = Scheduler::new(config, &cache).unwrap();
    let prompt: Vec<i32> = (0..).take(context).collect();
    for _ in 0..num_seqs {
        scheduler.add_seq_group(&Request::new(&prompt, 0.0)).unwrap();
    }
    assert_eq!(scheduler.schedule(0.0).unwrap().rows.len(), num_seqs);
    scheduler
}

/// The same one step later: every sequence decodes.
fn decoding(num_seqs: usize, context: usize) -> Scheduler {
    let mut scheduler = prefilling(num_seqs, context);
    let num_rows = i32::try_from(num_seqs).unwrap();
    let results = StepResults {
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
