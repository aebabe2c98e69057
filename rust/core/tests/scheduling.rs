//! Behaviour that a user of the scheduler sees: order, limits, preemption, ends with a reason.

#![allow(clippy::unwrap_used, missing_docs)]

mod common;

use common::{Limits, Output, add, add_wide, assert_all_returned, one_each, step, update};
use pagedserve_core::config::{KvGroup, Policy, PreemptionMode, SchedulerConfig};
use pagedserve_core::error::Error;
use pagedserve_core::outputs::{IgnoredReason, PromptRefusal, Row};
use pagedserve_core::scheduler::{SampledOutputs, Scheduler};
use pagedserve_core::sequence::{GroupHandle, GroupStats, Request, SeqHandle};

fn scheduled(scheduler: &Scheduler) -> Vec<(GroupHandle, usize)> {
    let groups = scheduler.outputs().scheduled_seq_groups.iter();
    groups.map(|scheduled| (scheduled.group, scheduled.token_chunk_size)).collect()
}

#[test]
fn prompts_run_first_and_first_come_first_served() {
    let mut scheduler = Limits::with(|_, scheduler| {
        scheduler.max_num_batched_tokens = 20;
    })
    .scheduler();
    let (a, _) = add(&mut scheduler, 0, 8);
    let (b, _) = add(&mut scheduler, 0, 9);
    let (c, _) = add(&mut scheduler, 0, 7);
    step(&mut scheduler, 1);
    assert_eq!(scheduled(&scheduler), [(a, 8), (b, 9)], "the third does not fit into the budget");
    step(&mut scheduler, 1);
    assert_eq!(scheduled(&scheduler), [(c, 7)], "a prompt goes before those that decode");
    step(&mut scheduler, 1);
    assert_eq!(scheduled(&scheduler), [(a, 1), (b, 1), (c, 1)]);
    assert_eq!(scheduler.outputs().num_prefill_groups, 0);
}

#[test]
fn the_head_of_the_queue_is_not_overtaken() {
    let mut scheduler = Limits::with(|_, scheduler| {
        scheduler.max_num_batched_tokens = 20;
    })
    .scheduler();
    add(&mut scheduler, 0, 12);
    let (big, _) = add(&mut scheduler, 0, 9);
    add(&mut scheduler, 0, 1);
    step(&mut scheduler, 1);
    assert_eq!(scheduled(&scheduler).len(), 1);
    step(&mut scheduler, 1);
    assert_eq!(scheduled(&scheduler)[0].0, big);
}

#[test]
fn encoders_of_a_step_take_no_more_tokens_than_its_prompts_may_or_it_is_one() {
    let mut scheduler = Limits::with(|cache, scheduler| {
        cache.groups = vec![KvGroup::cross()];
        scheduler.max_num_batched_tokens = 20;
        scheduler.enable_chunked_prefill = true;
    })
    .scheduler();
    let mut adding = |num_encoder_tokens| {
        let mut request = Request::new(&[1, 2], 0.0);
        request.num_encoder_tokens = num_encoder_tokens;
        scheduler.add_seq_group(&request).unwrap().0
    };
    let [a, b, long, c, d] = [12, 8, 24, 1, 0].map(&mut adding);
    step(&mut scheduler, 1);
    assert_eq!(scheduled(&scheduler), [(a, 2), (b, 2)], "two fit together");
    step(&mut scheduler, 1);
    assert_eq!(scheduled(&scheduler), [(long, 2), (a, 1), (b, 1)], "one that fits in no step");
    step(&mut scheduler, 1);
    assert_eq!(scheduled(&scheduler), [(c, 2), (d, 2), (a, 1), (b, 1), (long, 1)]);
}

#[test]
fn sequences_that_may_fork_are_counted_before_they_do() {
    let mut scheduler = Limits::with(|_, scheduler| {
        scheduler.max_num_seqs = 8;
    })
    .scheduler();
    add_wide(&mut scheduler, 0, 4, 5);
    add_wide(&mut scheduler, 0, 4, 4);
    add_wide(&mut scheduler, 0, 4, 3);
    step(&mut scheduler, 1);
    assert_eq!(scheduled(&scheduler).len(), 1, "5 + 4 sequences are more than 8");
}

#[test]
fn a_prompt_no_step_can_hold_is_ended_with_its_numbers() {
    let mut scheduler = Limits::with(|_, scheduler| {
        scheduler.max_num_batched_tokens = 20;
    })
    .scheduler();
    let (long, seq) = add(&mut scheduler, 0, 21);
    let (short, _) = add(&mut scheduler, 0, 3);
    step(&mut scheduler, 1);
    let reason = IgnoredReason::PromptTooLong { num_tokens: 21, limit: 20 };
    assert_eq!(scheduler.outputs().ignored_seq_groups, [(long, reason, GroupStats::default())]);
    assert_eq!(scheduled(&scheduler), [(short, 3)]);
    assert!(matches!(scheduler.sequence(seq), Err(Error::StaleHandle { .. })));
}

#[test]
fn a_prompt_no_pool_can_hold_is_ended_and_does_not_block_the_queue() {
    let limits = Limits::with(|cache, _| {
        cache.num_gpu_blocks = 8;
        cache.watermark = 0.13;
    });
    let mut scheduler = limits.scheduler();
    let (big, _) = add(&mut scheduler, 0, 29);
    let (small, _) = add(&mut scheduler, 0, 28);
    step(&mut scheduler, 1);
    let reason = IgnoredReason::NeverFits { num_blocks: 8, limit: 7 };
    assert_eq!(scheduler.outputs().ignored_seq_groups, [(big, reason, GroupStats::default())]);
    assert_eq!(scheduled(&scheduler), [(small, 28)]);
}

#[test]
fn the_youngest_is_preempted_and_comes_back_in_front_with_all_its_tokens() {
    let mut scheduler = Limits::with(|cache, _| {
        cache.num_gpu_blocks = 4;
    })
    .scheduler();
    let (_, old_seq) = add(&mut scheduler, 0, 7);
    let (young, young_seq) = add(&mut scheduler, 0, 8);
    let (later, _) = add(&mut scheduler, 0, 2);
    step(&mut scheduler, 1);
    step(&mut scheduler, 2);
    let preempted = &scheduler.outputs().preempted;
    assert_eq!(*preempted, [(young, PreemptionMode::Recompute)]);
    assert_eq!(scheduler.queues().waiting, [young, later]);
    assert_eq!(scheduler.stats().num_recomputed_tokens, 8);
    let group = scheduler.store().find_group(young).unwrap();
    assert_eq!((group.stats.num_preemptions, group.stats.num_recomputed_tokens), (1, 8));
    assert_eq!(scheduler.sequence(young_seq).unwrap().len(), 9, "no token is lost");
    assert_eq!(scheduler.sequence(old_seq).unwrap().len(), 9);
}

#[test]
fn a_request_that_outgrows_the_cache_alone_is_ended_with_a_reason_and_nothing_else_is() {
    let mut scheduler = Limits::with(|cache, _| {
        cache.num_gpu_blocks = 3;
    })
    .scheduler();
    let (big, _) = add(&mut scheduler, 0, 10);
    while scheduler.outputs().ignored_seq_groups.is_empty() {
        step(&mut scheduler, 1);
    }
    let reason = IgnoredReason::OutgrewCache { limit: 3 };
    assert_eq!(scheduler.outputs().ignored_seq_groups, [(big, reason, GroupStats::default())]);
    assert_eq!(scheduler.stats().num_recompute_preemptions, 0);
    let (next, _) = add(&mut scheduler, 0, 10);
    step(&mut scheduler, 1);
    assert_eq!(scheduled(&scheduler), [(next, 10)]);
}

/// Queues a group and forks it at its first token into `width` sequences.
fn forked(scheduler: &mut Scheduler, len: usize, width: usize) -> (GroupHandle, Vec<SeqHandle>) {
    let (group, _) = add_wide(scheduler, 0, len, width);
    let step_id = scheduler.schedule(0.0).unwrap().step_id;
    let row = scheduler.outputs().rows.len() - 1;
    let outputs: Vec<Output> =
        (1..).take(width).map(|token| Output { row, token, finish: false }).collect();
    (group, update(scheduler, step_id, &outputs).unwrap())
}

#[test]
fn siblings_share_blocks_and_copy_the_last_one_only_when_they_write_it() {
    let mut scheduler = Limits::default().scheduler();
    let (_, seqs) = forked(&mut scheduler, 6, 3);
    assert_eq!(scheduler.space().gpu().num_used(), 2);
    let outputs = scheduler.schedule(0.0).unwrap().clone();
    assert_eq!(outputs.moves[0].copy.len(), 2, "the last sibling keeps the block");
    assert_eq!(scheduler.space().gpu().num_used(), 4);
    let table = |seq: SeqHandle| scheduler.sequence(seq).unwrap().table.blocks().to_vec();
    assert!(seqs.iter().all(|seq| table(*seq)[0] == table(seqs[0])[0]));
    assert!(table(seqs[0])[1] != table(seqs[1])[1] && table(seqs[1])[1] != table(seqs[2])[1]);
}

#[test]
fn the_last_output_of_a_row_keeps_its_handle_and_a_row_without_outputs_ends() {
    let mut scheduler = Limits::default().scheduler();
    let (group, seqs) = forked(&mut scheduler, 4, 2);
    assert_eq!(scheduler.store().find_group(group).unwrap().seqs[..], [seqs[1], seqs[0]]);
    let step_id = scheduler.schedule(0.0).unwrap().step_id;
    let both = [0, 0].map(|row| Output { row, token: 5, finish: false });
    let after = update(&mut scheduler, step_id, &both).unwrap();
    assert_eq!(after[1], scheduler.outputs().rows[0].seq, "the parent is the last");
    assert!(scheduler.sequence(seqs[0]).is_err(), "the other row had no output");
    scheduler.check().unwrap();
}

#[test]
fn a_forked_group_swaps_out_and_back_with_its_sharing() {
    let limits = Limits::with(|cache, _| {
        cache.num_gpu_blocks = 8;
        cache.num_cpu_blocks = 8;
    });
    let mut scheduler = limits.scheduler();
    let (_, old) = add(&mut scheduler, 0, 15);
    step(&mut scheduler, 1);
    let (group, _) = forked(&mut scheduler, 8, 2);
    while scheduler.stats().num_swap_preemptions == 0 {
        step(&mut scheduler, 1);
    }
    let pairs = scheduler.outputs().moves[0].swap_out.len();
    assert!(pairs < 6, "shared blocks move once: {pairs}");
    assert_eq!(scheduler.queues().swapped, [group]);
    let old = scheduler.sequence(old).unwrap().group();
    assert!(scheduler.abort(old).is_some());
    step(&mut scheduler, 1);
    assert_eq!(scheduler.outputs().swapped_in, [group]);
    assert_eq!(scheduler.outputs().moves[0].swap_in.len(), pairs);
    scheduler.abort(group);
    assert_all_returned(&scheduler);
}

#[test]
fn without_room_on_the_host_a_forked_group_is_recomputed_and_shares_again() {
    let mut scheduler = Limits::with(|cache, _| {
        cache.num_gpu_blocks = 7;
    })
    .scheduler();
    let (_, old) = add(&mut scheduler, 0, 11);
    step(&mut scheduler, 1);
    let (group, _) = forked(&mut scheduler, 8, 3);
    let mut tokens = Vec::new();
    while scheduler.stats().num_recompute_preemptions == 0 {
        tokens = tokens_of(&scheduler, group);
        step(&mut scheduler, 1);
    }
    let old = scheduler.sequence(old).unwrap().group();
    scheduler.abort(old);
    let step_id = scheduler.schedule(0.0).unwrap().step_id;
    assert_eq!(tokens_of(&scheduler, group), tokens, "no sibling and no token is lost");
    assert_eq!(scheduler.outputs().num_prefill_groups, 1);
    let prompt_blocks = 2;
    assert!(scheduler.space().gpu().num_used() <= prompt_blocks + 3, "the prompt is shared");
    let outputs = one_each(&scheduler, 9);
    assert_eq!(outputs.len(), 3, "all three are sampled in the same step");
    update(&mut scheduler, step_id, &outputs).unwrap();
    scheduler.check().unwrap();
}

fn tokens_of(scheduler: &Scheduler, group: GroupHandle) -> Vec<Vec<i32>> {
    let seqs = &scheduler.store().find_group(group).unwrap().seqs;
    seqs.iter().map(|seq| scheduler.sequence(*seq).unwrap().token_ids().to_vec()).collect()
}

#[test]
fn an_abort_during_a_step_waits_for_its_end_and_then_frees_everything() {
    let mut scheduler = Limits::default().scheduler();
    let (a, _) = add(&mut scheduler, 0, 5);
    let (b, _) = add(&mut scheduler, 0, 5);
    let step_id = scheduler.schedule(0.0).unwrap().step_id;
    assert!(scheduler.abort(a).is_some());
    assert!(scheduler.abort(a).is_none(), "it is on its way out");
    let outputs = one_each(&scheduler, 1);
    update(&mut scheduler, step_id, &outputs).unwrap();
    assert!(scheduler.store().find_group(a).is_err());
    assert!(scheduler.abort(b).is_some());
    assert_all_returned(&scheduler);
}

#[test]
fn an_abandoned_step_leaves_every_request_to_run_again_in_order() {
    let mut scheduler = Limits::default().scheduler();
    let (a, _) = add(&mut scheduler, 0, 5);
    let (b, seq) = add(&mut scheduler, 0, 6);
    step(&mut scheduler, 1);
    let (c, _) = add(&mut scheduler, 0, 7);
    let step_id = scheduler.schedule(0.0).unwrap().step_id;
    scheduler.abandon(step_id).unwrap();
    let step_id = scheduler.schedule(0.0).unwrap().step_id;
    assert_eq!(scheduled(&scheduler), [(c, 7)], "those that did not run in it keep their blocks");
    let outputs = one_each(&scheduler, 1);
    update(&mut scheduler, step_id, &outputs).unwrap();
    let step_id = scheduler.schedule(0.0).unwrap().step_id;
    scheduler.abandon(step_id).unwrap();
    scheduler.check().unwrap();
    scheduler.schedule(0.0).unwrap();
    assert_eq!(scheduled(&scheduler), [(a, 6), (b, 7), (c, 8)]);
    assert_eq!(scheduler.sequence(seq).unwrap().len(), 7);
}

#[test]
fn calls_out_of_order_are_refused_and_change_nothing() {
    let mut scheduler = Limits::default().scheduler();
    let none: [Output; 0] = [];
    assert!(matches!(update(&mut scheduler, 0, &none), Err(Error::Step(_))));
    assert!(matches!(scheduler.abandon(0), Err(Error::Step(_))));
    add(&mut scheduler, 0, 5);
    let step_id = scheduler.schedule(1.0).unwrap().step_id;
    assert!(matches!(scheduler.schedule(1.0), Err(Error::Step(_))));
    assert!(matches!(update(&mut scheduler, step_id + 1, &none), Err(Error::Step(_))));
    let outputs = one_each(&scheduler, 1);
    update(&mut scheduler, step_id, &outputs).unwrap();
    assert!(matches!(update(&mut scheduler, step_id, &outputs), Err(Error::Step(_))));
    for now in [0.5, -1.0, f64::NAN, f64::INFINITY] {
        assert!(matches!(scheduler.schedule(now), Err(Error::Step(_))), "{now}");
    }
    assert_eq!(scheduler.schedule(1.0).unwrap().num_batched_tokens, 1);
}

#[test]
fn results_that_do_not_belong_to_the_step_are_refused_and_change_nothing() {
    let mut scheduler = Limits::with(|_, scheduler| {
        scheduler.max_model_len = 6;
    })
    .scheduler();
    add(&mut scheduler, 0, 5);
    add(&mut scheduler, 0, 6);
    let step_id = scheduler.schedule(0.0).unwrap().step_id;
    let good = |row, token, finish| Output { row, token, finish };
    let refused: [(&str, Vec<Output>); 5] = [
        ("must not decrease", vec![good(1, 1, true), good(0, 1, false)]),
        ("names row 2", vec![good(2, 1, false)]),
        ("ids are at least 0", vec![good(0, -1, false)]),
        ("may continue with 1", vec![good(0, 1, false), good(0, 2, false)]),
        ("beyond max_model_len", vec![good(0, 1, false), good(1, 2, false)]),
    ];
    let before = format!("{scheduler:?}");
    for (text, outputs) in refused {
        let refusal = update(&mut scheduler, step_id, &outputs).unwrap_err().to_string();
        assert!(refusal.contains(text), "{refusal}");
        assert_eq!(format!("{scheduler:?}"), before);
    }
    update(&mut scheduler, step_id, &[good(0, 1, false), good(1, 2, true)]).unwrap();
    scheduler.check().unwrap();
}

#[test]
fn requests_that_cannot_be_are_refused_by_name() {
    let mut scheduler = Limits::default().scheduler();
    let refused: [(&[i32], f64, usize, &str); 6] = [
        (&[], 0.0, 1, "empty"),
        (&[3, -1], 0.0, 1, "-1"),
        (&[3], f64::NAN, 1, "arrival_time"),
        (&[3], f64::INFINITY, 1, "arrival_time"),
        (&[3], 0.0, 0, "max_num_running_seqs"),
        (&[3], 0.0, 9, "max_num_seqs, 8"),
    ];
    for (prompt, arrival, width, text) in refused {
        let mut request = Request::new(prompt, arrival);
        request.max_num_running_seqs = width;
        let refusal = scheduler.add_seq_group(&request).unwrap_err().to_string();
        assert!(refusal.contains(text), "{refusal}");
    }
    assert_all_returned(&scheduler);
}

#[test]
fn a_group_that_gets_no_row_gets_no_copy_either() {
    let limits = Limits::with(|cache, scheduler| {
        cache.num_gpu_blocks = 16;
        scheduler.max_num_batched_tokens = 8;
    });
    let mut scheduler = limits.scheduler();
    let (old, _) = add(&mut scheduler, 0, 8);
    step(&mut scheduler, 1);
    forked(&mut scheduler, 7, 2);
    while scheduler.stats().num_recompute_preemptions == 0 {
        step(&mut scheduler, 1);
    }
    scheduler.abort(old);
    step(&mut scheduler, 1);
    assert_eq!(scheduler.outputs().num_samples, 0, "too long for one step");
    forked(&mut scheduler, 6, 2);
    // The long group takes the whole step, and the new one, whose last block is shared, none.
    scheduler.schedule(0.0).unwrap();
    assert_eq!(scheduler.outputs().num_batched_tokens, 8);
    assert_eq!(scheduler.outputs().scheduled_seq_groups.len(), 1);
    assert_eq!(scheduler.outputs().moves[0].copy, []);
}

#[test]
fn a_swap_makes_no_block_computed_that_a_sibling_has_still_to_compute() {
    let mut scheduler = Limits::with(|cache, scheduler| {
        (cache.num_gpu_blocks, cache.num_cpu_blocks) = (10, 10);
        cache.enable_prefix_caching = true;
        scheduler.enable_chunked_prefill = true;
        scheduler.max_num_batched_tokens = 8;
        scheduler.policy = Policy::Priority;
        scheduler.preemption_mode = Some(PreemptionMode::Swap);
    })
    .scheduler();
    let (pair, _) = add_wide(&mut scheduler, 0, 24, 2);
    step(&mut scheduler, 1);
    step(&mut scheduler, 1);
    let step_id = scheduler.schedule(0.0).unwrap().step_id;
    let outputs = [1, 2].map(|token| Output { row: 0, token, finish: false });
    update(&mut scheduler, step_id, &outputs).unwrap();

    // Both start again, and the cache has nothing: the second counts the first's six blocks.
    let step_id = scheduler.schedule(0.0).unwrap().step_id;
    scheduler.abandon(step_id).unwrap();
    assert!(scheduler.reset_prefix_cache());
    step(&mut scheduler, 3);
    let urgent: Vec<i32> = (100..112).collect();
    let urgent = Request::new(&urgent, 0.0).with(|request| request.priority = -1);
    let (urgent, _) = scheduler.add_seq_group(&urgent).unwrap();
    step(&mut scheduler, 3);
    assert_eq!(scheduler.outputs().preempted, [(pair, PreemptionMode::Swap)]);
    assert!(scheduler.abort(urgent).is_some());
    step(&mut scheduler, 3);
    assert_eq!(scheduler.outputs().swapped_in, [pair]);
    let computed = scheduler.space().common_computed_blocks(scheduler.store(), pair);
    assert_eq!(computed.len(), 4, "8 tokens before the swap and 8 after it");
}

#[test]
fn an_urgent_prompt_of_several_steps_preempts_no_one_while_it_fits() {
    let mut scheduler = Limits::with(|cache, scheduler| {
        cache.num_gpu_blocks = 100;
        scheduler.enable_chunked_prefill = true;
        scheduler.max_num_batched_tokens = 8;
        scheduler.max_model_len = 64;
        scheduler.policy = Policy::Priority;
    })
    .scheduler();
    add(&mut scheduler, 0, 4);
    step(&mut scheduler, 1);
    let urgent: Vec<i32> = (100..120).collect();
    let urgent = Request::new(&urgent, 0.0).with(|request| request.priority = -1);
    scheduler.add_seq_group(&urgent).unwrap();
    step(&mut scheduler, 2);
    assert_eq!(scheduler.outputs().preempted, []);
    let rows = scheduler.outputs().rows.iter().map(|row| row.num_tokens).collect::<Vec<_>>();
    assert_eq!(rows, [7, 1]);
}

#[test]
fn prefix_hits_are_counted_at_each_admission() {
    let mut scheduler = Limits::with(|cache, _| cache.enable_prefix_caching = true).scheduler();
    add(&mut scheduler, 0, 11);
    step(&mut scheduler, 1);
    add(&mut scheduler, 0, 14);
    step(&mut scheduler, 1);
    let stats = scheduler.stats();
    assert_eq!((stats.num_looked_up_tokens, stats.num_cached_tokens), (25, 8));
}

#[test]
fn a_prompt_is_refused_if_and_only_if_it_cannot_run_alone_to_a_new_token() {
    for (enable_chunked_prefill, max_num_batched_tokens) in [(false, 20), (true, 8), (false, 40)] {
        for (watermark, num_gpu_blocks) in [(0.0, 64), (0.13, 8), (0.5, 9), (0.0, 1)] {
            let limits = Limits::with(|cache, scheduler| {
                (cache.watermark, cache.num_gpu_blocks) = (watermark, num_gpu_blocks);
                scheduler.enable_chunked_prefill = enable_chunked_prefill;
                scheduler.max_num_batched_tokens = max_num_batched_tokens;
                scheduler.max_model_len = 32;
            });
            for num_tokens in 1..=40 {
                let mut scheduler = limits.scheduler();
                let refusal = scheduler.prompt_refusal(num_tokens);
                let (_, seq) = add(&mut scheduler, 0, num_tokens);
                let has_room = num_tokens < limits.scheduler.max_model_len;
                let mut gets_token = false;
                while has_room && !gets_token && !scheduler.queues().is_empty() {
                    step(&mut scheduler, 1);
                    let sequence = scheduler.sequence(seq);
                    gets_token = sequence.is_ok_and(|sequence| sequence.len() > num_tokens);
                }
                assert_eq!(refusal.is_none(), gets_token, "{num_tokens} {refusal:?} {limits:?}");
            }
        }
    }
}

#[test]
fn a_refusal_of_a_prompt_says_what_it_has_and_what_is_accepted() {
    let limits = Limits::with(|cache, scheduler| {
        (cache.watermark, cache.num_gpu_blocks) = (0.13, 8);
        (scheduler.max_num_batched_tokens, scheduler.max_model_len) = (30, 40);
    });
    let scheduler = limits.scheduler();
    let text = |num_tokens| scheduler.prompt_refusal(num_tokens).map(|refusal| refusal.to_string());
    assert_eq!(text(28), None);
    assert_eq!(
        text(29).unwrap(),
        "has 29 tokens and needs 8 KV blocks of 4; the engine has 8, of which a prompt may use 7: \
         raise num_gpu_blocks or kv_cache_memory"
    );
    assert_eq!(
        text(31).unwrap(),
        "has 31 tokens; a prompt is computed in one step, and max_num_batched_tokens is 30: raise \
         it or enable_chunked_prefill"
    );
    assert_eq!(
        scheduler.prompt_refusal(40),
        Some(PromptRefusal::FillsModel { num_tokens: 40, max_model_len: 40 })
    );
    assert_eq!(
        text(40).unwrap(),
        "has 40 tokens; max_model_len is 40, so at most 39 leave space for a new one"
    );
}

#[test]
fn whoever_ends_a_group_is_told_what_it_had_been_through() {
    let limits = Limits::with(|cache, _| {
        (cache.num_gpu_blocks, cache.enable_prefix_caching) = (8, true);
    });
    let mut scheduler = limits.scheduler();
    add(&mut scheduler, 0, 12);
    step(&mut scheduler, 1);
    // Finished, with three full blocks in common, of which the first was computed.
    let (group, _) = add(&mut scheduler, 0, 13);
    step(&mut scheduler, 1);
    let mut cached = GroupStats::default();
    cached.num_cached_tokens = 12;
    assert_eq!(scheduler.group_stats(group), Ok(cached));
    let step_id = scheduler.schedule(0.0).unwrap().step_id;
    let parent_rows: Vec<i32> = (0..).take(scheduler.outputs().rows.len()).collect();
    let token_start: Vec<i32> = (0..).take(parent_rows.len() + 1).collect();
    let ours = |row: &Row| scheduler.sequence(row.seq).unwrap().group() == group;
    let finish: Vec<u8> = scheduler.outputs().rows.iter().map(|row| u8::from(ours(row))).collect();
    let results = SampledOutputs {
        parent_rows: &parent_rows,
        token_start: &token_start,
        tokens: &vec![1; parent_rows.len()],
        finish: &finish,
    };
    let updated = scheduler.update(step_id, results).unwrap();
    assert_eq!(updated.ended, [(group, cached)]);
    assert!(scheduler.group_stats(group).is_err());
    // Aborted, after its step was abandoned.
    let (group, _) = add(&mut scheduler, 100, 5);
    let step_id = scheduler.schedule(0.0).unwrap().step_id;
    scheduler
        .update(
            step_id,
            SampledOutputs { parent_rows: &[0], token_start: &[0, 1], tokens: &[1], finish: &[0] },
        )
        .unwrap();
    let step_id = scheduler.schedule(0.0).unwrap().step_id;
    scheduler.abandon(step_id).unwrap();
    let mut stats = GroupStats::default();
    stats.num_recomputed_tokens = 5;
    assert_eq!(scheduler.abort(group), Some(stats));
    assert_eq!(scheduler.abort(group), None);
}

#[test]
fn limits_that_nobody_gives_leave_room_for_a_prompt_or_for_every_sequence() {
    let tokens = SchedulerConfig::default_max_num_batched_tokens;
    assert_eq!([tokens(false, 4, 100), tokens(false, 4, 4000)], [2048, 4000]);
    assert_eq!([tokens(true, 4, 4000), tokens(true, 600, 4000)], [512, 600]);
    assert_eq!(tokens(false, 3000, 100), 3000);
    assert_eq!(SchedulerConfig::default_max_num_bypasses(true), 64);
    assert_eq!(SchedulerConfig::default_max_num_bypasses(false), 0);
}

#[test]
fn a_group_that_can_regrow_keeps_its_budget_and_may_spread_again() {
    let on = |row, token| Output { row, token, finish: false };
    for can_regrow in [false, true] {
        let mut scheduler = Limits::with(|_, scheduler| {
            scheduler.max_num_seqs = 4;
        })
        .scheduler();
        let prompt = [1, 2, 3];
        let mut request = Request::new(&prompt, 0.0);
        (request.max_num_running_seqs, request.can_regrow) = (3, can_regrow);
        scheduler.add_seq_group(&request).unwrap();
        for outputs in [vec![on(0, 1), on(0, 2), on(0, 3)], vec![on(1, 4)]] {
            let step_id = scheduler.schedule(0.0).unwrap().step_id;
            update(&mut scheduler, step_id, &outputs).unwrap();
        }
        add_wide(&mut scheduler, 0, 3, 2);
        let step_id = scheduler.schedule(0.0).unwrap().step_id;
        let is_other_admitted = scheduler.outputs().num_prefill_groups == 1;
        assert_eq!(is_other_admitted, !can_regrow, "its share is kept for it, or given to others");
        if can_regrow {
            update(&mut scheduler, step_id, &[on(0, 5), on(0, 6), on(0, 7)]).unwrap();
        }
        scheduler.check().unwrap();
    }
}
