//! Embeddings whose weights are those of a linear layer, packed once for both.
//!
//! # Costs
//!
//! A feature's numbers lie a panel's width apart: reading one takes a cache line a unit.
#![expect(unsafe_code, reason = "rows are addresses of tensors")]

use crate::error::{Error, Result};
use crate::linear::{Matrix, PANEL_FEATURES, Panels, Weights, check_matrix};
use crate::number::{BFloat16, DType, Float16, Stored};
use crate::team::Execution;

/// Copies the weights of some output features, as an embedding that shares them does.
///
/// # Errors
/// Weights that are not as their fields say, a feature that does not exist.
///
/// # Safety
/// `output` can hold K elements a feature, and no other code accesses it during the call.
pub unsafe fn gather(
    weights: &Weights<'_>,
    features: &[i32],
    output: *mut u8,
    execution: &Execution<'_>,
) -> Result<()> {
    weights.check()?;
    let count = weights.out_features;
    for (index, &feature) in features.iter().enumerate() {
        if usize::try_from(feature).map_or(true, |feature| feature >= count) {
            return Err(Error(format!(
                "features[{index}] must be one of {count} features; got {feature}"
            )));
        }
    }
    let output = Matrix { pointer: output, stride: weights.in_features };
    check_matrix("output", output, weights.dtype, weights.in_features)?;
    let rows = Gathered { weights, features, output };
    execution.for_each(features.len(), &|row| {
        // SAFETY: the feature exists, and each row is written once.
        unsafe {
            match (weights.panels, weights.dtype) {
                (Panels::Units(units), dtype) if dtype == weights.weight_dtype => {
                    rows.write(row, units, |unit| unit);
                }
                (Panels::Units(units), _) => match weights.weight_dtype {
                    DType::Float16 => rows.write(row, units, |unit| {
                        [unit, unit >> 16].map(|bits| Float16::from_bits(bits).to_f32())
                    }),
                    _ => rows.write(row, units, |unit| [unit << 16, unit & 0xffff_0000]),
                },
                (Panels::Bytes(panels), dtype) => {
                    let numbers = panels.feature(weights.in_features, rows.feature(row));
                    match dtype {
                        DType::Float32 => rows.write_numbers::<f32>(row, &numbers),
                        DType::BFloat16 => rows.write_numbers::<BFloat16>(row, &numbers),
                        DType::Float16 => rows.write_numbers::<Float16>(row, &numbers),
                    }
                }
                (Panels::Int8 { values, scales }, dtype) => {
                    let scale = scales[rows.feature(row)];
                    let number = |value: i8| f32::from(value) * scale;
                    match dtype {
                        DType::Float32 => rows.write(row, values, number),
                        DType::BFloat16 => {
                            rows.write(row, values, |value| BFloat16::from_f32(number(value)));
                        }
                        DType::Float16 => {
                            rows.write(row, values, |value| Float16::from_f32(number(value)));
                        }
                    }
                }
            }
        };
    });
    Ok(())
}

/// A checked call.
struct Gathered<'a> {
    weights: &'a Weights<'a>,
    features: &'a [i32],
    output: Matrix,
}

// SAFETY: each row is written by one thread.
unsafe impl Sync for Gathered<'_> {}

impl Gathered<'_> {
    fn feature(&self, row: usize) -> usize {
        usize::try_from(self.features[row]).unwrap_or(0)
    }

    /// Writes numbers in the layer's dtype.
    ///
    /// # Safety
    /// The row can hold them.
    unsafe fn write_numbers<E: Stored>(&self, row: usize, numbers: &[f32]) {
        let output = self.output.pointer.cast::<E>().wrapping_add(row * self.output.stride);
        for (index, number) in numbers.iter().enumerate() {
            // SAFETY: the caller's promise.
            unsafe { output.add(index).write(E::from_f32(*number)) };
        }
    }

    /// Writes a feature's lanes, converted by `meaning`.
    ///
    /// # Safety
    /// The row can hold as many `T` as a feature has lanes.
    unsafe fn write<L: Copy, T>(&self, row: usize, lanes: &[L], meaning: impl Fn(L) -> T) {
        let (depth, feature) = (self.weights.depth(), self.feature(row));
        let first = feature / PANEL_FEATURES * depth * PANEL_FEATURES + feature % PANEL_FEATURES;
        let lanes = lanes[first..].iter().step_by(PANEL_FEATURES);
        let output = self.output.pointer.cast::<T>().wrapping_add(row * depth);
        for (index, lane) in lanes.take(depth).enumerate() {
            // SAFETY: the row has `depth` of them.
            unsafe { output.add(index).write(meaning(*lane)) };
        }
    }
}
