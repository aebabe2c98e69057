//! Every instruction set against the naive model, over pools poisoned with NaN.
#![allow(clippy::disallowed_types, reason = "proptest's macros name them")]

use super::common::{CACHE_DTYPES, Case, DTYPES, Step};
use crate::attention::CacheDType;
use crate::{DType, InstructionSet};
use proptest::prelude::*;

prop_compose! {
    fn sizes()(
        (num_kv_heads, group) in prop_oneof![
            9 => (1_usize..4, prop::sample::select(vec![1_usize, 2, 3, 4, 7, 8])),
            1 => Just((1, 60)), // more than a tile has rows
        ],
        (key_size, value_size) in prop::sample::select(vec![
            (64, 64), (80, 80), (96, 96), (128, 128), (16, 48), (20, 16), (1, 1), (7, 5), (32, 20),
            (33, 16),
        ]),
        block_size in prop::sample::select(vec![16_usize, 16, 32, 48, 1, 3, 8, 20]),
    ) -> (usize, usize, usize, usize, usize) {
        (num_kv_heads, group, key_size, value_size, block_size)
    }
}

fn rows() -> impl Strategy<Value = Vec<(usize, usize)>> {
    let row = prop_oneof![
        3 => (0_usize..300, Just(1_usize)),
        1 => (0_usize..150, 0_usize..40),
        1 => (Just(0_usize), 1_usize..110),
        1 => (400_usize..700, Just(1_usize)),
    ];
    prop::collection::vec(row, 1..5)
}

prop_compose! {
    fn cases()(
        (num_kv_heads, group, key_size, value_size, block_size) in sizes(),
        rows in rows(),
        dtype in prop::sample::select(DTYPES.to_vec()),
        cache_dtype in prop::sample::select(CACHE_DTYPES.to_vec()),
        scale in prop_oneof![Just(0.125_f32), Just(1.0), Just(-0.3), Just(0.0)],
        window in prop::option::weighted(0.3, 1_usize..200),
        softcap in prop::option::weighted(0.3, prop_oneof![Just(0.5_f32), Just(30.0)]),
        sinks in prop::option::weighted(0.3, Just(4.0_f32)),
        alibi in prop::option::weighted(0.3, prop_oneof![Just(0.7_f32), Just(-0.01)]),
        num_biases in prop::option::weighted(0.3, 1_usize..200),
        causal in any::<bool>(),
        shares_prefix in any::<bool>(),
        gap in 0_usize..3,
        seed in any::<u64>(),
    ) -> Case {
        let has_panels = block_size.is_multiple_of(16) && value_size.is_multiple_of(16);
        Case {
            cache_dtype: if has_panels { cache_dtype } else { CacheDType::Auto },
            dtype, num_kv_heads, group, key_size, value_size, block_size, rows, scale, window,
            softcap, sinks, num_biases,
            alibi: alibi.filter(|_| num_biases.is_none()),
            // Steep slopes of later keys make scores of hundreds, with roundings as large.
            causal: causal || alibi == Some(0.7) || num_biases.is_some(),
            // Under a window the first row may lack blocks that the others see.
            shares_prefix: shares_prefix && window.is_none(),
            gap, seed,
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 72, ..ProptestConfig::default() })]

    #[test]
    fn answers_are_those_of_the_model(case in cases(), num_threads in 1_usize..4) {
        case.check(num_threads);
    }
}

#[test]
fn every_fast_size_is_right() {
    for size in [64, 80, 96, 128, 256] {
        for (dtype, cache_dtype) in pools() {
            let case = Case {
                key_size: size,
                value_size: size,
                dtype,
                cache_dtype,
                ..Case::plain(&[(150, 1), (17, 30)])
            };
            case.check(2);
        }
    }
}

/// Queries of each dtype with each pool.
fn pools() -> impl Iterator<Item = (DType, CacheDType)> {
    DTYPES.into_iter().flat_map(|dtype| CACHE_DTYPES.map(|cache_dtype| (dtype, cache_dtype)))
}

/// A pool of bytes keeps that a number is not finite.
#[test]
fn a_key_or_value_that_is_no_number_spoils_its_own_row_alone() {
    for (number, cache_dtype) in [f32::NAN, f32::INFINITY]
        .into_iter()
        .flat_map(|number| CACHE_DTYPES[1..].iter().map(move |&kind| (number, kind)))
    {
        for of_value in [false, true] {
            let mut step =
                Step::new(&Case { cache_dtype, seed: 2, ..Case::plain(&[(0, 3), (0, 3)]) });
            let tensor = if of_value { &mut step.value } else { &mut step.key };
            step.slot_mapping[0] = i64::from(step.block_tables[0]) * 16;
            tensor.numbers.set(5, number);
            let answer = step.run(InstructionSet::detect(), 1).expect("a correct step");
            let (first, second) = answer.split_at(answer.len() / 2);
            assert!(first[..32].iter().all(|number| number.is_nan()), "{number} {of_value}");
            assert!(second.iter().all(|number| number.is_finite()), "{number} {of_value}");
        }
    }
}

/// Invariant 3: neither threads, nor the batch, nor the cuts of a prompt change the output.
#[test]
fn the_answer_of_a_query_depends_on_its_row_alone() {
    for (dtype, cache_dtype) in pools() {
        let case = Case { dtype, cache_dtype, alibi: Some(0.01), ..Case::plain(&[(0, 700)]) };
        let mut step = Step::new(&case);
        let whole = step.run(InstructionSet::detect(), 1).expect("a correct step");
        let per_token = whole.len() / 700;
        for (first, num_threads) in [(699, 1), (699, 3), (650, 2), (131, 1)] {
            let answer = step.run_tail(first, num_threads); // the keys before it are in the cache
            assert_eq!(answer, whole[first * per_token..], "from {first}, {num_threads} threads");
        }
    }
}

#[test]
fn a_step_without_tokens_is_answered() {
    let mut step = Step::new(&Case::plain(&[]));
    assert_eq!(step.run(InstructionSet::detect(), 2), Ok(vec![]));
}

#[test]
fn a_steep_slope_leaves_each_query_its_own_key() {
    for dtype in DTYPES {
        Case { dtype, alibi: Some(f32::MAX), ..Case::plain(&[(200, 1), (0, 5)]) }.check(2);
    }
}
