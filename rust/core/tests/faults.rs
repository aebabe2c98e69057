//! The faults of the classic engine: one test each, which fails if the engine has the fault.
//!
//! Numbers `f1` to `f15` are those of docs/faults.md, "observed"; `u2` to `u25` those of "what
//! users suffer from".  The recorded scenarios in which vLLM 0.6.2 shows them are run from
//! `tests/replay`.

#![allow(clippy::unwrap_used, missing_docs)]

mod common;

use common::{Limits, Output, add, add_wide, assert_all_returned, one_each, step, update};
use pagedserve_core::config::{KvGroup, Policy, PreemptionMode};
use pagedserve_core::hash::PrefixKey;
use pagedserve_core::outputs::{IgnoredReason, Refusal};
use pagedserve_core::scheduler::Scheduler;
use pagedserve_core::sequence::{GroupHandle, GroupStats, Request, SeqHandle};

/// One step in which every sampled row gets `width` outputs at its first token and then one.
fn branching_step(scheduler: &mut Scheduler, width: usize, token: i32) -> Vec<SeqHandle> {
    let step_id = scheduler.schedule(0.0).unwrap().step_id;
    scheduler.check().unwrap();
    if scheduler.outputs().is_empty() {
        return Vec::new();
    }
    let mut outputs = Vec::new();
    for output in one_each(scheduler, token) {
        let seq = scheduler.sequence(scheduler.outputs().rows[output.row].seq).unwrap();
        let group = scheduler.store().find_group(seq.group()).unwrap();
        let is_first = group.seqs.len() == 1 && group.num_budgeted_seqs() == width;
        let branches = 0i32..if is_first { i32::try_from(width).unwrap() } else { 1 };
        outputs.extend(branches.map(|branch| Output { token: token + branch, ..output }));
    }
    let handles = update(scheduler, step_id, &outputs).unwrap();
    scheduler.check().unwrap();
    handles
}

fn len_of(scheduler: &Scheduler, group: GroupHandle) -> usize {
    let seq = scheduler.store().find_group(group).unwrap().seqs[0];
    scheduler.sequence(seq).unwrap().len()
}

fn scheduled(scheduler: &Scheduler) -> Vec<GroupHandle> {
    scheduler.outputs().scheduled_seq_groups.iter().map(|scheduled| scheduled.group).collect()
}

#[test]
fn f1_a_half_prefilled_group_that_was_swapped_out_comes_back_in_chunks() {
    let limits = Limits::with(|cache, scheduler| {
        (cache.num_gpu_blocks, cache.num_cpu_blocks) = (13, 64);
        scheduler.enable_chunked_prefill = true;
        scheduler.max_num_batched_tokens = 10;
        scheduler.preemption_mode = Some(PreemptionMode::Swap);
    });
    let mut scheduler = limits.scheduler();
    let (old, _) = add(&mut scheduler, 0, 9);
    step(&mut scheduler, 1);
    let (wide, _) = add_wide(&mut scheduler, 50, 40, 2);
    while scheduler.stats().num_swap_preemptions == 0 {
        step(&mut scheduler, 1);
    }
    assert_eq!(scheduler.queues().swapped, [wide]);
    let left = 40
        - scheduler
            .sequence(scheduler.store().find_group(wide).unwrap().seqs[0])
            .unwrap()
            .num_computed_tokens;
    assert!(left > 10, "more is left than a step can hold: {left}");
    scheduler.abort(old);
    for _ in 0..6 {
        step(&mut scheduler, 1);
    }
    assert_eq!(scheduler.queues().running, [wide]);
    assert!(len_of(&scheduler, wide) > 40, "it has finished its prompt");
}

#[test]
fn f2_without_swap_space_a_group_is_recomputed_and_the_engine_goes_on() {
    let limits = Limits::with(|cache, scheduler| {
        (cache.num_gpu_blocks, cache.num_cpu_blocks) = (8, 1);
        scheduler.preemption_mode = Some(PreemptionMode::Swap);
    });
    let mut scheduler = limits.scheduler();
    let (old, _) = add(&mut scheduler, 0, 10);
    let (young, _) = add_wide(&mut scheduler, 9, 10, 2);
    while scheduler.outputs().preempted.is_empty() {
        branching_step(&mut scheduler, 2, 1);
    }
    assert_eq!(scheduler.outputs().preempted, [(young, PreemptionMode::Recompute)]);
    assert!(scheduled(&scheduler).contains(&old));
}

#[test]
fn f3_after_siblings_have_finished_a_recompute_leaks_nothing_and_is_a_prefill() {
    for parent_lives in [true, false] {
        let limits = Limits::with(|cache, _| cache.num_gpu_blocks = 12);
        let mut scheduler = limits.scheduler();
        let (old, _) = add(&mut scheduler, 0, 8);
        step(&mut scheduler, 1);
        let (group, _) = add_wide(&mut scheduler, 30, 9, 4);
        branching_step(&mut scheduler, 4, 1);
        // Three of four finish: all but the first or all but the last of the group.
        let step_id = scheduler.schedule(0.0).unwrap().step_id;
        let mut outputs = one_each(&scheduler, 7);
        let rows: Vec<usize> = outputs.iter().map(|output| output.row).collect();
        let kept = if parent_lives { rows[rows.len() - 1] } else { rows[1] };
        for output in &mut outputs {
            let seq = scheduler.outputs().rows[output.row].seq;
            let is_of_group = scheduler.sequence(seq).unwrap().group() == group;
            output.finish = is_of_group && output.row != kept;
        }
        update(&mut scheduler, step_id, &outputs).unwrap();
        scheduler.check().unwrap();
        while scheduler.stats().num_recompute_preemptions == 0 {
            step(&mut scheduler, 1);
        }
        let used = scheduler.space().gpu().num_used();
        assert_eq!(
            used,
            (len_of(&scheduler, old) - 1).div_ceil(4),
            "only the old one holds blocks"
        );
        scheduler.abort(old);
        scheduler.schedule(0.0).unwrap();
        assert_eq!(scheduler.outputs().num_prefill_groups, 1);
        assert_eq!(scheduler.outputs().rows.len(), 1, "the living sequence alone");
        assert_eq!(scheduler.outputs().moves[0].copy, []);
    }
}

#[test]
fn f4_a_forked_group_under_a_sliding_window_swaps_without_a_double_free() {
    let limits = Limits::with(|cache, _| {
        (cache.num_gpu_blocks, cache.num_cpu_blocks) = (8, 20);
        cache.sliding_window = Some(8);
    });
    let mut scheduler = limits.scheduler();
    for first in [0, 20, 40] {
        add_wide(&mut scheduler, first, 11, 2);
    }
    while scheduler.stats().num_swap_preemptions == 0 {
        branching_step(&mut scheduler, 2, 1);
    }
    for _ in 0..10 {
        branching_step(&mut scheduler, 2, 1);
    }
    for group in scheduler.store().groups().map(|(group, _)| group).collect::<Vec<_>>() {
        scheduler.abort(group);
    }
    assert_all_returned(&scheduler);
}

#[test]
fn f5_a_group_that_could_never_be_swapped_back_is_not_swapped_out() {
    let limits = Limits::with(|cache, scheduler| {
        (cache.num_gpu_blocks, cache.num_cpu_blocks) = (5, 40);
        scheduler.preemption_mode = Some(PreemptionMode::Swap);
    });
    let mut scheduler = limits.scheduler();
    let (wide, _) = add_wide(&mut scheduler, 0, 8, 4);
    branching_step(&mut scheduler, 4, 1);
    add(&mut scheduler, 40, 1);
    for _ in 0..40 {
        branching_step(&mut scheduler, 4, 1);
        assert!(
            !scheduler.queues().swapped.contains(&wide),
            "2 blocks and 4 slots never fit into 5"
        );
    }
    assert!(scheduler.store().find_group(wide).is_err(), "ended with a reason, nothing leaked");
}

#[test]
fn f6_a_request_that_outgrows_memory_is_ended_at_once_with_what_it_has() {
    let mut scheduler = Limits::with(|cache, _| cache.num_gpu_blocks = 3).scheduler();
    let (big, _) = add(&mut scheduler, 0, 12);
    step(&mut scheduler, 1);
    step(&mut scheduler, 1);
    let reason = IgnoredReason::OutgrewCache { limit: 3 };
    assert_eq!(scheduler.outputs().ignored_seq_groups, [(big, reason, GroupStats::default())]);
    assert_eq!(scheduler.outputs().preempted, [], "it is not preempted first");
}

#[test]
fn f7_prefills_come_first_whatever_the_adapters() {
    let limits = Limits::with(|_, scheduler| {
        scheduler.enable_chunked_prefill = true;
        scheduler.max_num_batched_tokens = 12;
        scheduler.max_loras = Some(2);
    });
    let mut scheduler = limits.scheduler();
    let prompt: Vec<i32> = (0..9).collect();
    for adapter in [2, 0, 1, 2, 0] {
        let key = PrefixKey { adapter, salt: 0 };
        let request = Request::new(&prompt, 0.0).with(|request| request.key = key);
        scheduler.add_seq_group(&request).unwrap();
    }
    for _ in 0..8 {
        step(&mut scheduler, 1);
        let outputs = scheduler.outputs();
        let is_prefill = outputs.scheduled_seq_groups.iter().map(|group| group.is_prefill);
        assert!(is_prefill.clone().rev().is_sorted(), "{outputs:?}");
        assert_eq!(outputs.num_prefill_groups, is_prefill.filter(|prefill| *prefill).count());
    }
}

#[test]
fn f8_identical_prompts_never_copy_a_block_onto_itself() {
    for share_partial_blocks in [false, true] {
        let limits = Limits::with(|cache, scheduler| {
            cache.enable_prefix_caching = true;
            cache.choices.share_partial_blocks = share_partial_blocks;
            scheduler.enable_chunked_prefill = true;
            scheduler.max_num_batched_tokens = 8;
        });
        let mut scheduler = limits.scheduler();
        for _ in 0..4 {
            add_wide(&mut scheduler, 0, 14, 2);
        }
        for _ in 0..30 {
            branching_step(&mut scheduler, 2, 1); // the checker looks at every copy
        }
        assert_eq!(scheduler.queues().running.len(), 4);
    }
}

#[test]
fn f9_forced_recompute_takes_groups_of_several_sequences_too() {
    let limits = Limits::with(|cache, scheduler| {
        cache.num_gpu_blocks = 10;
        scheduler.preemption_mode = Some(PreemptionMode::Recompute);
    });
    let mut scheduler = limits.scheduler();
    for first in [0, 20, 40] {
        add_wide(&mut scheduler, first, 8, 2);
    }
    while scheduler.stats().num_recompute_preemptions == 0 {
        branching_step(&mut scheduler, 2, 1);
    }
    let (preempted, _) = scheduler.outputs().preempted[0];
    assert_eq!(scheduler.store().find_group(preempted).unwrap().seqs.len(), 2);
}

#[test]
fn f10_cached_tokens_cost_no_budget_and_shared_blocks_no_memory() {
    let limits = Limits::with(|cache, scheduler| {
        cache.num_gpu_blocks = 12;
        cache.enable_prefix_caching = true;
        scheduler.max_num_batched_tokens = 64;
    });
    let mut scheduler = limits.scheduler();
    add(&mut scheduler, 0, 41);
    step(&mut scheduler, 1);
    // 41 more tokens are 11 blocks, of which 10 are held and 1 is free.
    let (again, _) = add(&mut scheduler, 0, 41);
    step(&mut scheduler, 1);
    assert_eq!(scheduled(&scheduler), [again]);
    assert_eq!(scheduler.outputs().num_batched_tokens, 1);
}

#[test]
fn f11_a_victim_gives_back_its_own_sequences_and_adapter() {
    let limits = Limits::with(|cache, scheduler| {
        cache.num_gpu_blocks = 8;
        scheduler.enable_chunked_prefill = true;
        scheduler.choices.admit_after_preemption = true;
        scheduler.max_num_seqs = 2;
        scheduler.max_loras = Some(1);
    });
    let mut scheduler = limits.scheduler();
    let prompt: Vec<i32> = (0..16).collect();
    let add = |scheduler: &mut Scheduler, len: usize, adapter| {
        let key = PrefixKey { adapter, salt: 0 };
        let request = Request::new(&prompt[..len], 0.0).with(|request| request.key = key);
        scheduler.add_seq_group(&request).unwrap().0
    };
    let old = add(&mut scheduler, 16, 0);
    let victim = add(&mut scheduler, 16, 1);
    step(&mut scheduler, 1);
    let small = add(&mut scheduler, 3, 2);
    step(&mut scheduler, 1);
    assert_eq!(scheduler.outputs().preempted, [(victim, PreemptionMode::Recompute)]);
    assert_eq!(scheduled(&scheduler), [small, old], "its adapter's slot and its place are free");
}

#[test]
fn f12_evicting_goes_by_age_and_from_the_end_of_a_prefix() {
    let limits = Limits::with(|cache, _| {
        cache.num_gpu_blocks = 8;
        cache.enable_prefix_caching = true;
    });
    let mut scheduler = limits.scheduler();
    for first in [0, 100] {
        let (group, _) = add(&mut scheduler, first, 16);
        step(&mut scheduler, 1);
        scheduler.abort(group);
    }
    let (group, _) = add(&mut scheduler, 200, 8); // takes 2 of the 4 blocks of the oldest
    step(&mut scheduler, 1);
    scheduler.abort(group);
    for (first, num_uncached) in [(100, 1), (0, 8)] {
        let (group, _) = add(&mut scheduler, first, 16);
        step(&mut scheduler, 1);
        assert_eq!(scheduler.outputs().num_batched_tokens, num_uncached, "prompt {first}");
        scheduler.abort(group);
    }
}

#[test]
fn f13_u6_a_head_that_does_not_fit_is_passed_but_not_for_ever() {
    let limits = Limits::with(|cache, scheduler| {
        cache.num_gpu_blocks = 12;
        scheduler.max_num_bypasses = 2;
    });
    let mut scheduler = limits.scheduler();
    add(&mut scheduler, 0, 16);
    step(&mut scheduler, 1);
    let (big, _) = add(&mut scheduler, 0, 40);
    let small: Vec<GroupHandle> = (0..4).map(|_| add(&mut scheduler, 0, 2).0).collect();
    step(&mut scheduler, 1);
    assert_eq!(scheduled(&scheduler), small[..2]);
    assert_eq!(scheduler.outputs().refused, [(big, Refusal::NoBlocks)]);
    assert_eq!(scheduler.queues().waiting[0], big, "it keeps its place");
    step(&mut scheduler, 1);
    assert_eq!(scheduler.queues().waiting.len(), 3, "no group passes it any more");
}

#[test]
fn f13_a_swapped_group_does_not_stop_all_admission() {
    let limits = Limits::with(|cache, scheduler| {
        (cache.num_gpu_blocks, cache.num_cpu_blocks) = (10, 20);
        scheduler.preemption_mode = Some(PreemptionMode::Swap);
        scheduler.max_num_bypasses = 1;
    });
    let mut scheduler = limits.scheduler();
    add(&mut scheduler, 0, 16);
    let (young, _) = add(&mut scheduler, 30, 20);
    while scheduler.queues().swapped.is_empty() {
        step(&mut scheduler, 1);
    }
    assert_eq!(scheduler.queues().swapped, [young]);
    let (first, _) = add(&mut scheduler, 0, 2);
    let (second, _) = add(&mut scheduler, 0, 2);
    step(&mut scheduler, 1);
    assert_eq!(scheduled(&scheduler)[0], first);
    step(&mut scheduler, 1);
    assert!(!scheduled(&scheduler).contains(&second), "only a limited number of times");
}

#[test]
fn f14_groups_swapped_out_in_one_step_come_back_in_their_old_order() {
    let limits = Limits::with(|cache, scheduler| {
        (cache.num_gpu_blocks, cache.num_cpu_blocks) = (9, 20);
        scheduler.preemption_mode = Some(PreemptionMode::Swap);
    });
    let mut scheduler = limits.scheduler();
    let (_, old) = add_wide(&mut scheduler, 0, 12, 4);
    let younger: Vec<GroupHandle> = (0..6).map(|_| add(&mut scheduler, 30, 1).0).collect();
    let _ = old;
    let step_id = scheduler.schedule(0.0).unwrap().step_id;
    let mut outputs = one_each(&scheduler, 1);
    let parent = outputs[0];
    outputs.splice(0..1, [parent; 4]);
    let outputs: Vec<Output> = outputs;
    let is_wide = scheduler.queues().running.len() > 3;
    update(&mut scheduler, step_id, &outputs).unwrap();
    assert!(is_wide);
    while scheduler.outputs().preempted.len() < 2 {
        step(&mut scheduler, 1);
    }
    let swapped = &scheduler.queues().swapped;
    let order = younger.iter().filter(|group| swapped.contains(group));
    assert!(swapped.iter().eq(order), "{swapped:?} of {younger:?}");
}

#[test]
fn u2_a_wide_group_under_pressure_always_makes_progress() {
    let limits = Limits::with(|cache, scheduler| {
        (cache.num_gpu_blocks, cache.num_cpu_blocks) = (140, 140);
        (scheduler.max_num_seqs, scheduler.max_num_batched_tokens) = (130, 256);
    });
    let mut scheduler = limits.scheduler();
    let (wide, _) = add_wide(&mut scheduler, 0, 7, 125);
    add(&mut scheduler, 50, 20);
    for _ in 0..30 {
        let before = scheduler.stats();
        branching_step(&mut scheduler, 125, 1);
        let outputs = scheduler.outputs();
        let resolved = scheduler.stats() != before || !outputs.ignored_seq_groups.is_empty();
        assert!(!outputs.rows.is_empty() || resolved || scheduler.queues().is_empty());
    }
    assert!(scheduler.store().find_group(wide).is_err() || len_of(&scheduler, wide) > 8);
}

#[test]
fn u3_a_prompt_that_fits_the_model_but_not_the_pool_ends_and_others_run() {
    let mut scheduler = Limits::with(|cache, _| cache.num_gpu_blocks = 8).scheduler();
    let (big, _) = add(&mut scheduler, 0, 40);
    let (small, _) = add(&mut scheduler, 0, 4);
    step(&mut scheduler, 1);
    assert_eq!(scheduler.outputs().ignored_seq_groups[0].0, big);
    assert_eq!(scheduled(&scheduler), [small]);
}

#[test]
fn u4_u24_a_chunked_prompt_is_admitted_whole_and_preemption_does_not_flap() {
    let limits = Limits::with(|cache, scheduler| {
        cache.num_gpu_blocks = 12;
        scheduler.enable_chunked_prefill = true;
        scheduler.max_num_batched_tokens = 8;
    });
    let mut scheduler = limits.scheduler();
    let (old, _) = add(&mut scheduler, 0, 20);
    for _ in 0..4 {
        step(&mut scheduler, 1);
    }
    let (long, _) = add(&mut scheduler, 0, 40);
    for _ in 0..10 {
        step(&mut scheduler, 1);
        assert!(!scheduled(&scheduler).contains(&long), "its 10 blocks are not free");
    }
    assert_eq!(
        scheduler.stats().num_recompute_preemptions,
        0,
        "no group is admitted to be preempted"
    );
    scheduler.abort(old);
    for _ in 0..5 {
        step(&mut scheduler, 1);
    }
    assert!(len_of(&scheduler, long) > 40, "with free blocks it runs at full speed at once");
}

#[test]
fn u9_preemption_by_priority_takes_the_least_urgent_and_loses_nothing() {
    let limits = Limits::with(|cache, scheduler| {
        cache.num_gpu_blocks = 8;
        scheduler.policy = Policy::Priority;
    });
    for enable_chunked_prefill in [false, true] {
        let mut limits = limits.clone();
        limits.scheduler.enable_chunked_prefill = enable_chunked_prefill;
        let mut scheduler = limits.scheduler();
        let prompt: Vec<i32> = (0..14).collect();
        let add = |scheduler: &mut Scheduler, priority| {
            let request = Request::new(&prompt, 0.0).with(|request| request.priority = priority);
            scheduler.add_seq_group(&request).unwrap().0
        };
        let relaxed = add(&mut scheduler, 9);
        let normal = add(&mut scheduler, 5);
        step(&mut scheduler, 1);
        let urgent = add(&mut scheduler, 1);
        step(&mut scheduler, 1);
        assert_eq!(scheduler.outputs().preempted, [(relaxed, PreemptionMode::Recompute)]);
        step(&mut scheduler, 1);
        assert!(scheduler.queues().running.contains(&urgent));
        assert!(scheduler.queues().running.contains(&normal));
        assert_eq!(len_of(&scheduler, relaxed), 15);
    }
}

#[test]
fn u20_results_for_a_group_aborted_in_the_step_are_taken_and_dropped() {
    let mut scheduler = Limits::default().scheduler();
    let (gone, seq) = add(&mut scheduler, 0, 5);
    let (stays, _) = add(&mut scheduler, 0, 5);
    let step_id = scheduler.schedule(0.0).unwrap().step_id;
    scheduler.abort(gone);
    let outputs = one_each(&scheduler, 1);
    assert_eq!(update(&mut scheduler, step_id, &outputs).unwrap()[0], seq);
    assert!(scheduler.sequence(seq).is_err());
    step(&mut scheduler, 1);
    assert_eq!(scheduled(&scheduler), [stays]);
}

#[test]
fn u23_u25_when_the_pool_is_empty_steps_end_and_everybody_finishes_in_turn() {
    let mut scheduler = Limits::with(|cache, _| cache.num_gpu_blocks = 6).scheduler();
    for _ in 0..8 {
        add(&mut scheduler, 0, 7);
    }
    let mut num_steps = 0;
    while !scheduler.queues().is_empty() {
        let step_id = scheduler.schedule(0.0).unwrap().step_id;
        scheduler.check().unwrap();
        let mut outputs = one_each(&scheduler, 1);
        for output in &mut outputs {
            let seq = scheduler.outputs().rows[output.row].seq;
            output.finish = scheduler.sequence(seq).unwrap().len() >= 18;
        }
        if !scheduler.outputs().is_empty() {
            update(&mut scheduler, step_id, &outputs).unwrap();
        }
        num_steps += 1;
        assert!(num_steps < 400, "{:?}", scheduler.queues());
    }
    assert_all_returned(&scheduler);
}

#[test]
fn u10_a_swapped_group_does_not_hold_up_a_more_urgent_one() {
    let limits = Limits::with(|cache, scheduler| {
        (cache.num_gpu_blocks, cache.num_cpu_blocks) = (8, 20);
        scheduler.policy = Policy::Priority;
        scheduler.preemption_mode = Some(PreemptionMode::Swap);
    });
    let mut scheduler = limits.scheduler();
    let prompt: Vec<i32> = (0..14).collect();
    let add = |scheduler: &mut Scheduler, priority| {
        let request = Request::new(&prompt, 0.0).with(|request| request.priority = priority);
        scheduler.add_seq_group(&request).unwrap().0
    };
    let relaxed = add(&mut scheduler, 9);
    add(&mut scheduler, 5);
    step(&mut scheduler, 1);
    let urgent = add(&mut scheduler, 1);
    step(&mut scheduler, 1);
    assert_eq!(scheduler.queues().swapped, [relaxed]);
    step(&mut scheduler, 1);
    assert_eq!(scheduled(&scheduler), [urgent]);
}

#[test]
fn prefixes_are_not_shared_between_requests_whose_encoders_may_differ() {
    let limits = Limits::with(|cache, _| {
        cache.enable_prefix_caching = true;
        cache.groups = vec![KvGroup::cross()];
    });
    let mut scheduler = limits.scheduler();
    let prompt: Vec<i32> = (0..13).collect();
    let request = |salt| {
        Request::new(&prompt, 0.0).with(|request| {
            request.num_encoder_tokens = 4;
            request.key = PrefixKey { adapter: 0, salt };
        })
    };
    let refusal = scheduler.add_seq_group(&request(0)).unwrap_err().to_string();
    assert!(refusal.contains("num_encoder_tokens"), "{refusal}");
    let cached_of = |scheduler: &mut Scheduler, salt| {
        let (group, _) = scheduler.add_seq_group(&request(salt)).unwrap();
        step(scheduler, 1);
        scheduler.group_stats(group).unwrap().num_cached_tokens
    };
    assert_eq!(cached_of(&mut scheduler, 7), 0, "no request had it before");
    assert_eq!(cached_of(&mut scheduler, 7), 12, "the same encoder's input");
    assert_eq!(cached_of(&mut scheduler, 8), 0, "another one");
    let mut without = Limits::with(|cache, _| cache.groups = vec![KvGroup::cross()]).scheduler();
    without.add_seq_group(&request(0)).unwrap();
    let refusal = Limits::default().scheduler().add_seq_group(&request(0)).unwrap_err();
    assert!(refusal.to_string().contains("no KV group of cross attention"), "{refusal}");
}

#[test]
fn a_reset_of_the_prefix_cache_that_is_refused_drops_nothing() {
    let mut scheduler = Limits::with(|cache, scheduler| {
        (cache.block_size, cache.num_gpu_blocks, cache.num_cpu_blocks) = (4, 6, 64);
        cache.enable_prefix_caching = true;
        scheduler.preemption_mode = Some(PreemptionMode::Swap);
    })
    .scheduler();
    let (first, _) = add(&mut scheduler, 20, 12);
    add(&mut scheduler, 1, 8);
    step(&mut scheduler, 1);
    while scheduler.queues().swapped.is_empty() {
        step(&mut scheduler, 1);
    }
    scheduler.abort(first).unwrap();
    assert_eq!(scheduler.space().gpu().num_used(), 0, "all that lives is on the host");
    assert!(!scheduler.reset_prefix_cache());
    let (again, _) = add(&mut scheduler, 20, 12);
    step(&mut scheduler, 1);
    step(&mut scheduler, 1);
    assert!(scheduler.group_stats(again).unwrap().num_cached_tokens > 0);
}
