//! Items of a product, as kernels: each is a panel with some rows, and a thread does several of them.
//!
//! The tiles of AMX stay set, and the memory of the sums stays warm, from an item to the next.

use std::mem::MaybeUninit;

#[cfg(target_arch = "x86_64")]
use crate::bytes::sum_panel_by_amx;
use crate::bytes::{BytePanels, ByteRows, Part, sum_panel};
use crate::number::{BFloat16, DType, Float16};
use crate::vectors::{Instructions, Kernel};

#[cfg(target_arch = "x86_64")]
use crate::x86::amx::Tiles;

use super::{MOST_ROWS, PANEL_FEATURES, Panels, Product};

/// Without AMX there are none.
#[cfg(not(target_arch = "x86_64"))]
type Tiles = ();

/// Items of a thread, each a panel with some rows.
pub(super) struct Items<'a> {
    pub(super) product: &'a Product<'a>,
    pub(super) items: &'a mut dyn Iterator<Item = usize>,
}

/// The sums of an item, `[rows][64]`.
#[repr(align(64))]
struct Sums([MaybeUninit<f32>; MOST_ROWS * PANEL_FEATURES]);

impl Kernel for Items<'_> {
    #[inline(always)]
    unsafe fn run<I: Instructions>(self) {
        let Self { product, items } = self;
        let mut sums = Sums([MaybeUninit::uninit(); MOST_ROWS * PANEL_FEATURES]);
        let sums = sums.0.as_mut_ptr().cast::<f32>();
        let mut tiles = Tiles::default();
        for item in items {
            // SAFETY: the caller's promise; `sums` can hold the item's rows.
            unsafe {
                product.sum_item::<I>(item, sums, &mut tiles);
                product.end_item::<I>(item, sums);
            }
        }
    }
}

/// Items of a thread, each a panel of bytes with some rows of bytes.
pub(super) struct ByteItems<'a> {
    pub(super) product: &'a Product<'a>,
    pub(super) panels: BytePanels<'a>,
    pub(super) rows: &'a ByteRows,
    pub(super) items: &'a mut dyn Iterator<Item = usize>,
}

impl Kernel for ByteItems<'_> {
    #[inline(always)]
    unsafe fn run<I: Instructions>(self) {
        let Self { product, panels, rows, items } = self;
        let mut sums = Sums([MaybeUninit::uninit(); MOST_ROWS * PANEL_FEATURES]);
        let sums = sums.0.as_mut_ptr().cast::<f32>();
        let in_features = product.weights.in_features;
        #[cfg(target_arch = "x86_64")]
        let mut tiles = Tiles::default();
        for item in items {
            let (panel, first, num) = product.rows_of(item);
            let part = Part { rows, first, num };
            // SAFETY: the caller's promise; `sums` can hold the item's rows.
            unsafe {
                match product.amx_rows {
                    #[cfg(target_arch = "x86_64")]
                    Some(rows) if num >= rows => {
                        let sums = (sums, &mut tiles);
                        sum_panel_by_amx::<I>(&panels, in_features, panel, part, sums);
                    }
                    _ => sum_panel::<I>(&panels, in_features, panel, part, sums),
                }
                product.end_item::<I>(item, sums);
            }
        }
    }
}

impl Product<'_> {
    /// Sums of an item, `[rows][64]`.
    #[inline(always)]
    #[cfg_attr(not(target_arch = "x86_64"), expect(unused_variables, reason = "there is no AMX"))]
    unsafe fn sum_item<I: Instructions>(&self, item: usize, sums: *mut f32, tiles: &mut Tiles) {
        // SAFETY: the caller's promise.
        unsafe {
            match (self.weights.panels, self.weights.weight_dtype, self.rows) {
                (Panels::Units(units), DType::Float32, _) => {
                    self.multiply::<I, f32, _>(units, item, sums);
                }
                (Panels::Units(units), DType::BFloat16, DType::Float32) => {
                    self.multiply_halves::<I, BFloat16>(units, item, sums);
                }
                (Panels::Units(units), DType::Float16, DType::Float32) => {
                    self.multiply_halves::<I, Float16>(units, item, sums);
                }
                #[cfg(target_arch = "x86_64")]
                (Panels::Units(units), DType::BFloat16, _) if self.amx_rows.is_some() => {
                    self.multiply_by_amx(units, item, (sums, tiles));
                }
                (Panels::Units(units), DType::BFloat16, _) => {
                    self.multiply::<I, BFloat16, _>(units, item, sums);
                }
                (Panels::Units(units), DType::Float16, _) => {
                    self.multiply::<I, Float16, _>(units, item, sums);
                }
                (Panels::Int8 { values, .. }, ..) => {
                    self.multiply::<I, f32, _>(values, item, sums);
                }
                (Panels::Bytes(_), ..) => unreachable!("an item of bytes is another kernel"),
            }
        }
    }
}
