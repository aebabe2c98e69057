//! Prefix caching: the hash of long prompts, finding them, admitting requests that share one.

#![allow(missing_docs, clippy::unwrap_used)]

use std::hint::black_box;

use criterion::{BatchSize, BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use pagedserve_core::config::{CacheConfig, SchedulerConfig};
use pagedserve_core::hash::{PrefixHash, PrefixKey};
use pagedserve_core::ids::TokenId;
use pagedserve_core::scheduler::{SampledOutputs, Scheduler};
use pagedserve_core::sequence::Request;

const BLOCK_SIZE: usize = 16;
const LENGTHS: [usize; 3] = [2048, 32_768, 131_072];

fn prompt(first: usize, num_tokens: usize) -> Vec<TokenId> {
    (first..first + num_tokens).map(|token| TokenId::try_from(token).unwrap()).collect()
}

fn caching(num_gpu_blocks: usize) -> Scheduler {
    let config = SchedulerConfig::new(2048, 1 << 21, 1 << 18);
    let cache = CacheConfig::new(BLOCK_SIZE, num_gpu_blocks).with(|cache| {
        cache.watermark = 0.0;
        cache.enable_prefix_caching = true;
    });
    Scheduler::new(config, &cache).unwrap()
}

/// Computes prompts and ends them: their blocks stay cached.
fn finish(scheduler: &mut Scheduler, prompts: &[Vec<TokenId>]) {
    let step_id = admit(scheduler, prompts);
    let num_rows = i32::try_from(prompts.len()).unwrap();
    let results = SampledOutputs {
        parent_rows: &(0..num_rows).collect::<Vec<_>>(),
        token_start: &(0..=num_rows).collect::<Vec<_>>(),
        tokens: &vec![1; prompts.len()],
        finish: &vec![1; prompts.len()],
    };
    scheduler.update(step_id, results).unwrap();
}

/// Queues prompts and schedules all of them in one step.
fn admit(scheduler: &mut Scheduler, prompts: &[Vec<TokenId>]) -> u64 {
    for prompt in prompts {
        scheduler.add_seq_group(&Request::new(prompt, 0.0)).unwrap();
    }
    let outputs = scheduler.schedule(0.0).unwrap();
    assert_eq!(outputs.rows.len(), prompts.len());
    outputs.step_id
}

fn hash(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("prefix/hash");
    for num_tokens in LENGTHS {
        group.throughput(Throughput::Elements(num_tokens as u64));
        let prompt = prompt(0, num_tokens);
        group.bench_function(BenchmarkId::from_parameter(num_tokens), |bencher| {
            let root = PrefixHash::root(PrefixKey::default());
            let chain = || prompt.chunks(BLOCK_SIZE).fold(root, PrefixHash::extend);
            bencher.iter(|| black_box(chain()));
        });
    }
    group.finish();
}

/// A prompt that is wholly cached, from queue to end.
fn hit(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("prefix/hit");
    for num_tokens in LENGTHS {
        group.throughput(Throughput::Elements(num_tokens as u64));
        let prompts = [prompt(0, num_tokens)];
        let mut scheduler = caching(2 * num_tokens / BLOCK_SIZE);
        finish(&mut scheduler, &prompts);
        group.bench_function(BenchmarkId::from_parameter(num_tokens), |bencher| {
            bencher.iter(|| finish(&mut scheduler, &prompts));
        });
    }
    group.finish();
}

fn admission(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("prefix/admit");
    let shared = prompt(0, 2048);
    let longer = |index: usize| [shared.clone(), prompt(4096 + index * 64, 64)].concat();
    let requests: Vec<_> = (0..256).map(longer).collect();
    let prefix_cached = || {
        let mut scheduler = caching(60_000);
        finish(&mut scheduler, std::slice::from_ref(&shared));
        scheduler
    };
    group.throughput(Throughput::Elements(requests.len() as u64));
    group.bench_function("256 over a cached 2048", |bencher| {
        bencher.iter_batched_ref(
            prefix_cached,
            |scheduler| admit(scheduler, &requests),
            BatchSize::LargeInput,
        );
    });
    let all_cached = || {
        let mut scheduler = caching(10_000);
        let old: Vec<_> = (0..78).map(|index| prompt(index * 4096, 2048)).collect();
        finish(&mut scheduler, &old);
        finish(&mut scheduler, &[prompt(78 * 4096, 256)]);
        assert_eq!(scheduler.space().gpu().cached().unwrap().num_cached(), 10_000);
        scheduler
    };
    let unseen: Vec<_> = (100..116).map(|index| prompt(index * 4096, 2048)).collect();
    group.throughput(Throughput::Elements(unseen.len() as u64));
    group.bench_function("16 unseen 2048 into 10000 cached blocks", |bencher| {
        bencher.iter_batched_ref(
            all_cached,
            |scheduler| admit(scheduler, &unseen),
            BatchSize::LargeInput,
        );
    });
    group.finish();
}

criterion_group!(benches, hash, hit, admission);
criterion_main!(benches);
