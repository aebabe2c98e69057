//! Products against their definition, in float64.

use super::*;
use crate::bytes::turn::tests::turned;
use crate::isa::InstructionSet;
use crate::linear::{Finish, Matrix, Panels, Weights, linear};
use crate::lora::Adapters;
use crate::number::{BFloat16, DType, Float16, Stored};
use crate::team::{Execution, Sequential, Team};

struct Random(u32);

impl Random {
    fn byte(&mut self) -> u8 {
        self.0 = self.0.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (self.0 >> 24).to_le_bytes()[0]
    }

    /// From -1 to 1.
    fn number(&mut self) -> f32 {
        f32::from(i16::from_le_bytes([self.byte(), self.byte()])) / 32_768.0
    }
}

/// Two threads.
struct Pair;

impl Team for Pair {
    fn run(&self, _: usize, work: &(dyn Fn() + Sync)) {
        std::thread::scope(|scope| {
            scope.spawn(work);
            work();
        });
    }
}

/// A layer of K to N features.
struct Layer {
    sections: Vec<Section>,
    k: usize,
    n: usize,
    values: Vec<u8>,
    /// Of features, if sections are of whole rows.
    scales: Option<Vec<f32>>,
    bias: Vec<f32>,
}

/// Random panels; `byte` makes the whole numbers.
fn panels_of(
    section: Section,
    k: usize,
    random: &mut Random,
    byte: &mut dyn FnMut() -> u8,
) -> Vec<u8> {
    let Section { format, num_features } = section;
    let size = format.panel_bytes(k);
    let mut values: Vec<u8> = (0..num_features.div_ceil(64) * size).map(|_| byte()).collect();
    let block = format.block();
    for block_bytes in values.chunks_mut(format.panel_bytes(block.num_inputs)) {
        for half in block_bytes[block.num_words() * 256..].chunks_mut(2) {
            let bits = [Float16::from_f32(random.number() / 64.0)];
            // SAFETY: a float16 is 16 bits.
            let bits = unsafe { bits.as_ptr().cast::<[u8; 2]>().read() };
            half.copy_from_slice(&bits);
        }
    }
    values
}

impl Layer {
    /// Random weights of one format.
    fn new(format: Format, k: usize, n: usize, byte: impl FnMut() -> u8) -> Self {
        Self::of(vec![Section { format, num_features: n }], k, byte)
    }

    fn of(sections: Vec<Section>, k: usize, mut byte: impl FnMut() -> u8) -> Self {
        let mut random = Random(7);
        let values = sections
            .iter()
            .flat_map(|section| panels_of(*section, k, &mut random, &mut byte))
            .collect();
        let n = sections.iter().map(|section| section.num_features).sum();
        let mut numbers = || (0..n).map(|_| random.number() / 64.0).collect();
        let bias = numbers();
        let is_whole = sections.iter().all(|section| section.format.is_whole());
        Self { sections, k, n, values, scales: is_whole.then(numbers), bias }
    }

    fn panels(&self) -> BytePanels<'_> {
        let scales = self.scales.as_deref();
        BytePanels { sections: &self.sections, values: &self.values, scales }
    }

    fn product<E: Stored>(
        &self,
        dtype: DType,
        rows: &[E],
        instructions: InstructionSet,
        team: &dyn Team,
    ) -> Vec<f32> {
        let weights = Weights {
            dtype,
            weight_dtype: dtype,
            in_features: self.k,
            out_features: self.n,
            panels: Panels::Bytes(self.panels()),
            bias: Some(&self.bias),
        };
        let num_rows = rows.len() / self.k;
        let mut output = vec![f32::NAN; num_rows * self.n];
        let input = Matrix { pointer: rows.as_ptr().cast_mut().cast(), stride: self.k };
        let to = (Matrix { pointer: output.as_mut_ptr().cast(), stride: self.n }, DType::Float32);
        let adapters = Adapters { groups: &[], first_row: 0 };
        let execution = Execution { instructions, team, num_threads: 2 };
        // SAFETY: the arrays are as large as the shapes say.
        unsafe { linear(&weights, Finish::Store, num_rows, input, to, adapters, &execution) }
            .expect("a correct call");
        output
    }

    /// An output by the definition, and the sum of its terms' magnitudes.
    fn expected(&self, row: &[f32], feature: usize) -> (f64, f64) {
        let weights = self.panels().feature(self.k, feature);
        let bias = f64::from(self.bias[feature]);
        let (mut sum, mut magnitudes) = (bias, bias.abs());
        let group = self.panels().group(self.k);
        let (row, weights) = if self.panels().is_turned() {
            (turned(row), turned(&weights).iter().map(|weight| weight / 64.0).collect())
        } else {
            (row.to_vec(), weights)
        };
        for (number, inputs) in row.chunks(group).enumerate() {
            let peak = inputs.iter().fold(0.0_f32, |peak, input| peak.max(input.abs()));
            let scale = peak / 127.0;
            for (index, input) in inputs.iter().enumerate().filter(|_| peak > 0.0) {
                let whole = (input * (1.0 / scale)).round_ties_even();
                assert!(whole.abs() <= 127.0 && (whole * scale - input).abs() <= 0.501 * scale);
                let weight = f64::from(weights[number * group + index]);
                let term = f64::from(whole) * f64::from(scale) * weight;
                (sum, magnitudes) = (sum + term, magnitudes + term.abs());
            }
        }
        (sum, magnitudes)
    }

    fn check(&self, rows: &[f32], found: &[f32], what: &str) {
        for (number, row) in rows.chunks(self.k).enumerate() {
            for feature in 0..self.n {
                let (expected, magnitudes) = self.expected(row, feature);
                let found = f64::from(found[number * self.n + feature]);
                assert!(
                    // Before a minimum is added, sums are up to three times as large.
                    (found - expected).abs() <= 3e-6 * magnitudes,
                    "{:?} {what}, row {number}, feature {feature}: {found} beside {expected}",
                    self.sections
                );
            }
        }
    }
}

fn sets() -> impl Iterator<Item = InstructionSet> {
    InstructionSet::ALL.into_iter().filter(|set| set.is_available())
}

fn random_rows(num_rows: usize, k: usize, seed: u32) -> Vec<f32> {
    let mut random = Random(seed);
    (0..num_rows * k).map(|_| random.number() * random.number() * 8.0).collect()
}

#[test]
fn products_are_those_of_the_formats_definitions() {
    for format in Format::ALL {
        let depths: &[usize] = match format.block().num_inputs {
            32 => &[32, 288, 576],
            64 => &[64, 320, 576],
            _ => &[256, 768],
        };
        for &k in depths {
            let mut random = Random(11);
            let layer = Layer::new(format, k, 130, || random.byte());
            let rows = random_rows(11, k, 5);
            for set in sets() {
                let found = layer.product(DType::Float32, &rows, set, &Sequential);
                layer.check(&rows, &found, &format!("{set:?} of {k}"));
            }
        }
    }
}

#[test]
fn panels_of_one_product_may_have_several_formats() {
    let section = |format, num_features| Section { format, num_features };
    let of_32 =
        vec![section(Format::Q4K, 128), section(Format::Q6K, 64), section(Format::Q5_0, 70)];
    let of_64 = vec![section(Format::Q4_0_64, 128), section(Format::Q4_1_64, 70)];
    for sections in [of_32, of_64] {
        let mut random = Random(23);
        let layer = Layer::of(sections, 512, || random.byte());
        let rows = random_rows(13, 512, 6);
        for set in sets() {
            let found = layer.product(DType::Float32, &rows, set, &Pair);
            layer.check(&rows, &found, &format!("{set:?}"));
        }
    }
}

#[test]
fn sections_that_do_not_fit_are_refused() {
    let section = |format, num_features| Section { format, num_features };
    let refusal = |sections: &[Section], num_bytes: usize| {
        check(sections, 512, 128, (num_bytes, None)).expect_err("a refusal").to_string()
    };
    let (q4, q8) = (section(Format::Q4_0, 64), section(Format::Q8_0, 64));
    let num_bytes = 16 * 64 * (18 + 34);
    assert_eq!(check(&[q4, q8], 512, 128, (num_bytes, None)), Ok(()));
    assert!(refusal(&[q4, q8], num_bytes - 1).contains("must have 53248 bytes; got 53247"));
    for odd in [&[q4][..], &[], &[section(Format::Q4_0, 32), section(Format::Q8_0, 96)]] {
        assert!(refusal(odd, 0).contains("sections must be 128 features"));
    }
    let refused = check(&[section(Format::Q6K, 128)], 288, 128, (0, None)).expect_err("a refusal");
    assert!(refused.to_string().contains("in_features must be a multiple of 256 for Q6K"));
    let int8 = section(Format::I8Rows, 64);
    assert_eq!(check(&[int8], 512, 64, (64 * 512, Some(64))), Ok(()));
    for (section, scales) in [(int8, None), (int8, Some(63)), (q8, Some(64))] {
        let refused = check(&[section], 512, 64, (0, scales)).expect_err("a refusal");
        assert!(refused.to_string().contains("scales must be"), "{refused}");
    }
    let (wide, turned) = (section(Format::Q4_0_64, 64), section(Format::I8Turned, 64));
    for (sections, k) in
        [([int8, q8], 32), ([int8, wide], 64), ([wide, q4], 64), ([int8, turned], 64)]
    {
        let scales = sections.contains(&int8).then_some(128);
        let refused = check(&sections, k, 128, (0, scales)).expect_err("a refusal");
        assert!(refused.to_string().contains("must share the scales of its rows"), "{refused}");
    }
    let refused = check(&[int8], 65_568, 64, (64 * 65_568, Some(64))).expect_err("a refusal");
    assert!(refused.to_string().contains("in_features must be 65536 at most for I8Rows"));
}

#[test]
fn rows_of_16_bits_are_quantised_as_their_numbers() {
    for format in [Format::Q4_1, Format::I8Turned] {
        check_rows_of_16_bits(format);
    }
}

fn check_rows_of_16_bits(format: Format) {
    let mut random = Random(13);
    let layer = Layer::new(format, 192, 64, || random.byte());
    let rows = random_rows(3, 192, 6);
    let narrow: Vec<BFloat16> = rows.iter().map(|number| BFloat16::from_f32(*number)).collect();
    let half: Vec<Float16> = rows.iter().map(|number| Float16::from_f32(*number)).collect();
    for set in sets() {
        let found = layer.product(DType::BFloat16, &narrow, set, &Sequential);
        let wide: Vec<f32> = narrow.iter().map(|number| number.to_f32()).collect();
        layer.check(&wide, &found, "bfloat16");
        let found = layer.product(DType::Float16, &half, set, &Sequential);
        let wide: Vec<f32> = half.iter().map(|number| number.to_f32()).collect();
        layer.check(&wide, &found, "float16");
    }
}

#[test]
fn the_largest_products_do_not_overflow() {
    for format in Format::ALL {
        for byte in [0xff, 0x7f, 0x80, 0x81] {
            let layer = Layer::new(format, 512, 64, || byte);
            for sign in [1.0, -1.0] {
                let rows = vec![sign * 127.0; 13 * 512];
                for set in sets() {
                    let found = layer.product(DType::Float32, &rows, set, &Sequential);
                    layer.check(&rows, &found, &format!("{set:?} of {byte:#x}"));
                }
            }
        }
    }
}

#[test]
fn the_longest_rows_do_not_overflow() {
    let k = 65_536;
    for byte in [0x7f_u8, 0x80] {
        let mut layer = Layer::new(Format::I8Rows, k, 64, || byte);
        (layer.scales, layer.bias) = (Some(vec![0.25; 64]), vec![0.0; 64]);
        for (sign, num_rows) in [(1.0, 1), (-1.0, 1), (1.0, 9), (-1.0, 9)] {
            let rows = vec![sign * 127.0; num_rows * k];
            // A power of two times 15 bits: exact.
            let expected = sign * 0.25 * 127.0 * f32::from(byte.cast_signed()) * 65_536.0;
            for set in sets() {
                let found = layer.product(DType::Float32, &rows, set, &Sequential);
                assert!(found.iter().all(|sum| sum.to_bits() == expected.to_bits()), "{set:?}");
            }
        }
    }
}

#[test]
fn a_row_is_the_same_in_any_batch_and_on_any_threads() {
    for format in Format::ALL {
        let mut random = Random(17);
        let k = if format.block().num_inputs == 256 { 512 } else { 320 };
        let layer = Layer::new(format, k, 192, || random.byte());
        let rows = random_rows(230, k, 9);
        for set in sets() {
            let all = layer.product(DType::Float32, &rows, set, &Pair);
            for (first, num) in [(0, 1), (1, 1), (7, 2), (20, 5), (100, 31), (3, 200)] {
                let part = &rows[first * k..(first + num) * k];
                let found = layer.product(DType::Float32, part, set, &Sequential);
                let expected = &all[first * 192..(first + num) * 192];
                assert!(
                    found.iter().zip(expected).all(|(a, b)| a.to_bits() == b.to_bits()),
                    "{format:?} {set:?}: rows {first} to {}",
                    first + num
                );
            }
        }
    }
}

#[test]
fn sums_of_whole_rows_are_exact() {
    let (rows, turned) = (Format::I8Rows, Format::I8Turned);
    for (format, k) in [(rows, 32), (rows, 96), (rows, 1536), (rows, 65_536), (turned, 576)] {
        let mut random = Random(29);
        let layer = Layer::new(format, k, 70, || random.byte());
        for num_rows in [1, 16, 17, 33, 70] {
            let rows = random_rows(num_rows, k, 12);
            let expected =
                layer.product(DType::Float32, &rows, InstructionSet::Portable, &Sequential);
            for set in sets() {
                let found = layer.product(DType::Float32, &rows, set, &Sequential);
                let is_same = found.iter().zip(&expected).all(|(a, b)| a.to_bits() == b.to_bits());
                assert!(is_same, "{format:?} {set:?}: {num_rows} rows of {k}");
            }
            if k == 65_536 {
                break;
            }
        }
    }
}

#[test]
fn a_number_that_is_not_finite_spoils_its_row_alone() {
    for format in Format::ALL {
        let mut random = Random(19);
        let layer = Layer::new(format, 256, 64, || random.byte());
        let odd = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY];
        for (odd, num) in odd.into_iter().flat_map(|odd| [(odd, 1), (odd, 250)]) {
            let mut rows = random_rows(13, 256, 10);
            rows[256 + 5..][..num].fill(odd);
            for set in sets() {
                let found = layer.product(DType::Float32, &rows, set, &Sequential);
                assert!(found[64..128].iter().all(|number| !number.is_finite()));
                layer.check(&rows[..256], &found[..64], "the row before");
                layer.check(&rows[512..], &found[128..], "the row after");
            }
        }
    }
}
