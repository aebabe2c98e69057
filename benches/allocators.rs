//! Blocks alone: allocate, share, free, find again, evict.  One iteration is a round over `size`
//! blocks.

#![allow(missing_docs, clippy::unwrap_used)]

use std::hint::black_box;

use criterion::{BatchSize, BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use pagedserve_core::block::{CachedBlockAllocator, LRUEvictor, Prefix, UncachedBlockAllocator};
use pagedserve_core::hash::PrefixKey;
use pagedserve_core::ids::{BlockId, TokenId};

const BLOCK_SIZE: usize = 16;
const SIZES: [usize; 2] = [128, 10_000];
const IS_CLASSIC: bool = false; // order of eviction

fn contents(first: usize, num_blocks: usize) -> Vec<[TokenId; BLOCK_SIZE]> {
    let block = |index: usize| [TokenId::try_from(index).unwrap(); BLOCK_SIZE];
    (first..first + num_blocks).map(block).collect()
}

/// Registers a chain of blocks and frees it again: the allocator keeps their contents.
fn filled(chain: &[[TokenId; BLOCK_SIZE]]) -> CachedBlockAllocator {
    let mut allocator = CachedBlockAllocator::new(chain.len(), BLOCK_SIZE, IS_CLASSIC);
    let blocks = register(&mut allocator, chain);
    for block in blocks {
        allocator.free(block, 0);
    }
    allocator
}

fn register(allocator: &mut CachedBlockAllocator, chain: &[[TokenId; BLOCK_SIZE]]) -> Vec<BlockId> {
    let mut prefix = Prefix::root(PrefixKey::default());
    let mut blocks = Vec::with_capacity(chain.len());
    for tokens in chain {
        let block = allocator.allocate((blocks.len() + 1) * BLOCK_SIZE).unwrap();
        prefix = allocator.register(block, prefix, tokens);
        blocks.push(block);
    }
    blocks
}

/// Finds and takes every block of a chain.
fn find(allocator: &mut CachedBlockAllocator, chain: &[[TokenId; BLOCK_SIZE]]) -> Vec<BlockId> {
    let mut prefix = Prefix::root(PrefixKey::default());
    let mut blocks = Vec::with_capacity(chain.len());
    for tokens in chain {
        let block = allocator.find(prefix, tokens).unwrap();
        allocator.acquire_found(block);
        prefix = allocator.prefix_of(block).unwrap();
        blocks.push(block);
    }
    blocks
}

fn uncached(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("allocators/uncached");
    for size in SIZES {
        group.throughput(Throughput::Elements(size as u64));
        let mut allocator = UncachedBlockAllocator::new(size);
        let mut blocks = Vec::with_capacity(size);
        group.bench_function(BenchmarkId::new("allocate+free", size), |bencher| {
            bencher.iter(|| {
                blocks.extend(std::iter::from_fn(|| allocator.allocate()));
                blocks.drain(..).for_each(|block| allocator.free(black_box(block)));
            });
        });
        blocks.extend(std::iter::from_fn(|| allocator.allocate()));
        group.bench_function(BenchmarkId::new("fork+free", size), |bencher| {
            bencher.iter(|| {
                for block in &blocks {
                    allocator.fork(black_box(*block));
                }
                for block in &blocks {
                    allocator.free(black_box(*block));
                }
            });
        });
    }
    group.finish();
}

fn cached(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("allocators/cached");
    for size in SIZES {
        group.throughput(Throughput::Elements(size as u64));
        let (old, new) = (contents(0, size), contents(size, size));
        let mut allocator = filled(&old);
        group.bench_function(BenchmarkId::new("find+free", size), |bencher| {
            let mut step = 0;
            bencher.iter(|| {
                step += 1;
                let blocks = find(&mut allocator, &old);
                for block in blocks {
                    allocator.free(block, step);
                }
            });
        });
        group.bench_function(BenchmarkId::new("evict+register", size), |bencher| {
            bencher.iter_batched_ref(
                || filled(&old),
                |allocator| register(allocator, &new),
                BatchSize::LargeInput,
            );
        });
    }
    group.finish();
}

fn evictor(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("allocators/evictor");
    for size in SIZES {
        group.throughput(Throughput::Elements(size as u64));
        // All accesses at one time, which the classic evictor searches from end to end.
        group.bench_function(BenchmarkId::new("add+evict", size), |bencher| {
            bencher.iter(|| {
                let mut evictor = LRUEvictor::default();
                for index in 0..u32::try_from(size).unwrap() {
                    evictor.add(BlockId::new(index), 0, index as usize % 128);
                }
                while let Some(block) = evictor.evict() {
                    black_box(block);
                }
            });
        });
    }
    group.finish();
}

criterion_group!(benches, uncached, cached, evictor);
criterion_main!(benches);
