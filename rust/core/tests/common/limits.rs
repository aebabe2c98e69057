//! Random configurations.

#![allow(clippy::disallowed_types, reason = "proptest shares strategies by Arc")]

use pagedserve_core::config::{
    CacheConfig, KvGroup, KvKind, Policy, PreemptionMode, SchedulerConfig, VictimPolicy,
};
use proptest::prelude::*;

use crate::common::Limits;

fn cache() -> impl Strategy<Value = CacheConfig> {
    let features = prop_oneof![
        2 => Just((false, None)),
        2 => Just((true, None)),
        1 => (1..20usize).prop_map(|window| (false, Some(window))),
    ];
    let flags = any::<[bool; 7]>();
    let groups = prop::collection::vec(group(), 0..4);
    (1..6usize, 4..40usize, 0..30usize, 0.0..0.2f64, features, flags, groups).prop_map(
        |(block_size, num_gpu_blocks, num_cpu_blocks, watermark, features, flags, groups)| {
            CacheConfig::new(block_size, num_gpu_blocks).with(|cache| {
                cache.groups = groups;
                cache.num_cpu_blocks = num_cpu_blocks;
                cache.watermark = watermark;
                (cache.enable_prefix_caching, cache.sliding_window) = features;
                cache.choices.count_cached_blocks = flags[0];
                cache.choices.charge_cached_tokens = flags[1];
                cache.choices.share_partial_blocks = flags[2];
                cache.choices.evict_blank_blocks_in_order = flags[3];
                cache.choices.exact_append_demand = flags[4];
                cache.choices.share_generated_blocks = flags[5];
                cache.choices.swap_in_cached_blocks = flags[6];
            })
        },
    )
}

/// Groups of any kind; `num_gpu_blocks` is a number of sequences, which becomes one of blocks once
/// the limits are known.
fn group() -> impl Strategy<Value = KvGroup> {
    (0..7usize, 1..20usize, 1..9usize, 0..30usize, 1..5usize).prop_map(
        |(kind, window, num_sink_tokens, num_cpu_blocks, num_seqs)| {
            let mut group = match kind {
                0 => KvGroup::state(num_seqs),
                1 => return KvGroup::cross(),
                2 => KvGroup::chunked(window, num_seqs),
                3 | 4 => KvGroup::window_with_sinks(window, num_sink_tokens, num_seqs),
                _ => KvGroup::window(window, num_seqs),
            };
            group.num_cpu_blocks = num_cpu_blocks;
            group
        },
    )
}

fn scheduler() -> impl Strategy<Value = SchedulerConfig> {
    let mode = prop_oneof![
        Just(None),
        Just(Some(PreemptionMode::Recompute)),
        Just(Some(PreemptionMode::Swap))
    ];
    let numbers = (4..12usize, 0..60usize, 0..4usize, 0..4usize, 1..4usize);
    let flags = any::<[bool; 8]>();
    (numbers, mode, flags).prop_map(|(numbers, preemption_mode, flags)| {
        let (max_num_seqs, spare, num_lookahead_slots, max_num_bypasses, max_loras) = numbers;
        SchedulerConfig::new(max_num_seqs, max_num_seqs + spare, 48).with(|config| {
            config.preemption_mode = preemption_mode;
            config.enable_chunked_prefill = flags[0];
            config.policy = if flags[1] { Policy::Priority } else { Policy::Fcfs };
            config.num_lookahead_slots = if flags[2] { num_lookahead_slots } else { 0 };
            config.max_loras = Some(max_loras);
            config.max_num_bypasses = max_num_bypasses;
            config.victim_policy =
                if flags[3] { VictimPolicy::LeastWork } else { VictimPolicy::Last };
            config.choices.admit_after_preemption = flags[4];
            config.choices.reverse_swapped_order = flags[5];
            config.choices.whole_block_chunks = flags[6];
            config.choices.limit_chunked_prompts = true;
            config.choices.drain_adapters = flags[7];
        })
    })
}

/// Any limits that fit each other.
pub fn limits() -> impl Strategy<Value = Limits> {
    (cache(), scheduler()).prop_map(|(mut cache, mut scheduler)| {
        let has = |wanted: fn(KvKind) -> bool| cache.groups.iter().any(|g| wanted(g.kind));
        let (has_states, has_windows) = (
            has(|kind| kind == KvKind::State),
            has(|kind| matches!(kind, KvKind::Window { .. } | KvKind::Chunked(_))),
        );
        if has_states {
            cache.enable_prefix_caching = false;
            scheduler.num_lookahead_slots = 0;
        }
        if has_windows {
            cache.sliding_window = None;
        }
        // The scheduler requires it: a chunk of whole blocks must not be rounded down to nothing.
        if scheduler.choices.whole_block_chunks {
            scheduler.max_num_batched_tokens =
                scheduler.max_num_batched_tokens.next_multiple_of(cache.block_size);
        }
        for group in &mut cache.groups {
            let num_seqs = match group.kind {
                KvKind::State => scheduler.max_num_seqs,
                _ => scheduler.max_num_seqs.min(group.num_gpu_blocks),
            };
            group.num_gpu_blocks =
                scheduler.num_group_blocks(group.kind, num_seqs, cache.block_size);
        }
        Limits { cache, scheduler }
    })
}
