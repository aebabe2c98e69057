//! Steady decode allocates nothing: a counting allocator around the three calls of a step.

#![allow(clippy::unwrap_used, missing_docs)]

mod common;

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

use common::{Limits, add};
use pagedserve_core::config::{CacheConfig, SchedulerConfig};
use pagedserve_core::inputs::InputBuffers;
use pagedserve_core::scheduler::SampledOutputs;

struct Counting;

thread_local! {
    // The harness allocates too, in a separate thread.
    static NUM_ALLOCATIONS: Cell<usize> = const { Cell::new(0) };
}

fn count() {
    NUM_ALLOCATIONS.set(NUM_ALLOCATIONS.get() + 1);
}

// SAFETY: every call goes to the system allocator unchanged.
#[allow(unsafe_code)]
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count();
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        unsafe { System.dealloc(memory, layout) }
    }

    unsafe fn realloc(&self, memory: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        count();
        unsafe { System.realloc(memory, layout, size) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

#[test]
fn steady_decode_allocates_only_where_tokens_and_tables_grow() {
    for (enable_prefix_caching, enable_chunked_prefill) in
        [(false, false), (true, false), (false, true), (true, true)]
    {
        for is_async in [false, true] {
            let num_allocations =
                allocations_of_decode(enable_prefix_caching, enable_chunked_prefill, is_async);
            let case = (enable_prefix_caching, enable_chunked_prefill, is_async);
            assert_eq!(num_allocations, 0, "{case:?}");
        }
    }
}

fn allocations_of_decode(
    enable_prefix_caching: bool,
    enable_chunked_prefill: bool,
    is_async: bool,
) -> usize {
    const N: usize = 32;
    let limits = Limits {
        cache: CacheConfig::new(16, N * 64)
            .with(|cache| cache.enable_prefix_caching = enable_prefix_caching),
        scheduler: SchedulerConfig::new(N, N * 600, 1024)
            .with(|config| config.enable_chunked_prefill = enable_chunked_prefill),
    };
    let mut scheduler = limits.scheduler();
    for first in 0..i32::try_from(N).unwrap() {
        add(&mut scheduler, first, 520);
    }
    let parent_rows: Vec<i32> = (0..).take(N).collect();
    let token_start: Vec<i32> = (0..=i32::try_from(N).unwrap()).collect();
    let (tokens, finish) = (vec![1; N], vec![0; N]);
    let results = SampledOutputs {
        parent_rows: &parent_rows,
        token_start: &token_start,
        tokens: &tokens,
        finish: &finish,
    };
    let mut ids = vec![0; N * 600];
    let (mut positions, mut slots) = (vec![0; N * 600], vec![0; N * 600]);
    let mut rows = [vec![0; N + 1], vec![0; N], vec![0; N], vec![0; N]];
    let [query_start, seq_lens, sample_index, sample_rows] = &mut rows;
    let (mut tables, mut handles) = (vec![0; N * 64], vec![0; N]);
    let mut step = || {
        let step_id = scheduler.schedule(0.0).unwrap().step_id;
        let mut inputs = InputBuffers::default();
        inputs.token_ids = &mut ids;
        inputs.positions = &mut positions;
        inputs.slot_mapping = &mut slots;
        inputs.query_start = query_start;
        inputs.seq_lens = seq_lens;
        inputs.block_tables = &mut tables;
        inputs.sample_index = sample_index;
        inputs.sample_rows = sample_rows;
        inputs.row_handles = &mut handles;
        scheduler.prepare_inputs(&mut inputs).unwrap();
        if is_async {
            assert!(scheduler.update_async(step_id).unwrap());
            scheduler.resolve_tokens(step_id, &tokens).unwrap();
        } else {
            scheduler.update(step_id, results).unwrap();
        }
    };
    // Prompts, then the first decode; tables have grown to 33 blocks, token lists to twice 520.
    (0..10).for_each(|_| step());
    let before = NUM_ALLOCATIONS.get();
    (0..300).for_each(|_| step());
    NUM_ALLOCATIONS.get() - before
}
