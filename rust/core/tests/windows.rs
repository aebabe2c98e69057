//! Window blocks: how many a sequence has, what is copied and moved, and what is refused.

#![allow(clippy::unwrap_used, missing_docs)]

mod common;

use common::{Limits, Output, add, add_wide, assert_all_returned, one_each, update};
use pagedserve_core::config::{CacheConfig, KvGroup, SchedulerConfig};
use pagedserve_core::scheduler::Scheduler;
use pagedserve_core::sequence::SeqHandle;

/// Limits with a window of `window` tokens and as few blocks for it as may be.
fn with_window(
    window: usize,
    change: impl FnOnce(&mut CacheConfig, &mut SchedulerConfig),
) -> Limits {
    with_group(KvGroup::window(window, 0), change)
}

/// Limits with a group and as few blocks for it as may be.
fn with_group(
    mut group: KvGroup,
    change: impl FnOnce(&mut CacheConfig, &mut SchedulerConfig),
) -> Limits {
    Limits::with(|cache, scheduler| {
        change(cache, scheduler);
        group.num_gpu_blocks =
            scheduler.num_group_blocks(group.kind, scheduler.max_num_seqs, cache.block_size);
        group.num_cpu_blocks = 64;
        cache.groups = vec![group];
    })
}

fn num_window_blocks(scheduler: &Scheduler, seq: SeqHandle) -> usize {
    scheduler.sequence(seq).unwrap().tables[0].blocks().len()
}

/// Runs a step and continues every sampled row; window blocks of `seq` while it runs and after.
fn step(scheduler: &mut Scheduler, seq: SeqHandle) -> (usize, usize) {
    let step_id = scheduler.schedule(0.0).unwrap().step_id;
    let in_step = num_window_blocks(scheduler, seq);
    let outputs = one_each(scheduler, 7);
    update(scheduler, step_id, &outputs).unwrap();
    scheduler.check().unwrap();
    (in_step, num_window_blocks(scheduler, seq))
}

/// The bytes of a sequence of 8192 tokens in Gemma 3 270M in bfloat16: 3 of 18 layers see
/// everything, 15 a window of 512, and a token takes 1 KiB a layer.
#[test]
fn a_long_prompt_in_chunks_never_has_more_than_its_window_and_a_chunk() {
    for (chunk, most_megabytes) in [(256, 37.0), (512, 40.9)] {
        let limits = with_window(512, |cache, scheduler| {
            *cache = CacheConfig::new(16, 600);
            *scheduler = SchedulerConfig::new(4, chunk, 8200);
            scheduler.enable_chunked_prefill = true;
        });
        let mut scheduler = limits.scheduler();
        let (group, seq) = add(&mut scheduler, 1, 8192);
        let mut most = 0;
        while scheduler.sequence(seq).unwrap().len() == 8192 {
            let (in_step, after) = step(&mut scheduler, seq);
            assert!(after <= 512 / 16, "{after} blocks lie before the window");
            most = most.max(in_step);
        }
        let full = scheduler.sequence(seq).unwrap().table.blocks().len();
        let bytes = (full * 3 + most * 15) * 16 * 1024;
        let megabytes = f64::from(u32::try_from(bytes).unwrap()) / 1e6;
        assert!(megabytes <= most_megabytes, "{megabytes} MB with chunks of {chunk}");
        scheduler.abort(group);
        assert_all_returned(&scheduler);
    }
}

/// Runs a prompt of 50 tokens in chunks and continues to 100, in blocks of 4; after each step the
/// blocks of the group are those with a token that the next query sees.
fn assert_keeps_what_is_seen(group: KvGroup, sees: impl Fn(usize, usize) -> bool) {
    let limits = with_group(group, |cache, scheduler| {
        *cache = CacheConfig::new(4, 60);
        *scheduler = SchedulerConfig::new(4, 14, 128);
        scheduler.enable_chunked_prefill = true;
    });
    let mut scheduler = limits.scheduler();
    let (group, seq) = add(&mut scheduler, 1, 50);
    let mut blocks_before = std::collections::BTreeMap::new();
    while scheduler.sequence(seq).unwrap().len() < 100 {
        step(&mut scheduler, seq);
        let entry = scheduler.sequence(seq).unwrap();
        let next = entry.num_computed_tokens;
        let runs = entry.tables[0].runs().into_iter();
        let blocks: std::collections::BTreeMap<usize, _> =
            runs.flat_map(|(first, blocks)| (first..).zip(blocks.iter().copied())).collect();
        let is_seen = |index: &usize| (index * 4..index * 4 + 4).any(|key| sees(next, key));
        assert!((0..next.div_ceil(4)).filter(is_seen).eq(blocks.keys().copied()), "at {next}");
        for (index, block) in &blocks {
            assert_eq!(blocks_before.get(index).unwrap_or(block), block, "it has the same keys");
        }
        blocks_before = blocks;
    }
    scheduler.abort(group);
    assert_all_returned(&scheduler);
}

#[test]
fn the_first_tokens_stay_beside_the_window() {
    for (window, num_sink_tokens) in [(8, 0), (8, 4), (8, 6), (1, 1), (5, 200)] {
        let group = KvGroup::window_with_sinks(window, num_sink_tokens, 0);
        assert_keeps_what_is_seen(group, |query, key| {
            key < num_sink_tokens || query < key + window
        });
    }
}

#[test]
fn a_chunk_is_kept_to_its_end() {
    for chunk in [1, 4, 6, 16, 40, 200] {
        assert_keeps_what_is_seen(KvGroup::chunked(chunk, 0), |query, key| {
            key / chunk >= query / chunk
        });
    }
}

#[test]
fn a_prefix_counts_where_its_chunk_is_cached() {
    let limits = with_group(KvGroup::chunked(16, 0), |cache, scheduler| {
        *cache = CacheConfig::new(4, 60).with(|cache| cache.enable_prefix_caching = true);
        *scheduler = SchedulerConfig::new(4, 64, 64);
    });
    let mut scheduler = limits.scheduler();
    assert_eq!(num_found(&mut scheduler, 1, 40), 0);
    assert_eq!(num_found(&mut scheduler, 1, 40), 36);
    assert_eq!(num_found(&mut scheduler, 1, 35), 32, "nothing is seen where a chunk begins");
    assert_eq!(num_found(&mut scheduler, 1, 19), 16);
    assert_all_returned(&scheduler);
}

#[test]
fn forks_share_the_first_tokens_when_others_have_passed() {
    let group = KvGroup::window_with_sinks(8, 6, 0);
    let limits = with_group(group, |cache, _| cache.block_size = 4);
    let mut scheduler = limits.scheduler();
    add_wide(&mut scheduler, 1, 30, 3);
    let step_id = scheduler.schedule(0.0).unwrap().step_id;
    let children: Vec<Output> =
        (1..4).map(|token| Output { row: 0, token, finish: false }).collect();
    update(&mut scheduler, step_id, &children).unwrap();
    let outputs = scheduler.schedule(0.0).unwrap().clone();
    scheduler.check().unwrap();
    let table = |index: usize| &scheduler.sequence(outputs.rows[index].seq).unwrap().tables[0];
    assert_eq!(table(0).passed(), 2..5, "of 30 tokens those from 8 to 19");
    let places = |index: usize| table(index).blocks().to_vec();
    for other in 1..3 {
        let is_shared: Vec<bool> =
            places(0).iter().zip(places(other)).map(|(a, b)| *a == b).collect();
        // The first two, those of the window, and the one that is written.
        assert_eq!(is_shared, [true, true, true, true, false]);
    }
    assert_eq!(outputs.moves[1].copy.len(), 2);
}

#[test]
fn forks_copy_the_block_that_they_write_and_share_those_before() {
    let limits = with_window(8, |cache, _| cache.block_size = 4);
    let mut scheduler = limits.scheduler();
    add_wide(&mut scheduler, 1, 6, 3);
    let step_id = scheduler.schedule(0.0).unwrap().step_id;
    let children: Vec<Output> =
        (1..4).map(|token| Output { row: 0, token, finish: false }).collect();
    update(&mut scheduler, step_id, &children).unwrap();
    let outputs = scheduler.schedule(0.0).unwrap().clone();
    scheduler.check().unwrap();
    assert_eq!(outputs.moves[1].copy.len(), 2, "the last keeps the block");
    assert!(outputs.has_moves());
    let blocks = |index: usize| {
        let seq = scheduler.sequence(outputs.rows[index].seq).unwrap();
        seq.tables[0].blocks().to_vec()
    };
    assert_eq!(blocks(0)[0], blocks(1)[0]);
    assert_ne!(blocks(0)[1], blocks(1)[1]);
}

#[test]
fn too_few_blocks_are_refused_with_how_many_are_needed() {
    let mut limits = with_window(8, |_, _| {});
    let kind = limits.cache.groups[0].kind;
    let least = limits.scheduler.num_group_blocks(kind, 1, limits.cache.block_size);
    limits.cache.groups[0].num_gpu_blocks = least - 1;
    let refusal = Scheduler::new(limits.scheduler, &limits.cache).unwrap_err().to_string();
    assert!(refusal.contains(&format!("need {least}")), "{refusal}");
}

#[test]
fn who_finds_no_window_block_waits_or_gives_way_and_all_end() {
    let mut limits = with_window(8, |cache, scheduler| {
        *cache = CacheConfig::new(4, 200);
        *scheduler = SchedulerConfig::new(4, 32, 60);
        scheduler.enable_chunked_prefill = true;
    });
    let kind = limits.cache.groups[0].kind;
    let least = limits.scheduler.num_group_blocks(kind, 1, 4);
    limits.cache.groups[0].num_gpu_blocks = least;
    let mut scheduler = limits.scheduler();
    for prompt in 0..4 {
        add(&mut scheduler, prompt, 30);
    }
    let (mut most_running, mut num_preempted) = (0, 0);
    for _ in 0..400 {
        if scheduler.queues().is_empty() {
            break;
        }
        let outputs = scheduler.schedule(0.0).unwrap();
        let step_id = outputs.step_id;
        most_running = most_running.max(outputs.running_queue_size);
        num_preempted += outputs.preempted.len();
        scheduler.check().unwrap();
        let mut results = one_each(&scheduler, 7);
        for result in &mut results {
            let seq = scheduler.outputs().rows[result.row].seq;
            result.finish = scheduler.sequence(seq).unwrap().len() >= 50;
        }
        update(&mut scheduler, step_id, &results).unwrap();
    }
    assert!(most_running > 1, "prompts share the pool");
    assert!(most_running < 4 || num_preempted > 0, "the pool is too small for all four");
    assert_all_returned(&scheduler);
}

/// Blocks of 4, a window of 8, and prefixes that are cached.
fn with_prefixes() -> Scheduler {
    let limits = with_window(8, |cache, scheduler| {
        *cache = CacheConfig::new(4, 60).with(|cache| cache.enable_prefix_caching = true);
        *scheduler = SchedulerConfig::new(4, 64, 64);
    });
    limits.scheduler()
}

/// Runs a prompt to its first token and ends it; returns how many tokens were not computed.
fn num_found(scheduler: &mut Scheduler, first: i32, len: usize) -> usize {
    let (group, seq) = add(scheduler, first, len);
    let step_id = scheduler.schedule(0.0).unwrap().step_id;
    scheduler.check().unwrap();
    let num_found = scheduler.sequence(seq).unwrap().num_computed_tokens;
    assert_eq!(num_found, scheduler.sequence(seq).unwrap().num_cached_tokens);
    let outputs = one_each(scheduler, 7);
    update(scheduler, step_id, &outputs).unwrap();
    scheduler.check().unwrap();
    scheduler.abort(group);
    num_found
}

#[test]
fn a_prefix_counts_where_its_window_is_known() {
    let mut scheduler = with_prefixes();
    assert_eq!(num_found(&mut scheduler, 1, 40), 0);
    assert_eq!(num_found(&mut scheduler, 1, 40), 36, "the last token is computed, and its block");
    assert_eq!(num_found(&mut scheduler, 1, 43), 40);
    assert_eq!(num_found(&mut scheduler, 1, 21), 20, "what has passed is known too");
    assert!(scheduler.reset_prefix_cache());
    assert_eq!(num_found(&mut scheduler, 1, 40), 0);
    assert_all_returned(&scheduler);
}

#[test]
fn a_window_that_is_gone_costs_the_tokens_up_to_one_that_is_there() {
    let mut scheduler = with_prefixes();
    assert_eq!(num_found(&mut scheduler, 1, 40), 0);
    // 10 window blocks of it, and 30 of others: 8 more than the 32 that exist.  All 40 blocks of
    // the layers that see everything stay, and the window blocks of the prompt's start.
    for first in [1000, 2000] {
        assert_eq!(num_found(&mut scheduler, first, 60), 0);
    }
    assert_eq!(num_found(&mut scheduler, 1, 40), 8);
    assert_eq!(num_found(&mut scheduler, 1, 40), 36);
    assert_all_returned(&scheduler);
}
