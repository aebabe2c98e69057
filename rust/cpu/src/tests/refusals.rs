//! Arguments that do not fit each other are refused by name, before memory is touched.
#![allow(unsafe_code, reason = "the call under test takes pointers")]

use super::common::{Case, Step};
use crate::attention::{CacheDType, Options};
use crate::linear::{Panels, Weights};
use crate::{InstructionSet, Result};

/// The refusal of a step that a change has spoilt, whose pool and output must be as before.
fn refusal(change: impl FnOnce(&mut Step)) -> String {
    let mut step = Step::new(&Case::plain(&[(20, 1), (0, 3)]));
    change(&mut step);
    let before = (step.pool.bytes.clone(), step.output.bytes.clone());
    let answer: Result<Vec<f32>> = step.run(InstructionSet::detect(), 2);
    assert_eq!(before, (step.pool.bytes, step.output.bytes));
    answer.expect_err("a spoilt step").to_string()
}

macro_rules! refusals {
    ($($name:ident: $change:expr => $text:literal;)*) => {$(
        #[test]
        fn $name() {
            let text = refusal($change);
            assert!(text.contains($text), "{text}");
        }
    )*};
}

refusals! {
    no_heads: |step| step.shape.num_heads = 0 => "num_heads must be at least 1";
    no_block_size: |step| step.shape.block_size = 0 => "block_size must be at least 1";
    odd_blocks_of_int8: |step| (step.shape.cache_dtype, step.shape.block_size) = (CacheDType::Int8, 8) => "block_size and value_size must be multiples of 16";
    uneven_groups: |step| step.shape.num_heads = 5 => "num_heads must be a multiple";
    a_huge_pool: |step| step.shape.num_blocks = usize::MAX / 8 => "more bytes than";
    a_scale_of_nan: |step| step.case.scale = f32::NAN => "scale must be finite";
    an_empty_window: |step| step.case.window = Some(0) => "window must be at least 1";
    a_negative_cap: |step| step.case.softcap = Some(-1.0) => "softcap must be positive";
    too_few_sinks: |step| step.sinks = Some(vec![0.0]) => "sinks must hold one score";
    too_few_slopes: |step| step.alibi = Some(vec![0.5; 5]) => "alibi must hold one slope for each of 6";
    biases_of_some_heads: |step| step.position_bias = Some(vec![0.5; 7]) => "position_bias must hold as many biases for each of 6";
    biases_ahead: |step| (step.position_bias, step.case.causal) = (Some(vec![0.5; 6]), false) => "causal must be true";
    an_infinite_slope: |step| step.alibi = Some([vec![0.5; 5], vec![f32::INFINITY]].concat()) => "alibi must hold finite slopes; got inf";
    huge_strides: |step| step.key.token_stride = usize::MAX => "the strides of key";
    no_query_start: |step| step.query_start.clear() => "query_start must have one entry more";
    a_late_first_row: |step| step.query_start[0] = 1 => "query_start must go from 0";
    an_early_end: |step| step.query_start[2] = 3 => "query_start must go from 0 to 4";
    a_falling_start: |step| step.query_start[1] = 5 => "query_start must not fall; row 1";
    more_queries_than_keys: |step| step.seq_lens[1] = 2 => "row 1 has 3 queries and only 2 keys";
    negative_keys: |step| step.seq_lens[0] = -1 => "row 0 has 1 queries and only -1";
    uneven_tables: |step| step.block_tables.push(0) => "block_tables must hold equally many";
    more_keys_than_blocks: |step| step.seq_lens[0] = 90 => "seq_lens needs 90";
    no_blocks: |step| step.block_tables.clear() => "has 0 blocks";
    a_block_too_high: |step| step.block_tables[1] = 5 => "block_tables[0, 1] must be one of";
    a_negative_block: |step| step.block_tables[0] = -1 => "block_tables[0, 0] must be one of";
    a_slot_too_high: |step| step.slot_mapping[2] = 5 * 16 => "slot_mapping[2] must be -1 or";
    a_slot_below_none: |step| step.slot_mapping[0] = -2 => "slot_mapping[0] must be -1 or";
}

type Spoil = fn(&mut crate::attention::Memory);

#[test]
fn addresses_that_cannot_be_are_refused() {
    let mut step = Step::new(&Case::plain(&[(20, 1)]));
    let memory = step.memory();
    let spoilt: [(&str, Spoil); 4] = [
        ("pool", |memory| memory.pool = std::ptr::null_mut()),
        ("output", |memory| memory.output = memory.output.wrapping_add(1)),
        ("query", |memory| memory.query.pointer = std::ptr::null()),
        ("value", |memory| memory.value.pointer = memory.value.pointer.wrapping_add(2)),
    ];
    for (name, spoil) in spoilt {
        let mut memory = memory;
        spoil(&mut memory);
        let options: Options<'_> = step.options();
        let execution = crate::Execution {
            instructions: InstructionSet::Portable,
            team: &crate::Sequential,
            num_threads: 1,
        };
        // SAFETY: the call is refused before any memory is touched, which this tests.
        let answer = unsafe {
            crate::attention::paged_attention(
                &step.shape,
                &memory,
                &step.rows(),
                &options,
                &execution,
            )
        };
        let text = answer.expect_err("a spoilt address").to_string();
        assert!(text.starts_with(&format!("{name} must be the address")), "{text}");
    }
}

#[test]
fn weights_that_are_not_as_their_fields_say_are_refused() {
    let refusal = |num_values: usize, num_scales: usize| {
        let (values, scales) = (vec![0; num_values], vec![0.0; num_scales]);
        let panels = Panels::Int8 { values: &values, scales: &scales };
        let dtype = crate::DType::Float32;
        let weights = Weights {
            dtype,
            weight_dtype: dtype,
            in_features: 3,
            out_features: 70,
            panels,
            bias: None,
        };
        weights.check().map_err(|error| error.to_string())
    };
    assert_eq!(refusal(384, 70), Ok(()));
    let text = refusal(383, 70).expect_err("a short panel");
    assert!(text.contains("70 in 3 features must have 384 int8; got 383"), "{text}");
    let text = refusal(384, 128).expect_err("a scale for each padded feature");
    assert!(text.contains("scales must have 70 numbers; got 128"), "{text}");
}
