//! Panels against the numbers that they are packed from.

use std::fs::{File, remove_file};
use std::io::Write;

use super::*;
use crate::isa::InstructionSet;
use crate::team::Sequential;

const DTYPES: [DType; 3] = [DType::Float32, DType::BFloat16, DType::Float16];

/// Numbers of both signs and many magnitudes, from a linear congruential generator.
fn numbers(num: usize, seed: u32) -> Vec<f32> {
    let mut state = seed;
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        #[expect(clippy::cast_precision_loss, reason = "any number will do")]
        let number = (state >> 8) as f32 / 8_388_608.0 - 1.0;
        number
    };
    (0..num).map(|_| next() * next()).collect()
}

fn rounded(number: f32, dtype: DType) -> f32 {
    match dtype {
        DType::Float32 => number,
        DType::BFloat16 => BFloat16::from_f32(number).to_f32(),
        DType::Float16 => Float16::from_f32(number).to_f32(),
    }
}

/// A file without a name that holds some bytes and then numbers.
fn file_of(numbers: &[f32]) -> File {
    static NUM_FILES: AtomicUsize = AtomicUsize::new(0);
    let number = NUM_FILES.fetch_add(1, Ordering::Relaxed);
    let name = format!("pagedserve-pack-{}-{number}", std::process::id());
    let path = std::env::temp_dir().join(name);
    let mut file = File::options()
        .read(true)
        .write(true)
        .create_new(true)
        .open(&path)
        .expect("a folder for temporary files");
    remove_file(&path).expect("a file of ours");
    let bytes: Vec<u8> = numbers.iter().flat_map(|number| number.to_le_bytes()).collect();
    file.write_all(&[7; OFFSET]).and_then(|()| file.write_all(&bytes)).expect("room");
    file
}

const OFFSET: usize = 5;

fn rows_of<'a>(file: &'a File, numbers: &[f32], depth: usize) -> Rows<'a> {
    Rows {
        file,
        offset: OFFSET as u64,
        num_rows: numbers.len() / depth,
        storage: Storage::Float32,
        interleaved: None,
    }
}

fn packed(
    parts: &[Rows<'_>],
    depth: usize,
    dtype: DType,
    is_gated: bool,
    panels: PanelsMut<'_>,
) -> std::result::Result<Vec<usize>, PackError> {
    let instructions = InstructionSet::detect();
    let execution = Execution { instructions, team: &Sequential, num_threads: 1 };
    let layer = Layer { parts: parts.to_vec(), in_features: depth, is_gated, panels };
    let odd = pack(vec![layer], dtype, &execution)?;
    Ok(odd.into_iter().next().expect("a layer"))
}

/// The number of an output feature and an input feature in packed units.
fn unit_number(units: &[u32], depth: usize, dtype: DType, feature: usize, k: usize) -> f32 {
    let per_unit = dtype.per_unit();
    let panel = feature / PANEL_FEATURES * depth / per_unit;
    let unit = units[(panel + k / per_unit) * PANEL_FEATURES + feature % PANEL_FEATURES];
    let bits = unit >> (k % per_unit * 16);
    match dtype {
        DType::Float32 => f32::from_bits(unit),
        DType::BFloat16 => f32::from_bits(bits << 16),
        DType::Float16 => Float16::from_bits(bits).to_f32(),
    }
}

#[test]
fn units_are_the_rounded_numbers_of_all_parts() {
    let depth = 306; // more than a chunk, no multiple of a vector
    let (first, second) = (numbers(50 * depth, 1), numbers(33 * depth, 2));
    let files = (file_of(&first), file_of(&second));
    let parts = [rows_of(&files.0, &first, depth), rows_of(&files.1, &second, depth)];
    for dtype in DTYPES {
        let mut units = vec![7; 2 * PANEL_FEATURES * depth / dtype.per_unit()];
        let odd = packed(&parts, depth, dtype, false, PanelsMut::Units(&mut units));
        assert_eq!(odd.expect("correct rows"), [0, 0]);
        let all: Vec<f32> = first.iter().chain(&second).copied().collect();
        for feature in 0..2 * PANEL_FEATURES {
            for k in 0..depth {
                let expected = all.get(feature * depth + k).copied().unwrap_or(0.0);
                let found = unit_number(&units, depth, dtype, feature, k);
                assert_eq!(found.to_bits(), rounded(expected, dtype).to_bits());
            }
        }
    }
}

#[test]
fn a_gate_and_what_it_gates_take_turns() {
    let depth = 4;
    let (gate, up) = (numbers(64 * depth, 3), numbers(64 * depth, 4));
    let files = (file_of(&gate), file_of(&up));
    let parts = [rows_of(&files.0, &gate, depth), rows_of(&files.1, &up, depth)];
    let mut units = vec![7; 2 * PANEL_FEATURES * depth];
    let odd = packed(&parts, depth, DType::Float32, true, PanelsMut::Units(&mut units));
    assert_eq!(odd.expect("correct rows"), [0, 0]);
    for row in 0..64 {
        for (half, from) in [&gate, &up].into_iter().enumerate() {
            let feature = row / HALF * PANEL_FEATURES + half * HALF + row % HALF;
            let found = unit_number(&units, depth, DType::Float32, feature, 1);
            assert_eq!(found.to_bits(), from[row * depth + 1].to_bits());
        }
    }
}

#[test]
fn interleaved_heads_are_put_in_order() {
    let depth = 2;
    let all = numbers(12 * depth, 5);
    let file = file_of(&all);
    let rows = Rows { interleaved: Some(6), ..rows_of(&file, &all, depth) };
    let mut units = vec![0; PANEL_FEATURES * depth];
    packed(&[rows], depth, DType::Float32, false, PanelsMut::Units(&mut units))
        .expect("correct rows");
    for (feature, place) in [0, 2, 4, 1, 3, 5, 6, 8, 10, 7, 9, 11].into_iter().enumerate() {
        let found = unit_number(&units, depth, DType::Float32, feature, 0);
        assert_eq!(found.to_bits(), all[place * depth].to_bits());
    }
}

#[test]
fn int8_weights_are_nearest_multiples_of_a_scale() {
    let depth = 300;
    let mut all = numbers(70 * depth, 6);
    all[3 * depth..4 * depth].fill(0.0);
    let file = file_of(&all);
    for dtype in DTYPES {
        let (mut values, mut scales) = (vec![7; 2 * PANEL_FEATURES * depth], vec![7.0; 70]);
        let panels = PanelsMut::Int8 { values: &mut values, scales: &mut scales };
        let rows = rows_of(&file, &all, depth);
        packed(&[rows], depth, dtype, false, panels).expect("correct rows");
        for feature in 0..70 {
            let row = &all[feature * depth..][..depth];
            let row: Vec<f32> = row.iter().map(|number| rounded(*number, dtype)).collect();
            let peak = row.iter().fold(0.0_f32, |peak, number| peak.max(number.abs()));
            assert_eq!(scales[feature].to_bits(), (peak / 127.0).to_bits());
            for (k, number) in row.iter().enumerate() {
                let panel = feature / PANEL_FEATURES * depth;
                let value = values[(panel + k) * PANEL_FEATURES + feature % PANEL_FEATURES];
                let error = (f32::from(value) * scales[feature] - number).abs();
                assert!(error <= 0.5001 * scales[feature], "{number} became {value}");
            }
        }
        let padding = &values[64 * depth + 6..];
        assert!(padding.iter().step_by(PANEL_FEATURES).all(|value| *value == 0));
    }
}

#[test]
fn numbers_that_are_not_finite_are_counted() {
    let (mut all, more) = (numbers(3 * 8, 7), numbers(8, 8));
    (all[5], all[17], all[18]) = (f32::NAN, f32::INFINITY, 1e6);
    let files = (file_of(&more), file_of(&all));
    for (dtype, num) in [(DType::Float32, 2), (DType::Float16, 3)] {
        let mut units = vec![0; PANEL_FEATURES * 8 / dtype.per_unit()];
        let parts = [rows_of(&files.0, &more, 8), rows_of(&files.1, &all, 8)];
        let odd = packed(&parts, 8, dtype, false, PanelsMut::Units(&mut units));
        assert_eq!(odd.expect("correct rows"), [0, num]);
    }
}

#[test]
fn what_does_not_fit_is_refused() {
    let all = numbers(32 * 32, 9);
    let file = file_of(&all);
    let rows = rows_of(&file, &all, 32);
    let refusal = |parts: &[Rows<'_>], depth, dtype, is_gated: bool, len: usize| {
        let mut units = vec![0; len];
        match packed(parts, depth, dtype, is_gated, PanelsMut::Units(&mut units)) {
            Err(PackError::Arguments(error)) => error.to_string(),
            other => panic!("no refusal but {other:?}"),
        }
    };
    let float = DType::Float32;
    assert!(refusal(&[], 32, float, false, 0).contains("must have a part"));
    assert!(refusal(&[rows], 32, float, false, 99).contains("must have 2048 elements; got 99"));
    assert!(refusal(&[rows], 32, float, true, 2048).contains("gated layer two"));
    assert!(refusal(&[rows], 31, DType::BFloat16, false, 992).contains("multiple of 2"));
    let blocks = Rows { storage: Storage::Q4K, ..rows };
    assert!(refusal(&[blocks], 32, float, false, 2048).contains("whole blocks of 256"));
    let heads = Rows { interleaved: Some(5), ..rows };
    assert!(refusal(&[heads], 32, float, false, 2048).contains("whole heads of an even size"));
}

#[test]
fn several_layers_are_packed_in_one_call() {
    let (first, second) = (numbers(130 * 6, 10), numbers(10 * 4, 11));
    let files = (file_of(&first), file_of(&second));
    let (rows, others) = (rows_of(&files.0, &first, 6), rows_of(&files.1, &second, 4));
    let mut units = (vec![7; 192 * 6], vec![7; 64 * 4]);
    let layer = |rows, in_features, panels| Layer {
        parts: vec![rows],
        in_features,
        is_gated: false,
        panels: PanelsMut::Units(panels),
    };
    let layers = vec![layer(rows, 6, &mut units.0), layer(others, 4, &mut units.1)];
    let instructions = InstructionSet::detect();
    let execution = Execution { instructions, team: &Sequential, num_threads: 1 };
    let odd = pack(layers, DType::Float32, &execution).expect("correct rows");
    assert_eq!(odd, [[0], [0]]);
    for (rows, depth, expected) in [(rows, 6, &mut units.0), (others, 4, &mut units.1)] {
        let mut alone = vec![7; expected.len()];
        packed(&[rows], depth, DType::Float32, false, PanelsMut::Units(&mut alone))
            .expect("correct rows");
        assert_eq!(alone, *expected);
    }
}

#[test]
fn a_file_that_ends_before_its_rows_is_an_error() {
    let all = numbers(200 * 8, 12);
    let file = file_of(&all);
    file.set_len((OFFSET + 4 * 150 * 8) as u64).expect("a file of ours");
    let mut units = vec![0; 256 * 8];
    let rows = rows_of(&file, &all, 8);
    match packed(&[rows], 8, DType::Float32, false, PanelsMut::Units(&mut units)) {
        Err(PackError::File(error)) => assert_eq!(error.kind(), io::ErrorKind::UnexpectedEof),
        other => panic!("no error of the file but {other:?}"),
    }
}
