//! Adapter slots: who has one, what is loaded into them and when.

#![allow(clippy::unwrap_used, missing_docs)]

mod common;

use common::{Limits, Output, one_each, sampled_rows, update};
use pagedserve_core::hash::PrefixKey;
use pagedserve_core::scheduler::Scheduler;
use pagedserve_core::sequence::{GroupHandle, Request};

fn with_slots(max_loras: usize) -> Scheduler {
    Limits::with(|_, scheduler| scheduler.max_loras = Some(max_loras)).scheduler()
}

fn add(scheduler: &mut Scheduler, adapter: u32) -> GroupHandle {
    let key = PrefixKey { adapter, salt: 0 };
    scheduler.add_seq_group(&Request { key, ..Request::new(&[1, 2, 3], 0.0) }).unwrap().0
}

/// A step in which every sampled row ends if `finish`: what was loaded, and the slot of each row.
fn step(scheduler: &mut Scheduler, finish: bool) -> (Vec<(u32, i32)>, Vec<i32>) {
    let outputs = scheduler.schedule(0.0).unwrap();
    let step_id = outputs.step_id;
    let slots = outputs.rows.iter().map(|row| row.adapter_slot).collect();
    let loads = outputs.adapters_to_load.clone();
    let rows = sampled_rows(scheduler).into_iter();
    let sampled: Vec<Output> = rows.map(|row| Output { row, token: 7, finish }).collect();
    scheduler.check().unwrap();
    update(scheduler, step_id, &sampled).unwrap();
    scheduler.check().unwrap();
    (loads, slots)
}

#[test]
fn rows_name_the_slot_of_their_adapter_and_it_is_loaded_once() {
    let mut scheduler = with_slots(2);
    for adapter in [8, 0, 5, 8] {
        add(&mut scheduler, adapter);
    }
    assert_eq!(step(&mut scheduler, false), (vec![(8, 0), (5, 1)], vec![0, -1, 1, 0]));
    assert_eq!(step(&mut scheduler, false), (vec![], vec![0, -1, 1, 0]));
    add(&mut scheduler, 5);
    assert_eq!(step(&mut scheduler, true), (vec![], vec![1]));
}

#[test]
fn an_adapter_stays_in_its_slot_until_another_needs_it() {
    let mut scheduler = with_slots(2);
    for adapter in [1, 2] {
        add(&mut scheduler, adapter);
        step(&mut scheduler, true);
    }
    add(&mut scheduler, 1);
    assert_eq!(step(&mut scheduler, true), (vec![], vec![0]), "nobody needed its slot");
    add(&mut scheduler, 3);
    assert_eq!(step(&mut scheduler, true), (vec![(3, 1)], vec![1]), "2 ran longest ago");
    add(&mut scheduler, 1);
    add(&mut scheduler, 2);
    let (loads, slots) = step(&mut scheduler, true);
    assert_eq!((loads, slots), (vec![(2, 1)], vec![0, 1]), "1 runs, so the slot of 3 goes");
}

#[test]
fn a_slot_that_a_running_group_has_is_not_given_away() {
    let mut scheduler = with_slots(1);
    let first = add(&mut scheduler, 1);
    step(&mut scheduler, false);
    let second = add(&mut scheduler, 2);
    assert_eq!(step(&mut scheduler, false), (vec![], vec![0]));
    assert!(scheduler.queues().waiting.contains(&second));
    scheduler.abort(first).unwrap();
    assert_eq!(step(&mut scheduler, false), (vec![(2, 0)], vec![0]));
}

#[test]
fn the_loads_of_an_abandoned_step_come_again() {
    let mut scheduler = with_slots(2);
    add(&mut scheduler, 1);
    step(&mut scheduler, false);
    add(&mut scheduler, 2);
    let outputs = scheduler.schedule(0.0).unwrap();
    assert_eq!(outputs.adapters_to_load, [(2, 1)]);
    let step_id = outputs.step_id;
    scheduler.abandon(step_id).unwrap();
    assert_eq!(step(&mut scheduler, false), (vec![(2, 1)], vec![1]));
    assert_eq!(step(&mut scheduler, false), (vec![], vec![0, 1]), "1 was there all the time");
}

#[test]
fn the_loads_of_a_step_that_fails_after_the_next_was_launched_come_again() {
    let mut scheduler = with_slots(2);
    add(&mut scheduler, 1);
    let first = scheduler.schedule(0.0).unwrap().step_id;
    assert!(scheduler.update_async(first).unwrap());
    add(&mut scheduler, 2);
    let outputs = scheduler.schedule(0.0).unwrap();
    assert_eq!(outputs.adapters_to_load, [(2, 1)]);
    scheduler.abandon(first).unwrap();
    scheduler.check().unwrap();
    assert_eq!(step(&mut scheduler, false).0, [(1, 0), (2, 1)]);
}

#[test]
fn a_load_launched_ahead_is_not_made_again_once_its_step_is_known() {
    let mut scheduler = with_slots(1);
    add(&mut scheduler, 1);
    let outputs = scheduler.schedule(0.0).unwrap();
    let (first, loads) = (outputs.step_id, outputs.adapters_to_load.clone());
    assert_eq!(loads, [(1, 0)]);
    assert!(scheduler.update_async(first).unwrap());
    assert_eq!(scheduler.schedule(0.0).unwrap().adapters_to_load, []);
    scheduler.resolve_tokens(first, &[4]).unwrap();
    let step_id = scheduler.outputs().step_id;
    let outputs = one_each(&scheduler, 4);
    update(&mut scheduler, step_id, &outputs).unwrap();
    add(&mut scheduler, 1);
    assert_eq!(step(&mut scheduler, false).0, []);
}
