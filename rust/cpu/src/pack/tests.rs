//! Panels against the numbers that they are packed from.

use std::fs::{File, remove_file};
use std::io::Write;

use super::*;
use crate::bytes::turn::tests::turned;
use crate::bytes::{BytePanels, Format};
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
    let bytes: Vec<u8> = numbers.iter().flat_map(|number| number.to_le_bytes()).collect();
    file_of_bytes(&bytes)
}

fn file_of_bytes(bytes: &[u8]) -> File {
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
    file.write_all(&[7; OFFSET]).and_then(|()| file.write_all(bytes)).expect("room");
    file
}

const OFFSET: usize = 5;

fn rows_of<'a>(file: &'a File, numbers: &[f32], depth: usize) -> Rows<'a> {
    Rows {
        file,
        offset: OFFSET as u64,
        num_rows: numbers.len() / depth,
        storage: Storage::Float32,
        scales: None,
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
    let layer = Layer { parts: parts.to_vec(), dtype, in_features: depth, is_gated, panels };
    let odd = pack(vec![layer], &execution)?;
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
    let bytes = Rows { storage: Storage::I8Rows, ..rows };
    assert!(refusal(&[bytes], 32, float, false, 2048).contains("32 scales as I8Rows; got 0"));
    let scales = Rows { scales: Some(&[1.0; 32]), ..rows };
    assert!(refusal(&[scales], 32, float, false, 2048).contains("0 scales as Float32; got 32"));
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
        dtype: DType::Float32,
        in_features,
        is_gated: false,
        panels: PanelsMut::Units(panels),
    };
    let layers = vec![layer(rows, 6, &mut units.0), layer(others, 4, &mut units.1)];
    let instructions = InstructionSet::detect();
    let execution = Execution { instructions, team: &Sequential, num_threads: 1 };
    let odd = pack(layers, &execution).expect("correct rows");
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

/// Panels of bytes, and scales of whole rows.
struct Packed {
    values: Vec<u8>,
    scales: Option<Vec<f32>>,
}

/// Rows of 256 weights, of random blocks whose scales and minima are finite.
struct BlockFile {
    format: Format,
    storage: Storage,
    bytes: Vec<u8>,
    /// Scales of rows, if blocks have none.
    scales: Option<Vec<f32>>,
}

/// Formats that files have.
fn stored_formats() -> impl Iterator<Item = Format> {
    Format::ALL.into_iter().filter(|format| *format != Format::I8Turned)
}

impl BlockFile {
    const DEPTH: usize = 256;

    fn new(format: Format) -> Self {
        let storage = format.storage();
        let mut state = 9_u32;
        let mut bytes: Vec<u8> = (0..128 * storage.row_bytes(Self::DEPTH))
            .map(|_| {
                state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                (state >> 24).to_le_bytes()[0]
            })
            .collect();
        for block in bytes.chunks_mut(storage.block().1) {
            for half in format.block().halves {
                block[half + 1] = block[half + 1] & 0x83 | 0x24;
            }
        }
        let scales = format.is_whole().then(|| numbers(128, 15));
        Self { format, storage, bytes, scales }
    }

    fn file(&self) -> File {
        file_of_bytes(&self.bytes)
    }

    fn rows<'a>(&'a self, file: &'a File, first: usize, num_rows: usize) -> Rows<'a> {
        let offset = (OFFSET + first * self.storage.row_bytes(Self::DEPTH)) as u64;
        let scales = self.scales.as_ref().map(|scales| &scales[first..][..num_rows]);
        Rows { file, offset, num_rows, storage: self.storage, scales, interleaved: None }
    }

    /// Packs parts; returns how many weights of each are not finite, panels and scales.
    fn pack(&self, parts: &[Rows<'_>], is_gated: bool) -> (Vec<usize>, Packed) {
        let num_features: usize = parts.iter().map(|part| part.num_rows).sum();
        let mut values = vec![0; num_features.div_ceil(64) * self.format.panel_bytes(Self::DEPTH)];
        let sections = [Section { format: self.format, num_features }];
        let mut scales = self.scales.as_ref().map(|_| vec![7.0; num_features]);
        let panels = PanelsMut::Bytes {
            sections: &sections,
            values: &mut values,
            scales: scales.as_deref_mut(),
        };
        let odd = packed(parts, Self::DEPTH, DType::Float32, is_gated, panels);
        (odd.expect("correct rows"), Packed { values, scales })
    }

    /// Asserts that a feature has the numbers that a row of the file is read as.
    fn check(&self, packed: &Packed, feature: usize, row: usize) {
        let row_bytes = self.storage.row_bytes(Self::DEPTH);
        let mut numbers = vec![0.0_f32; Self::DEPTH];
        self.storage.read(&self.bytes[row * row_bytes..][..row_bytes], &mut numbers);
        if let Some(scales) = &self.scales {
            for number in &mut numbers {
                *number *= scales[row];
            }
        }
        let Packed { values, scales } = packed;
        let num_features = values.len() / self.format.panel_bytes(Self::DEPTH) * PANEL_FEATURES;
        let sections = [Section { format: self.format, num_features }];
        let panels = BytePanels { sections: &sections, values, scales: scales.as_deref() };
        let found = panels.feature(Self::DEPTH, feature);
        let bits = |numbers: &[f32]| numbers.iter().map(|number| number.to_bits()).collect();
        let (found, expected): (Vec<u32>, Vec<u32>) = (bits(&found), bits(&numbers));
        assert_eq!(found, expected, "{:?}, feature {feature}", self.format);
    }
}

#[test]
fn blocks_keep_their_numbers() {
    for format in stored_formats() {
        let blocks = BlockFile::new(format);
        let num_inputs = format.block().num_inputs;
        assert_eq!(format.block().num_bytes(), blocks.storage.row_bytes(num_inputs));
        let file = blocks.file();
        let heads = Rows { interleaved: Some(6), ..blocks.rows(&file, 0, 30) };
        let (odd, packed) = blocks.pack(&[heads, blocks.rows(&file, 30, 40)], false);
        assert_eq!(odd, [0, 0]);
        for feature in 0..70 {
            let row = if feature < 30 { heads.place(feature) } else { feature };
            blocks.check(&packed, feature, row);
        }
        let parts = [blocks.rows(&file, 0, 64), blocks.rows(&file, 64, 64)];
        let (_, packed) = blocks.pack(&parts, true);
        for feature in 0..128 {
            let row = feature / PANEL_FEATURES * HALF + feature % HALF;
            blocks.check(&packed, feature, feature / HALF % 2 * 64 + row);
        }
    }
}

#[test]
fn bytes_of_a_scale_become_numbers_too() {
    let blocks = BlockFile::new(Format::I8Rows);
    let (file, depth) = (blocks.file(), BlockFile::DEPTH);
    let mut units = vec![7; 2 * PANEL_FEATURES * depth];
    let rows = Rows { interleaved: Some(6), ..blocks.rows(&file, 4, 66) };
    packed(&[rows], depth, DType::Float32, false, PanelsMut::Units(&mut units))
        .expect("correct rows");
    let scales = rows.scales.expect("scales of bytes");
    for feature in 0..66 {
        let place = rows.place(feature);
        for k in 0..depth {
            let whole = blocks.bytes[(4 + place) * depth + k].cast_signed();
            let found = unit_number(&units, depth, DType::Float32, feature, k);
            assert_eq!(found.to_bits(), (f32::from(whole) * scales[place]).to_bits());
        }
    }
}

#[test]
fn weights_of_a_scale_that_is_not_finite_are_counted() {
    for format in stored_formats() {
        let mut blocks = BlockFile::new(format);
        let num_inputs = if let Some(scales) = &mut blocks.scales {
            scales[5] = 3e36; // 128 of them are infinite
            BlockFile::DEPTH
        } else {
            let scale = format.block().halves[0];
            (blocks.bytes[scale], blocks.bytes[scale + 1]) = (0, 0x7c);
            format.block().num_inputs
        };
        let file = blocks.file();
        let (odd, _) = blocks.pack(&[blocks.rows(&file, 0, 64)], false);
        assert_eq!(odd, [num_inputs]);
    }
}

#[test]
fn blocks_of_another_format_are_refused() {
    let blocks = BlockFile::new(Format::Q4_0);
    let file = blocks.file();
    let rows = Rows { storage: Storage::Q4_1, ..blocks.rows(&file, 0, 32) };
    let sections = [Section { format: Format::Q4_0, num_features: 32 }];
    let mut values = vec![0; Format::Q4_0.panel_bytes(256)];
    let panels = PanelsMut::Bytes { sections: &sections, values: &mut values, scales: None };
    let Err(PackError::Arguments(error)) = packed(&[rows], 256, DType::Float32, false, panels)
    else {
        panic!("no refusal");
    };
    let text = error.to_string();
    assert!(text.contains("must be stored as Q4_0 for panels of Q4_0; got Q4_1"), "{text}");
}

/// Panels of `Q8_0`, and how many weights of each part are not finite.
fn in_q8_0(parts: &[Rows<'_>], depth: usize, dtype: DType) -> (Vec<usize>, Vec<Section>, Vec<u8>) {
    let num_features: usize = parts.iter().map(|part| part.num_rows).sum();
    let sections = vec![Section { format: Format::Q8_0, num_features }];
    let mut values = vec![7; num_features.div_ceil(64) * Format::Q8_0.panel_bytes(depth)];
    let panels = PanelsMut::Bytes { sections: &sections, values: &mut values, scales: None };
    let odd = packed(parts, depth, dtype, false, panels).expect("correct rows");
    (odd, sections, values)
}

#[test]
fn other_weights_become_multiples_of_a_scale_for_32_of_them() {
    let depth = 288; // more than a chunk
    let mut all = numbers(70 * depth, 13);
    all[3 * depth..4 * depth].fill(0.0);
    let (file, blocks) = (file_of(&all), BlockFile::new(Format::Q4_1));
    for dtype in DTYPES {
        let (odd, sections, values) = in_q8_0(&[rows_of(&file, &all, depth)], depth, dtype);
        assert_eq!(odd, [0]);
        let panels = BytePanels { sections: &sections, values: &values, scales: None };
        for (feature, row) in all.chunks(depth).enumerate() {
            let found = panels.feature(depth, feature);
            for (found, row) in found.chunks(32).zip(row.chunks(32)) {
                let row: Vec<f32> = row.iter().map(|number| rounded(*number, dtype)).collect();
                let peak = row.iter().fold(0.0_f32, |peak, number| peak.max(number.abs()));
                for (found, number) in found.iter().zip(row) {
                    // Half a scale, and a float16's rounding of 127 of them.
                    assert!((found - number).abs() <= peak * (0.5 / 127.0 + 1.0 / 2048.0));
                }
            }
        }
    }
    let file = blocks.file();
    let parts = [blocks.rows(&file, 0, 64)];
    let (_, sections, values) = in_q8_0(&parts, BlockFile::DEPTH, DType::Float32);
    let panels = BytePanels { sections: &sections, values: &values, scales: None };
    let row_bytes = blocks.storage.row_bytes(BlockFile::DEPTH);
    let mut numbers = vec![0.0; BlockFile::DEPTH];
    blocks.storage.read(&blocks.bytes[5 * row_bytes..][..row_bytes], &mut numbers);
    let peak = numbers.iter().fold(0.0_f32, |peak, number| peak.max(number.abs()));
    for (found, number) in panels.feature(BlockFile::DEPTH, 5).iter().zip(numbers) {
        assert!((found - number).abs() <= 0.005 * peak);
    }
}

#[test]
fn other_weights_become_turned_multiples_of_a_scale_for_a_feature() {
    let depth = 320; // more than a chunk
    let mut all = numbers(70 * depth, 13);
    all[3 * depth..4 * depth].fill(0.0);
    all[4 * depth + 5] = 1e38;
    let file = file_of(&all);
    for dtype in DTYPES {
        let sections = [Section { format: Format::I8Turned, num_features: 70 }];
        let mut values = vec![7; 128 * depth];
        let mut scales = vec![7.0; 70];
        let panels = PanelsMut::Bytes {
            sections: &sections,
            values: &mut values,
            scales: Some(&mut scales),
        };
        let odd = packed(&[rows_of(&file, &all, depth)], depth, dtype, false, panels);
        assert_eq!(odd.expect("correct rows"), [usize::from(dtype == DType::Float16)]);
        let panels = BytePanels { sections: &sections, values: &values, scales: Some(&scales) };
        for (feature, row) in all.chunks(depth).enumerate() {
            if dtype == DType::Float16 && feature == 4 {
                continue; // beyond its range
            }
            let row: Vec<f32> = row.iter().map(|number| rounded(*number, dtype)).collect();
            let [found, expected] = [panels.feature(depth, feature), row].map(|numbers| {
                turned(&numbers.iter().map(|number| number / 64.0).collect::<Vec<_>>())
            });
            let peak = expected.iter().fold(0.0_f32, |peak, number| peak.max(number.abs()));
            for (found, number) in found.iter().zip(expected) {
                let error = (found - number).abs();
                assert!(error <= peak * (0.501 / 127.0), "{dtype:?} {feature}");
            }
        }
    }
}

#[test]
fn weights_beyond_the_largest_scale_are_counted() {
    let mut all = numbers(2 * 64, 14);
    (all[5], all[70]) = (1e7, f32::NAN);
    let file = file_of(&all);
    let rows = [0, 1].map(|row| Rows {
        offset: (OFFSET + row * 4 * 64) as u64,
        num_rows: 1,
        ..rows_of(&file, &all, 64)
    });
    assert_eq!(in_q8_0(&rows, 64, DType::Float32).0, [32, 1]);
}
