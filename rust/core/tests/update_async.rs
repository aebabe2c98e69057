//! Steps that end before their tokens are known: the same decisions as with the tokens at once,
//! nothing lost when one fails, and nothing cached under unknown tokens.

#![allow(clippy::unwrap_used, missing_docs)]

mod common;

use common::{Limits, add, add_wide, assert_all_returned, one_each, step, update};
use pagedserve_core::config::PreemptionMode;
use pagedserve_core::error::Error;
use pagedserve_core::scheduler::Scheduler;
use pagedserve_core::sequence::{Request, SeqHandle};

fn schedule(scheduler: &mut Scheduler) -> u64 {
    let outputs = scheduler.schedule(0.0).unwrap();
    assert!(!outputs.is_empty());
    outputs.step_id
}

fn tokens_of(scheduler: &Scheduler, seq: SeqHandle) -> Vec<i32> {
    scheduler.sequence(seq).unwrap().token_ids().to_vec()
}

/// Ends the open step, schedules the next, and names the tokens of the first.
fn overlap(scheduler: &mut Scheduler, step_id: u64, tokens: &[i32]) -> u64 {
    assert!(scheduler.update_async(step_id).unwrap());
    let next = schedule(scheduler);
    scheduler.check().unwrap();
    scheduler.resolve_tokens(step_id, tokens).unwrap();
    scheduler.check().unwrap();
    next
}

#[test]
fn steps_that_overlap_decide_and_end_as_steps_that_do_not() {
    // So few blocks that groups are preempted and resumed.
    for mode in [PreemptionMode::Recompute, PreemptionMode::Swap] {
        let limits = Limits::with(|cache, scheduler| {
            (cache.num_gpu_blocks, cache.num_cpu_blocks) = (12, 12);
            scheduler.preemption_mode = Some(mode);
        });
        let (mut plain, mut overlapped) = (limits.scheduler(), limits.scheduler());
        let seqs: Vec<SeqHandle> = (0..5).map(|i| add(&mut plain, i, 6).1).collect();
        (0..5).for_each(|i| {
            add(&mut overlapped, i, 6);
        });
        let mut open = schedule(&mut overlapped);
        for token in 100..130 {
            step(&mut plain, token);
            let rows = plain.outputs().rows.clone();
            assert_eq!(overlapped.outputs().rows, rows, "{mode:?} {token}");
            let samples = vec![token; plain.outputs().num_samples];
            open = overlap(&mut overlapped, open, &samples);
        }
        assert!(plain.stats().num_recompute_preemptions + plain.stats().num_swap_preemptions > 0);
        overlapped.abandon(open).unwrap();
        for seq in seqs {
            assert_eq!(tokens_of(&overlapped, seq), tokens_of(&plain, seq));
        }
    }
}

#[test]
fn a_sequence_that_ends_with_its_token_is_gone_after_the_step_that_ran_it_once_more() {
    let mut scheduler = Limits::default().scheduler();
    let (ending, _) = add(&mut scheduler, 0, 5);
    let (_, living) = add(&mut scheduler, 9, 5);
    let first = schedule(&mut scheduler);
    let second = overlap(&mut scheduler, first, &[1, 2]);
    assert!(scheduler.abort(ending).is_some());
    assert_eq!(scheduler.outputs().rows.len(), 2, "the device may be at work on its blocks");
    // The first of the two tokens that it samples belongs to no sequence.
    let third = overlap(&mut scheduler, second, &[3, 4]);
    assert_eq!(scheduler.outputs().rows.len(), 1);
    assert!(scheduler.store().find_group(ending).is_err());
    assert_eq!(tokens_of(&scheduler, living), [9, 10, 11, 12, 13, 2, 4]);
    scheduler.abandon(third).unwrap();
}

#[test]
fn a_chunk_that_was_never_computed_is_computed_again_and_nobody_shares_it() {
    let limits = Limits::with(|cache, scheduler| {
        cache.enable_prefix_caching = true;
        (scheduler.enable_chunked_prefill, scheduler.max_num_batched_tokens) = (true, 12);
    });
    let mut scheduler = limits.scheduler();
    let (_, seq) = add(&mut scheduler, 0, 20);
    let first = schedule(&mut scheduler);
    assert!(scheduler.update_async(first).unwrap());
    assert_eq!(scheduler.sequence(seq).unwrap().num_computed_tokens, 12);
    scheduler.abandon(first).unwrap();
    assert_eq!(scheduler.sequence(seq).unwrap().num_computed_tokens, 0);
    add(&mut scheduler, 0, 20);
    schedule(&mut scheduler);
    assert_eq!(scheduler.stats().num_cached_tokens, 0, "nothing of it was computed");
}

#[test]
fn a_step_that_failed_before_its_tokens_were_known_takes_them_back() {
    for has_next in [false, true] {
        let mut scheduler = Limits::default().scheduler();
        let (_, seq) = add(&mut scheduler, 0, 5);
        let first = schedule(&mut scheduler);
        let second = overlap(&mut scheduler, first, &[7]);
        assert!(scheduler.update_async(second).unwrap());
        if has_next {
            schedule(&mut scheduler);
        }
        scheduler.abandon(second).unwrap();
        scheduler.check().unwrap();
        assert_eq!(tokens_of(&scheduler, seq), [0, 1, 2, 3, 4, 7]);
        assert_eq!(scheduler.space().gpu().num_used(), 0);
        step(&mut scheduler, 8);
        assert_eq!(scheduler.outputs().num_prefill_tokens, 6, "computed again from its tokens");
        assert_eq!(tokens_of(&scheduler, seq), [0, 1, 2, 3, 4, 7, 8]);
    }
}

#[test]
fn a_step_waits_for_its_tokens_where_somebody_may_fork_or_is_at_the_model_length() {
    let mut scheduler = Limits::default().scheduler();
    let (group, _) = add_wide(&mut scheduler, 0, 5, 2);
    let open = schedule(&mut scheduler);
    assert!(!scheduler.update_async(open).unwrap());
    scheduler.abandon(open).unwrap();
    scheduler.abort(group);
    add(&mut scheduler, 0, 63);
    let open = schedule(&mut scheduler);
    let open = overlap(&mut scheduler, open, &[1]);
    assert!(!scheduler.update_async(open).unwrap(), "64 tokens are the model's length");
    scheduler.abandon(open).unwrap();
}

#[test]
fn calls_out_of_order_are_refused_and_change_nothing() {
    let mut scheduler = Limits::default().scheduler();
    let (group, seq) = add(&mut scheduler, 0, 5);
    assert!(matches!(scheduler.update_async(0), Err(Error::Step(_))));
    let first = schedule(&mut scheduler);
    assert!(matches!(scheduler.resolve_tokens(first, &[1]), Err(Error::Step(_))));
    assert!(scheduler.update_async(first).unwrap());
    assert!(matches!(scheduler.update_async(first), Err(Error::Step(_))));
    let second = schedule(&mut scheduler);
    assert!(matches!(scheduler.update_async(second), Err(Error::Step(_))));
    assert!(matches!(common::update(&mut scheduler, second, &[]), Err(Error::Step(_))));
    assert!(matches!(scheduler.resolve_tokens(second, &[1]), Err(Error::Step(_))));
    for wrong in [&[][..], &[1, 2], &[-1]] {
        assert!(matches!(scheduler.resolve_tokens(first, wrong), Err(Error::Arrays(_))));
    }
    scheduler.resolve_tokens(first, &[1]).unwrap();
    assert_eq!(tokens_of(&scheduler, seq), [0, 1, 2, 3, 4, 1]);
    assert!(scheduler.update_async(second).unwrap());
    assert!(scheduler.abort(group).is_some(), "no step is open");
    scheduler.resolve_tokens(second, &[1]).unwrap();
    assert_all_returned(&scheduler);
}

/// Blocks hold 4 tokens: the first new token fills one.
#[test]
fn a_block_is_cached_under_its_tokens_once_they_are_known_and_never_before() {
    let mut scheduler = Limits::with(|cache, _| cache.enable_prefix_caching = true).scheduler();
    for token in [50, 60] {
        // Both have the same prompt, and the same placeholder where their tokens differ.
        let (group, _) = add(&mut scheduler, 0, 7);
        let first = schedule(&mut scheduler);
        let second = overlap(&mut scheduler, first, &[token]);
        let third = overlap(&mut scheduler, second, &[70]);
        assert!(scheduler.update_async(third).unwrap());
        assert!(scheduler.abort(group).is_some());
        scheduler.resolve_tokens(third, &[71]).unwrap();
    }
    for (token, num_cached) in [(50, 8), (60, 8), (61, 4)] {
        let prompt: Vec<i32> = (0..7).chain([token, 70, 71]).collect();
        let request = Request::new(&prompt, 0.0);
        let (group, seq) = scheduler.add_seq_group(&request).unwrap();
        let open = schedule(&mut scheduler);
        assert_eq!(scheduler.sequence(seq).unwrap().num_cached_tokens, num_cached, "{token}");
        scheduler.abandon(open).unwrap();
        scheduler.abort(group);
    }
}

/// Prompts share a partly filled block, and one continues in a block that another has filled: it
/// overwrites the end, so what a failed step was to write there is not known.
#[test]
fn a_block_that_is_found_by_its_beginning_is_not_known_to_its_end() {
    let limits = Limits::with(|cache, scheduler| {
        (cache.enable_prefix_caching, cache.block_size) = (true, 5);
        cache.choices.share_partial_blocks = true;
        scheduler.max_num_batched_tokens = 20;
    });
    let mut scheduler = limits.scheduler();
    let (group, _) = add(&mut scheduler, 1, 13);
    let first = schedule(&mut scheduler);
    let second = overlap(&mut scheduler, first, &[50]);
    let third = overlap(&mut scheduler, second, &[51]);
    let results = one_each(&scheduler, 52);
    update(&mut scheduler, third, &results).unwrap();
    scheduler.abort(group);
    let (_, seq) = add(&mut scheduler, 1, 13);
    step(&mut scheduler, 60);
    step(&mut scheduler, 61);
    let failed = schedule(&mut scheduler);
    assert!(scheduler.update_async(failed).unwrap());
    scheduler.abandon(failed).unwrap();
    schedule(&mut scheduler);
    assert_eq!(scheduler.sequence(seq).unwrap().num_cached_tokens, 10);
}
