//! Prompts with branches: one group of sequences that begin alike and are sampled in one step.

#![allow(clippy::unwrap_used, missing_docs)]

mod common;

use common::{Limits, Output, assert_all_returned, sampled_rows, update};
use pagedserve_core::scheduler::Scheduler;
use pagedserve_core::sequence::{GroupHandle, Request};
use proptest::prelude::*;

/// Queues `prompt` with branches.
fn add(scheduler: &mut Scheduler, prompt: &[i32], branches: &[Vec<i32>]) -> GroupHandle {
    let branches: Vec<&[i32]> = branches.iter().map(Vec::as_slice).collect();
    let request = Request::new(prompt, 0.0).with(|request| {
        request.branches = &branches;
        request.max_num_running_seqs = branches.len().max(1);
    });
    scheduler.add_seq_group(&request).unwrap().0
}

/// Runs steps until the open requests have ended; returns the computed tokens and the number of
/// sampled rows of each step.
fn run(scheduler: &mut Scheduler) -> Vec<(usize, usize)> {
    let mut steps = Vec::new();
    while !scheduler.queues().is_empty() {
        let outputs = scheduler.schedule(0.0).unwrap();
        assert!(!outputs.is_empty(), "waiting work implies progress");
        let (step_id, num_tokens) = (outputs.step_id, outputs.num_batched_tokens);
        scheduler.check().unwrap();
        let rows = sampled_rows(scheduler);
        steps.push((num_tokens, rows.len()));
        let outputs: Vec<_> =
            rows.into_iter().map(|row| Output { row, token: 1, finish: true }).collect();
        update(scheduler, step_id, &outputs).unwrap();
        scheduler.check().unwrap();
    }
    steps
}

fn limits(enable_prefix_caching: bool, max_num_batched_tokens: usize) -> Limits {
    Limits::with(|cache, config| {
        cache.enable_prefix_caching = enable_prefix_caching;
        config.max_num_batched_tokens = max_num_batched_tokens;
    })
}

#[test]
fn what_branches_have_in_common_is_computed_once() {
    for caches in [false, true] {
        let mut scheduler = limits(caches, 64).scheduler();
        let prompt: Vec<i32> = (100..118).collect();
        let branches: Vec<Vec<i32>> = (0..5).map(|branch| vec![branch, 7, 7]).collect();
        let group = add(&mut scheduler, &prompt, &branches);
        let seqs = scheduler.store().find_group(group).unwrap().seqs.clone();
        for (seq, branch) in seqs.iter().zip(&branches) {
            let seq = scheduler.sequence(*seq).unwrap();
            assert_eq!(seq.token_ids(), [&prompt[..], branch].concat());
            assert_eq!(seq.num_prompt_tokens(), 21);
        }
        // Four full blocks of four tokens are common; the two tokens after them are not.
        assert_eq!(run(&mut scheduler), [(21 + 4 * 5, 5)]);
        assert_all_returned(&scheduler);
    }
}

#[test]
fn a_cached_prompt_is_not_computed_again() {
    let mut scheduler = limits(true, 64).scheduler();
    let prompt: Vec<i32> = (100..116).collect();
    add(&mut scheduler, &prompt, &[]);
    run(&mut scheduler);
    add(&mut scheduler, &prompt, &[vec![1, 2], vec![3, 4]]);
    assert_eq!(run(&mut scheduler), [(4, 2)]);
}

#[test]
fn more_branches_than_sequences_are_refused() {
    let mut scheduler = limits(false, 64).scheduler();
    let request = Request::new(&[1], 0.0).with(|request| request.branches = &[&[2], &[3]]);
    let refusal = scheduler.add_seq_group(&request).unwrap_err().to_string();
    assert!(refusal.contains("the prompt has 2 branches; max_num_running_seqs is 1"), "{refusal}");
    let request = Request::new(&[1], 0.0).with(|request| request.branches = &[&[-2]]);
    let refusal = scheduler.add_seq_group(&request).unwrap_err().to_string();
    assert!(refusal.contains("the prompt holds the token id -2"), "{refusal}");
}

proptest! {
    /// For any budget and any other requests: all branches are sampled in one step, and without a
    /// cache every token is computed once, except those of full blocks that an earlier branch has.
    #[test]
    fn all_branches_are_sampled_in_one_step(
        requests in prop::collection::vec(
            (1..40usize, prop::collection::vec(prop::collection::vec(0..2i32, 0..6), 1..8)), 1..4,
        ),
        caches in any::<bool>(),
        chunks in any::<bool>(),
        budget in 8..40usize,
    ) {
        let mut limits = limits(caches, budget * 4);
        limits.scheduler.enable_chunked_prefill = chunks;
        let mut scheduler = limits.scheduler();
        let mut num_expected = 0;
        let mut sizes = Vec::new();
        for (len, branches) in &requests {
            let prompt: Vec<i32> = (50..).take(*len.min(&(budget * 4 - 6))).collect();
            add(&mut scheduler, &prompt, branches);
            sizes.push(branches.len());
            let texts: Vec<Vec<i32>> =
                branches.iter().map(|branch| [&prompt[..], branch].concat()).collect();
            for (place, text) in texts.iter().enumerate() {
                let common = |other: &Vec<i32>| {
                    let most = text.len().min(other.len()) - 1;
                    text[..most].iter().zip(other).take_while(|(a, b)| a == b).count() / 4 * 4
                };
                num_expected += text.len() - texts[..place].iter().map(common).max().unwrap_or(0);
            }
        }
        let steps = run(&mut scheduler);
        let num_samples: usize = steps.iter().map(|(_, num_samples)| num_samples).sum();
        prop_assert_eq!(num_samples, sizes.iter().sum::<usize>());
        if sizes.len() == 1 {
            prop_assert_eq!(steps.last().unwrap().1, sizes[0]);
        }
        let num_computed: usize = steps.iter().map(|(num_tokens, _)| num_tokens).sum();
        if caches {
            prop_assert!(num_computed <= num_expected);
        } else {
            prop_assert_eq!(num_computed, num_expected);
        }
        assert_all_returned(&scheduler);
    }
}
