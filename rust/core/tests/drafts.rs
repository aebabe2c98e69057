//! Drafts: their model inputs, the effects of accepted and rejected ones, and refusals.

#![allow(clippy::unwrap_used, missing_docs)]

mod common;

use common::arrays::Arrays;
use common::{Limits, Output, add, add_wide, one_each, propose, step, update, update_drafted};
use pagedserve_core::error::Error;
use pagedserve_core::scheduler::Scheduler;

const LOOKAHEAD: usize = 5;

fn limits() -> Limits {
    Limits::with(|_, scheduler| {
        scheduler.num_lookahead_slots = LOOKAHEAD;
        scheduler.max_num_batched_tokens = 24;
    })
}

/// Two decode rows of 7 tokens, and the open step that continues them.
fn two_decodes(limits: &Limits) -> (Scheduler, u64) {
    let mut scheduler = limits.scheduler();
    for first in [10, 20] {
        add(&mut scheduler, first, 6);
    }
    step(&mut scheduler, 7);
    let step_id = scheduler.schedule(0.0).unwrap().step_id;
    (scheduler, step_id)
}

#[test]
fn drafts_are_inputs_and_samples_behind_their_rows() {
    let limits = limits();
    let (mut scheduler, step_id) = two_decodes(&limits);
    propose(&mut scheduler, step_id, &[(1, vec![31, 32, 33])]).unwrap();
    let outputs = scheduler.outputs();
    assert_eq!((outputs.num_batched_tokens, outputs.num_samples), (5, 5));
    let arrays = Arrays::filled(&scheduler, &limits);
    assert_eq!(arrays.token_ids[..5], [7, 7, 31, 32, 33]);
    assert_eq!(arrays.positions[..5], [6, 6, 7, 8, 9]);
    assert_eq!(arrays.query_start[..3], [0, 1, 5]);
    assert_eq!(arrays.seq_lens[..2], [7, 10]);
    assert_eq!(arrays.sample_index[..5], [0, 1, 2, 3, 4]);
    assert_eq!(arrays.sample_rows[..5], [0, 1, 1, 1, 1]);
    let width = scheduler.outputs().max_num_blocks;
    let table = &arrays.block_tables[width..2 * width];
    for (index, position) in (1..5).zip(6..10) {
        let slot = i64::from(table[position / 4]) * 4 + i64::try_from(position % 4).unwrap();
        assert_eq!(arrays.slot_mapping[index], slot);
    }
}

#[test]
fn a_row_goes_on_behind_its_right_drafts() {
    let limits = limits();
    let (mut scheduler, step_id) = two_decodes(&limits);
    propose(&mut scheduler, step_id, &[(0, vec![31, 32, 33])]).unwrap();
    let outputs = one_each(&scheduler, 50);
    let accepted = |row| if row == 0 { vec![31, 32] } else { Vec::new() };
    let handles = update_drafted(&mut scheduler, step_id, &outputs, accepted).unwrap();
    scheduler.check().unwrap();
    let tokens = scheduler.sequence(handles[0]).unwrap().token_ids().to_vec();
    assert_eq!(tokens, [10, 11, 12, 13, 14, 15, 7, 31, 32, 50]);
    assert_eq!(scheduler.sequence(handles[0]).unwrap().num_uncomputed_tokens(), 1);
    scheduler.schedule(0.0).unwrap();
    let arrays = Arrays::filled(&scheduler, &limits);
    assert_eq!((arrays.token_ids[0], arrays.positions[0]), (50, 9));
}

#[test]
fn the_decisions_are_those_of_a_scheduler_that_was_told_of_no_drafts() {
    let limits = limits();
    let lives = [true, false].map(|has_drafts| {
        let (mut scheduler, mut step_id) = two_decodes(&limits);
        let mut decisions = Vec::new();
        for _ in 0..6 {
            if has_drafts {
                propose(&mut scheduler, step_id, &[(0, vec![3, 4])]).unwrap();
            }
            let outputs = one_each(&scheduler, 50);
            let accepted = |row| if row == 0 { vec![3, 4] } else { Vec::new() };
            update_drafted(&mut scheduler, step_id, &outputs, accepted).unwrap();
            let outputs = scheduler.schedule(0.0).unwrap();
            decisions.push((outputs.rows.clone(), outputs.moves[0].copy.clone()));
            step_id = outputs.step_id;
        }
        decisions
    });
    assert_eq!(lives[0], lives[1]);
}

#[test]
fn a_step_with_drafts_waits_for_its_tokens() {
    let (mut scheduler, step_id) = two_decodes(&limits());
    propose(&mut scheduler, step_id, &[(0, vec![3])]).unwrap();
    assert!(!scheduler.update_async(step_id).unwrap());
    let outputs = one_each(&scheduler, 50);
    update(&mut scheduler, step_id, &outputs).unwrap();
}

#[test]
fn an_abandoned_step_leaves_no_draft() {
    let (mut scheduler, step_id) = two_decodes(&limits());
    propose(&mut scheduler, step_id, &[(0, vec![3, 4])]).unwrap();
    scheduler.abandon(step_id).unwrap();
    scheduler.check().unwrap();
    let outputs = scheduler.schedule(0.0).unwrap();
    assert!(outputs.drafts.is_empty() && outputs.rows.iter().all(|row| row.num_drafts == 0));
    assert_eq!(outputs.num_batched_tokens, 14, "both begin again from their tokens");
}

#[test]
fn drafts_that_do_not_fit_are_refused_and_leave_none() {
    let limits = limits();
    let (mut scheduler, step_id) = two_decodes(&limits);
    let refused = |scheduler: &mut Scheduler, drafts: &[(usize, Vec<i32>)]| {
        let error = propose(scheduler, step_id, drafts).unwrap_err();
        assert!(matches!(error, Error::Arrays(_)), "{error}");
        assert!(scheduler.outputs().drafts.is_empty());
        assert_eq!(scheduler.outputs().num_batched_tokens, 2);
        error.to_string()
    };
    assert!(refused(&mut scheduler, &[(2, vec![1])]).contains("rows names 2"));
    assert!(refused(&mut scheduler, &[(1, vec![1]), (0, vec![1])]).contains("increase"));
    assert!(refused(&mut scheduler, &[(0, vec![1]), (0, vec![1])]).contains("increase"));
    assert!(refused(&mut scheduler, &[(0, vec![])]).contains("token_start"));
    assert!(refused(&mut scheduler, &[(0, vec![-1])]).contains("holds -1"));
    assert!(refused(&mut scheduler, &[(0, vec![1; 6])]).contains("it may have 5"));
    assert!(refused(&mut scheduler, &[(0, vec![1; 23])]).contains("leaves the step 22"));
    let error = propose(&mut scheduler, step_id + 1, &[(0, vec![1])]).unwrap_err();
    assert!(matches!(error, Error::Step(_)));
    propose(&mut scheduler, step_id, &[(0, vec![1])]).unwrap();
    let error = propose(&mut scheduler, step_id, &[(1, vec![1])]).unwrap_err();
    assert!(error.to_string().contains("has its drafts"));
}

#[test]
fn drafts_stop_at_the_models_length() {
    let limits = Limits::with(|_, scheduler| {
        scheduler.num_lookahead_slots = LOOKAHEAD;
        scheduler.max_model_len = 10;
    });
    let (mut scheduler, step_id) = two_decodes(&limits);
    let error = propose(&mut scheduler, step_id, &[(0, vec![1, 2, 3])]).unwrap_err();
    assert!(error.to_string().contains("2 tokens to max_model_len"), "{error}");
    propose(&mut scheduler, step_id, &[(0, vec![1, 2])]).unwrap();
    let outputs = [0, 1].map(|row| Output { row, token: 5, finish: row == 0 });
    let accepted = |row| if row == 0 { vec![1, 2] } else { Vec::new() };
    update_drafted(&mut scheduler, step_id, &outputs, accepted).unwrap();
    scheduler.check().unwrap();
}

#[test]
fn a_prefill_has_no_drafts_and_a_fork_is_one_row_more() {
    let mut scheduler = limits().scheduler();
    add_wide(&mut scheduler, 10, 6, 2);
    let step_id = scheduler.schedule(0.0).unwrap().step_id;
    let error = propose(&mut scheduler, step_id, &[(0, vec![1])]).unwrap_err();
    assert!(error.to_string().contains("from 1 on"), "{error}");
    let forks = [1, 2].map(|token| Output { row: 0, token, finish: false });
    update(&mut scheduler, step_id, &forks).unwrap();
    let step_id = scheduler.schedule(0.0).unwrap().step_id;
    propose(&mut scheduler, step_id, &[(0, vec![3]), (1, vec![4, 5])]).unwrap();
    let outputs = one_each(&scheduler, 9);
    let accepted = |row| if row == 0 { vec![3] } else { vec![4] };
    let handles = update_drafted(&mut scheduler, step_id, &outputs, accepted).unwrap();
    scheduler.check().unwrap();
    for seq in handles {
        let tokens = scheduler.sequence(seq).unwrap().token_ids().to_vec();
        assert!(matches!(tokens[6..], [1 | 2, 3 | 4, 9]), "{tokens:?}");
    }
}

#[test]
fn a_row_that_runs_ahead_leaves_its_sibling_the_blocks_that_it_sees() {
    // The first sequence's ring wraps to the block of their first token, which the second sees.
    let limits = Limits::with(|cache, scheduler| {
        (cache.block_size, cache.sliding_window) = (1, Some(11));
        scheduler.num_lookahead_slots = 2;
    });
    let mut scheduler = limits.scheduler();
    add_wide(&mut scheduler, 10, 8, 2);
    let step_id = scheduler.schedule(0.0).unwrap().step_id;
    let forks = [1, 2].map(|token| Output { row: 0, token, finish: false });
    update(&mut scheduler, step_id, &forks).unwrap();
    let step_id = scheduler.schedule(0.0).unwrap().step_id;
    propose(&mut scheduler, step_id, &[(0, vec![3, 4])]).unwrap();
    let outputs = one_each(&scheduler, 9);
    let accepted = |row| if row == 0 { vec![3, 4] } else { Vec::new() };
    update_drafted(&mut scheduler, step_id, &outputs, accepted).unwrap();
    scheduler.schedule(0.0).unwrap();
    let arrays = Arrays::filled(&scheduler, &limits);
    let tables: Vec<&[i32]> =
        arrays.block_tables.chunks(scheduler.outputs().max_num_blocks).collect();
    assert_ne!(tables[0][13], tables[1][0]);
}
