//! Adapter slots: which adapters have one, what is loaded into them and when.

#![allow(clippy::unwrap_used, missing_docs)]

mod common;

use common::{Limits, Output, one_each, sampled_rows, update};
use pagedserve_core::hash::PrefixKey;
use pagedserve_core::scheduler::Scheduler;
use pagedserve_core::sequence::{GroupHandle, Request};
use proptest::prelude::*;
use proptest::test_runner::Config;

fn with_slots(max_loras: usize) -> Scheduler {
    Limits::with(|_, scheduler| scheduler.max_loras = Some(max_loras)).scheduler()
}

fn add(scheduler: &mut Scheduler, adapter: u32) -> GroupHandle {
    let key = PrefixKey { adapter, salt: 0 };
    let request = Request::new(&[1, 2, 3], 0.0).with(|request| request.key = key);
    scheduler.add_seq_group(&request).unwrap().0
}

/// A step in which every sampled row ends if `finish`: its loads, and the slot of each row.
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
    assert_eq!(step(&mut scheduler, true), (vec![], vec![0]), "no other adapter needed its slot");
    add(&mut scheduler, 3);
    assert_eq!(step(&mut scheduler, true), (vec![(3, 1)], vec![1]), "2 ran longest ago");
    add(&mut scheduler, 1);
    add(&mut scheduler, 2);
    let (loads, slots) = step(&mut scheduler, true);
    assert_eq!((loads, slots), (vec![(2, 1)], vec![0, 1]), "1 runs, so 3 loses its slot");
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
    assert_eq!(step(&mut scheduler, false), (vec![], vec![0, 1]), "1 kept its slot");
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

/// Requests of three prompt tokens that come and go.
struct Load {
    scheduler: Scheduler,
    clients: Vec<Client>,
    num_steps: usize,
}

struct Client {
    group: GroupHandle,
    adapter: u32,
    num_tokens_left: usize,
    /// Steps, counted from 1: when it arrived, and when it first ran.
    came: usize,
    ran: Option<usize>,
}

impl Load {
    fn new(scheduler: Scheduler) -> Self {
        Self { scheduler, clients: Vec::new(), num_steps: 0 }
    }

    fn add(&mut self, adapter: u32, num_tokens_left: usize) {
        let group = add(&mut self.scheduler, adapter);
        let came = self.num_steps;
        self.clients.push(Client { group, adapter, num_tokens_left, came, ran: None });
    }

    /// Whether a live request meets a condition.
    fn has(&self, is_so: impl Fn(&Client) -> bool) -> bool {
        self.clients.iter().any(|client| client.num_tokens_left > 0 && is_so(client))
    }

    /// Runs a step; returns the adapters of the groups that it admitted.
    fn step(&mut self) -> Vec<u32> {
        let outputs = self.scheduler.schedule(0.0).unwrap().clone();
        self.scheduler.check().unwrap();
        self.num_steps += 1;
        let (mut admitted, mut sampled) = (Vec::new(), Vec::new());
        for (row, scheduled) in outputs.scheduled_seq_groups.iter().enumerate() {
            let of_group = |client: &&mut Client| client.group == scheduled.group;
            let client = self.clients.iter_mut().find(of_group).unwrap();
            if client.ran.is_none() {
                client.ran = Some(self.num_steps);
                admitted.push(client.adapter);
            }
            client.num_tokens_left -= 1;
            sampled.push(Output { row, token: 7, finish: client.num_tokens_left == 0 });
        }
        if !outputs.is_empty() {
            update(&mut self.scheduler, outputs.step_id, &sampled).unwrap();
        }
        admitted
    }
}

/// The adapters in the order of admission, where 1 and 2 have the slots, always with two requests
/// each, and 3 arrives in between.
fn admissions(drain_adapters: bool) -> Vec<u32> {
    let limits = Limits::with(|_, scheduler| {
        scheduler.enable_chunked_prefill = true;
        (scheduler.max_loras, scheduler.max_num_seqs) = (Some(2), 5);
        scheduler.choices.drain_adapters = drain_adapters;
    });
    let mut load = Load::new(limits.scheduler());
    let mut admitted = Vec::new();
    for step in 0..40 {
        load.add(1 + step % 2, 4);
        if step == 4 {
            load.add(3, 4);
        }
        admitted.extend(load.step());
    }
    admitted
}

#[test]
fn an_adapter_that_is_always_wanted_gives_up_its_slot_after_a_batch() {
    let admitted = admissions(true);
    // 3 arrives after the first five, is passed by five more, and then by those of 2 alone until
    // the last of 1 has ended.
    assert_eq!(admitted[..13], [1, 2, 1, 2, 1, 2, 1, 2, 1, 2, 2, 3, 2]);
    assert!(admitted[13..].contains(&1), "1 gets its turn again");
    assert!(!admissions(false).contains(&3), "otherwise 3 waits indefinitely");
}

#[test]
fn a_step_looks_no_further_than_a_batch_behind_who_waits_for_a_slot() {
    let mut scheduler = with_slots(1);
    add(&mut scheduler, 1);
    step(&mut scheduler, false);
    for _ in 0..100 {
        add(&mut scheduler, 2);
    }
    let max_num_seqs = Limits::default().scheduler.max_num_seqs;
    assert_eq!(scheduler.schedule(0.0).unwrap().refused.len(), max_num_seqs + 1);
}

proptest! {
    #![proptest_config(Config { cases: 48, ..Config::default() })]

    /// As many adapters as there are slots are in use all the time: the next request of one arrives
    /// before the last one ends.  Any other adapter gets a slot all the same, after at most a batch
    /// of admissions and the length of a request for each adapter.
    #[test]
    fn no_adapter_starves(
        max_loras in 1..4usize,
        enable_chunked_prefill in any::<bool>(),
        max_num_bypasses in 0..3usize,
        lengths in prop::collection::vec(3..7usize, 8..24),
        others in prop::collection::vec(4..8u32, 4..12),
    ) {
        let limits = Limits::with(|_, scheduler| {
            scheduler.enable_chunked_prefill = enable_chunked_prefill;
            scheduler.max_num_bypasses = max_num_bypasses;
            scheduler.max_loras = Some(max_loras);
        });
        let mut load = Load::new(limits.scheduler());
        let (mut lengths, mut others) = (lengths.iter().cycle(), others.iter().cycle());
        let mut next_length = || *lengths.next().unwrap();
        let bound = (max_loras + 1) * (limits.scheduler.max_num_seqs + 2) * 2 * 7;
        for step in 0..2 * bound {
            for adapter in (1..).take(max_loras) {
                if !load.has(|client| client.adapter == adapter && client.num_tokens_left > 1) {
                    load.add(adapter, next_length());
                }
            }
            let is_wanted_always = |client: &Client| (1..4).contains(&client.adapter);
            if step % 5 == 4 && !load.has(|client| !is_wanted_always(client)) {
                load.add(others.next().unwrap() % 7, next_length()); // 7 is the base model
            }
            load.step();
        }
        for client in load.clients.iter().filter(|client| client.came < bound) {
            let waited = client.ran.expect("it never ran") - client.came;
            prop_assert!(waited <= bound, "adapter {} waited {waited} steps", client.adapter);
        }
    }
}
