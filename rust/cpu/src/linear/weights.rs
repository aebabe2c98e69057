//! Packed weights of a linear layer, and their checks.

use super::{BLOCK_UNITS, PANEL_FEATURES};
use crate::bytes::BytePanels;
use crate::error::{Error, Result};
use crate::number::DType;

/// Number format of packed weights.
#[derive(Clone, Copy, Debug)]
pub enum Panels<'a> {
    /// Numbers, of `weight_dtype`.
    Units(&'a [u32]),
    /// Whole numbers.
    Int8 {
        /// The panels.
        values: &'a [i8],
        /// `[N]`, what a feature's whole numbers are multiples of.
        scales: &'a [f32],
    },
    /// Whole numbers that are multiplied with rows of bytes.
    Bytes(BytePanels<'a>),
}

/// The packed weights of a layer.
#[derive(Clone, Copy, Debug)]
pub struct Weights<'a> {
    /// Type of the input.
    pub dtype: DType,
    /// Type of weights in units: that of the input, or any for one of float32.
    pub weight_dtype: DType,
    /// Number of input features, K; a multiple of the elements of either type in 32 bits.
    pub in_features: usize,
    /// Number of output features, N.
    pub out_features: usize,
    /// The weights.
    pub panels: Panels<'a>,
    /// Bias, `[N]`.
    pub bias: Option<&'a [f32]>,
}

impl Weights<'_> {
    /// Lanes of a panel for each output feature.
    pub(crate) fn depth(&self) -> usize {
        match self.panels {
            Panels::Units(_) => self.in_features / self.weight_dtype.per_unit(),
            Panels::Int8 { .. } | Panels::Bytes(_) => self.in_features,
        }
    }

    /// Lanes of a block, of `BLOCK_UNITS` units of the input.
    pub(super) fn block(&self) -> usize {
        match self.panels {
            Panels::Units(_) => BLOCK_UNITS * self.dtype.per_unit() / self.weight_dtype.per_unit(),
            Panels::Int8 { .. } | Panels::Bytes(_) => BLOCK_UNITS,
        }
    }

    pub(super) fn num_panels(&self) -> usize {
        self.out_features.div_ceil(PANEL_FEATURES)
    }

    /// Refuses weights that are not as their fields say.
    ///
    /// # Errors
    /// Weights of other sizes, or panels that do not fit them.
    pub fn check(&self) -> Result<()> {
        if self.in_features == 0 || self.out_features == 0 {
            return Err(Error(format!(
                "a linear layer must have features; got {} in, {} out",
                self.in_features, self.out_features
            )));
        }
        let Self { dtype, weight_dtype, in_features, .. } = *self;
        if ![weight_dtype, DType::Float32].contains(&dtype) {
            return Err(Error(format!(
                "weight_dtype must be {dtype:?}, that of the rows; got {weight_dtype:?}"
            )));
        }
        for dtype in [dtype, weight_dtype] {
            if !in_features.is_multiple_of(dtype.per_unit()) {
                return Err(Error(format!(
                    "in_features must be a multiple of {} for {dtype:?}; got {in_features}",
                    dtype.per_unit(),
                )));
            }
        }
        self.check_numbers("bias", self.bias)?;
        let (kind, found) = match self.panels {
            Panels::Units(units) => ("units", units.len()),
            Panels::Int8 { values, scales } => {
                self.check_numbers("scales", Some(scales))?;
                ("int8", values.len())
            }
            Panels::Bytes(panels) => return panels.check(self.in_features, self.out_features),
        };
        let expected = self.num_panels() * self.depth() * PANEL_FEATURES;
        if found != expected {
            return Err(Error(format!(
                "packed weights of {} in {} features must have {expected} {kind}; got {found}",
                self.out_features, self.in_features
            )));
        }
        Ok(())
    }

    fn check_numbers(&self, name: &str, numbers: Option<&[f32]>) -> Result<()> {
        match numbers {
            Some(numbers) if numbers.len() != self.out_features => Err(Error(format!(
                "{name} must have {} numbers; got {}",
                self.out_features,
                numbers.len()
            ))),
            _ => Ok(()),
        }
    }
}
