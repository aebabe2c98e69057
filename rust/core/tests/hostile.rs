//! Fuzz target for external input: requests and step results of any kind either return an error and
//! change nothing, or are accepted and keep every invariant.  They never panic.
//!
//! `PAGEDSERVE_FUZZ_CASES` sets the number of cases (default 3,000).

#![allow(
    clippy::unwrap_used,
    clippy::disallowed_types,
    clippy::disallowed_methods,
    missing_docs,
    reason = "proptest shares strategies by Arc; the number of cases comes from outside"
)]

mod common;

use common::{Limits, add_wide, one_each, update};
use pagedserve_core::config::KvGroup;
use pagedserve_core::hash::PrefixKey;
use pagedserve_core::scheduler::{SampledOutputs, Scheduler};
use pagedserve_core::sequence::Request;
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};

/// Integers near the edges, and near what a small step has.
fn integer() -> impl Strategy<Value = i32> {
    prop_oneof![-3..12i32, Just(i32::MIN), Just(i32::MAX), any::<i32>()]
}

fn integers() -> impl Strategy<Value = Vec<i32>> {
    prop_oneof![
        prop::collection::vec(integer(), 0..12),
        (0..12i32).prop_map(|end| (0..end).collect()),
    ]
}

#[derive(Clone, Debug)]
struct Hostile {
    prompt: Vec<i32>,
    arrival_time: f64,
    width: usize,
    adapter: u32,
    num_encoder_tokens: usize,
    now: f64,
    step_offset: u64,
    parent_rows: Vec<i32>,
    token_start: Vec<i32>,
    tokens: Vec<i32>,
    finish: Vec<u8>,
    is_async: bool,
}

fn hostile() -> impl Strategy<Value = Hostile> {
    let seconds = || prop_oneof![any::<f64>(), Just(0.0), Just(f64::NAN), Just(f64::INFINITY)];
    let request = (integers(), seconds(), 0..20usize, 0..4u32, 0..80usize);
    let step = (seconds(), prop_oneof![4 => Just(0u64), 1 => any::<u64>()]);
    let results = (integers(), integers(), integers(), prop::collection::vec(any::<u8>(), 0..12));
    let all = (request, step, results, any::<bool>());
    all.prop_map(|(request, step, results, is_async)| Hostile {
        is_async,
        prompt: request.0,
        arrival_time: request.1,
        width: request.2,
        adapter: request.3,
        num_encoder_tokens: request.4,
        now: step.0,
        step_offset: step.1,
        parent_rows: results.0,
        token_start: results.1,
        tokens: results.2,
        finish: results.3,
    })
}

fn unchanged_or_sound<T, E>(before: &str, result: &Result<T, E>, scheduler: &Scheduler) {
    if result.is_err() {
        assert_eq!(format!("{scheduler:?}"), before, "a refusal changes nothing");
    }
    scheduler.check().unwrap();
}

fn attack(scheduler: &mut Scheduler, with: &Hostile) {
    let before = format!("{scheduler:?}");
    let mut request = Request::new(&with.prompt, with.arrival_time);
    request.max_num_running_seqs = with.width;
    request.key = PrefixKey { adapter: with.adapter, salt: 0 };
    request.num_encoder_tokens = with.num_encoder_tokens;
    let result = scheduler.add_seq_group(&request);
    unchanged_or_sound(&before, &result, scheduler);
    let before = format!("{scheduler:?}");
    let result = scheduler.schedule(with.now).map(|_| ());
    unchanged_or_sound(&before, &result, scheduler);
    let open = scheduler.outputs().step_id.wrapping_add(with.step_offset);
    let before = format!("{scheduler:?}");
    let results = SampledOutputs {
        parent_rows: &with.parent_rows,
        token_start: &with.token_start,
        tokens: &with.tokens,
        finish: &with.finish,
    };
    let result = scheduler.update(open, results).map(|_| ());
    unchanged_or_sound(&before, &result, scheduler);
    if with.is_async {
        let before = format!("{scheduler:?}");
        let result = scheduler.update_async(open);
        unchanged_or_sound(&before, &result, scheduler);
    }
    let before = format!("{scheduler:?}");
    let result = scheduler.resolve_tokens(open.wrapping_sub(with.step_offset), &with.tokens);
    unchanged_or_sound(&before, &result, scheduler);
    if with.step_offset % 2 == 1 {
        let before = format!("{scheduler:?}");
        let result = scheduler.abandon(open);
        unchanged_or_sound(&before, &result, scheduler);
    }
}

#[test]
fn hostile_arguments_are_an_error_or_harmless() {
    let cases = std::env::var("PAGEDSERVE_FUZZ_CASES")
        .map_or(3_000, |cases| cases.parse().expect("PAGEDSERVE_FUZZ_CASES is a number"));
    let mut runner = TestRunner::new(Config { cases, ..Config::default() });
    let strategy = (prop::collection::vec(hostile(), 1..8), any::<bool>(), 0..3usize);
    let run = |(attacks, enable_prefix_caching, num_lookahead_slots)| {
        let limits = Limits::with(|cache, scheduler| {
            cache.num_gpu_blocks = 24;
            cache.enable_prefix_caching = enable_prefix_caching;
            cache.groups = vec![KvGroup::cross()];
            scheduler.num_lookahead_slots = num_lookahead_slots;
            scheduler.max_loras = Some(2);
        });
        let mut scheduler = limits.scheduler();
        add_wide(&mut scheduler, 0, 5, 2);
        add_wide(&mut scheduler, 9, 3, 1);
        for arguments in &attacks {
            attack(&mut scheduler, arguments);
        }
        // Still usable: the open step is ended, and another step succeeds.
        let open = scheduler.outputs().step_id;
        let outputs = one_each(&scheduler, 1);
        let _ = update(&mut scheduler, open, &outputs).is_err() && scheduler.abandon(open).is_err();
        scheduler.check().unwrap();
        Ok(())
    };
    runner.run(&strategy, run).unwrap();
}
