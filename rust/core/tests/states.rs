//! State slots: which sequences have one, what is copied and moved, and what a sequence computes.

#![allow(clippy::unwrap_used, missing_docs)]

mod common;

use common::arrays::Arrays;
use common::{Limits, Output, add, add_wide, assert_all_returned, one_each, update};
use pagedserve_core::config::{KvGroup, PreemptionMode};
use pagedserve_core::outputs::SchedulerOutputs;
use pagedserve_core::scheduler::Scheduler;

fn with_states(num_cpu_state_slots: usize) -> Limits {
    Limits::with(|cache, scheduler| {
        cache.num_cpu_blocks = 64;
        let mut group = KvGroup::state(scheduler.max_num_seqs);
        group.num_cpu_blocks = num_cpu_state_slots;
        cache.groups = vec![group];
        scheduler.preemption_mode = Some(PreemptionMode::Swap);
    })
}

/// The decisions of the next step and the slot of each row; it ends with the outputs of `sample`.
fn step(
    scheduler: &mut Scheduler,
    limits: &Limits,
    sample: impl FnOnce(&Scheduler) -> Vec<Output>,
) -> (SchedulerOutputs, Vec<i32>) {
    let outputs = scheduler.schedule(0.0).unwrap().clone();
    scheduler.check().unwrap();
    let mut slots = Arrays::filled(scheduler, limits).group_tables.remove(0);
    slots.truncate(outputs.rows.len());
    let sampled = sample(scheduler);
    update(scheduler, outputs.step_id, &sampled).unwrap();
    scheduler.check().unwrap();
    (outputs, slots)
}

fn slots_of(
    pairs: &[(pagedserve_core::ids::BlockId, pagedserve_core::ids::BlockId)],
) -> Vec<(usize, usize)> {
    pairs.iter().map(|(from, to)| (from.index(), to.index())).collect()
}

fn three_of_the_first(_: &Scheduler) -> Vec<Output> {
    (1..4).map(|token| Output { row: 0, token, finish: false }).collect()
}

#[test]
fn forks_get_copies_when_they_run_and_the_last_keeps_the_slot() {
    let limits = with_states(0);
    let mut scheduler = limits.scheduler();
    add_wide(&mut scheduler, 1, 5, 3);
    let (outputs, slots) = step(&mut scheduler, &limits, three_of_the_first);
    assert_eq!((slots, outputs.moves[1].copy.len()), (vec![0], 0));
    let (outputs, slots) = step(&mut scheduler, &limits, |s| one_each(s, 7));
    assert_eq!(slots_of(&outputs.moves[1].copy), [(0, 1), (0, 2)]);
    assert_eq!(slots, [1, 2, 0]);
    assert!(outputs.has_moves());
    let (outputs, slots) = step(&mut scheduler, &limits, |s| one_each(s, 7));
    assert_eq!((outputs.moves[1].copy.len(), slots), (0, vec![1, 2, 0]));
}

#[test]
fn a_child_takes_over_the_slot_of_a_parent_that_ended() {
    let limits = with_states(0);
    let mut scheduler = limits.scheduler();
    add_wide(&mut scheduler, 1, 5, 2);
    let parent_ends = |_: &Scheduler| {
        vec![Output { row: 0, token: 1, finish: false }, Output { row: 0, token: 2, finish: true }]
    };
    step(&mut scheduler, &limits, parent_ends);
    let (outputs, slots) = step(&mut scheduler, &limits, |s| one_each(s, 7));
    assert_eq!((outputs.moves[1].copy.len(), slots), (0, vec![0]));
}

/// Two groups outgrow the blocks; the younger, three sequences, is preempted with its shared state.
fn crowded(num_cpu_state_slots: usize) -> (Limits, Scheduler) {
    let mut limits = with_states(num_cpu_state_slots);
    limits.cache.num_gpu_blocks = 6;
    let mut scheduler = limits.scheduler();
    add(&mut scheduler, 20, 12);
    add_wide(&mut scheduler, 1, 8, 3);
    (limits, scheduler)
}

#[test]
fn a_shared_state_is_swapped_once_and_comes_back_shared() {
    let (limits, mut scheduler) = crowded(8);
    let fork_second = |_: &Scheduler| {
        let forks = (1..4).map(|token| Output { row: 1, token, finish: false });
        [Output { row: 0, token: 1, finish: false }].into_iter().chain(forks).collect()
    };
    step(&mut scheduler, &limits, fork_second);
    let (outputs, slots) =
        step(&mut scheduler, &limits, |_| vec![Output { row: 0, token: 1, finish: true }]);
    assert_eq!(slots_of(&outputs.moves[1].swap_out), [(1, 0)]);
    assert_eq!((slots, outputs.rows.len()), (vec![0], 1));
    let (outputs, slots) = step(&mut scheduler, &limits, |s| one_each(s, 7));
    assert_eq!(outputs.moves[1].swap_in.len(), 1);
    assert_eq!(outputs.moves[1].copy.len(), 2, "copied once they run");
    assert_eq!(slots.len(), 3);
}

#[test]
fn without_slots_on_the_host_siblings_are_computed_again_each_from_its_first_token() {
    let (limits, mut scheduler) = crowded(0);
    step(&mut scheduler, &limits, |_| {
        vec![
            Output { row: 0, token: 1, finish: false },
            Output { row: 1, token: 1, finish: false },
            Output { row: 1, token: 2, finish: false },
        ]
    });
    let (outputs, _) =
        step(&mut scheduler, &limits, |_| vec![Output { row: 0, token: 1, finish: true }]);
    assert_eq!(outputs.preempted[0].1, PreemptionMode::Recompute);
    let outputs = scheduler.schedule(0.0).unwrap().clone();
    let arrays = Arrays::filled(&scheduler, &limits);
    assert_eq!(outputs.rows.iter().map(|row| row.num_tokens).collect::<Vec<_>>(), [9, 9]);
    assert_eq!((arrays.positions[0], arrays.positions[9]), (0, 0));
    assert_eq!(arrays.slot_mapping[9..17], [-1; 8], "its sibling writes what they share");
    assert_ne!(arrays.group_tables[0][0], arrays.group_tables[0][1]);
}

#[test]
fn an_abandoned_step_and_an_abort_give_their_slots_back() {
    let limits = with_states(8);
    let mut scheduler = limits.scheduler();
    let (group, _) = add_wide(&mut scheduler, 1, 5, 3);
    step(&mut scheduler, &limits, three_of_the_first);
    let step_id = scheduler.schedule(0.0).unwrap().step_id;
    scheduler.abandon(step_id).unwrap();
    scheduler.check().unwrap();
    let (outputs, slots) = step(&mut scheduler, &limits, |s| one_each(s, 7));
    assert_eq!((outputs.moves[1].copy.len(), slots.len()), (0, 3), "each begins anew");
    scheduler.abort(group).unwrap();
    assert_all_returned(&scheduler);
}

#[test]
fn prefixes_are_not_shared_where_layers_keep_states() {
    let mut limits = with_states(0);
    limits.cache.enable_prefix_caching = true;
    let refusal = Scheduler::new(limits.scheduler.clone(), &limits.cache).unwrap_err().to_string();
    assert!(refusal.contains("enable_prefix_caching"), "{refusal}");
}
