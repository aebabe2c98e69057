//! Adapters of packed layers, and the rows of a step that have them.
#![expect(clippy::disallowed_types, reason = "a slot may be loaded while a product reads it")]

use std::sync::Arc;

use numpy::PyReadonlyArray1;
use pagedserve_core::error::Error;
use pagedserve_cpu::lora::{Group, LowRank, Slice};
use pyo3::prelude::*;

use crate::arrays::readonly;
use crate::cpu::size;
use crate::error::to_py;
use crate::gateway::{Locked, Work, compute};

/// Slice of an adapter: first feature, rank, `[r * K]`, `[features * r]`.
pub(crate) type SliceArrays<'py> = (i64, i64, Bound<'py, PyAny>, Bound<'py, PyAny>);
/// Number of rows, then slots, starts and rows as for `PackedWeights.multiply`.
pub(crate) type RowArrays<'py> = (i64, Bound<'py, PyAny>, Bound<'py, PyAny>, Bound<'py, PyAny>);

/// Loaded adapters of packed weights by slot.
#[derive(Default)]
struct Slots(Vec<Option<Arc<LowRank>>>);

impl Slots {
    fn get(&self, slot: i32) -> Option<&Arc<LowRank>> {
        self.0.get(usize::try_from(slot).ok()?)?.as_ref()
    }

    fn set(&mut self, slot: usize, held: Option<Arc<LowRank>>) {
        if self.0.len() <= slot {
            self.0.resize(slot + 1, None);
        }
        self.0[slot] = held;
    }
}

/// Adapters of a layer.
pub(crate) struct AdapterSlots(Locked<Slots>);

impl AdapterSlots {
    pub(crate) fn new() -> Self {
        Self(Locked::new(Slots::default()))
    }

    /// Packs the slices of an adapter into a slot; none empties it.
    pub(crate) fn load(
        &self,
        py: Python<'_>,
        slot: usize,
        slices: &[SliceArrays<'_>],
        features: (usize, usize),
        is_gated: bool,
    ) -> PyResult<()> {
        let arrays: Vec<_> = slices.iter().map(SliceNumbers::new).collect::<PyResult<_>>()?;
        let slices: Vec<_> = arrays.iter().map(SliceNumbers::slice).collect::<PyResult<_>>()?;
        let work = Work::numbers(&[slices.iter().map(|slice| slice.a.len() + slice.b.len()).sum()]);
        let packed = compute(py, work, || LowRank::pack(&slices, features, is_gated))?;
        let held = (!slices.is_empty()).then(|| Arc::new(packed));
        let set = |slots: &mut Slots| {
            slots.set(slot, held);
            Ok::<(), Error>(())
        };
        self.0.act(py, |_| Work::numbers(&[]), set)
    }

    /// Returns the adapters of the rows of a product.
    pub(crate) fn held<'py>(
        &self,
        py: Python<'py>,
        rows: Option<&'py AdapterRows<'py>>,
        num_rows: usize,
    ) -> PyResult<Vec<Held<'py>>> {
        let Some(rows) = rows else { return Ok(Vec::new()) };
        let (slots, starts) = (rows.slots.as_slice()?, rows.starts.as_slice()?);
        let order = rows.order.as_slice()?;
        let find = |held: &Slots| slots.iter().map(|slot| held.get(*slot).cloned()).collect();
        let found: Vec<Option<Arc<LowRank>>> = self.0.look(py, find);
        let spans = starts.windows(2).map(|ends| {
            let [start, end] = [ends[0], ends[1]].map(usize::try_from);
            start.ok().zip(end.ok()).and_then(|(start, end)| order.get(start..end))
        });
        let mut made = Vec::new();
        for (low_rank, span) in found.into_iter().zip(spans) {
            let Some(low_rank) = low_rank else { continue };
            let Some(span) = span else {
                let text = "starts must be ascending, within the rows".into();
                return Err(to_py(&Error::Arrays(text)));
            };
            made.push(Held { low_rank, rows: span });
        }
        if !made.is_empty() && rows.num_rows != num_rows {
            let text = format!("adapters are of {} rows; got {num_rows}", rows.num_rows);
            return Err(to_py(&Error::Arrays(text)));
        }
        Ok(made)
    }
}

/// Adapter and the rows that use it.
pub(crate) struct Held<'a> {
    low_rank: Arc<LowRank>,
    rows: &'a [i32],
}

impl Held<'_> {
    /// Returns the form that a kernel takes.
    pub(crate) fn group(&self) -> Group<'_> {
        Group { low_rank: &self.low_rank, rows: self.rows }
    }
}

/// Checked arrays of a step's adapters.
pub(crate) struct AdapterRows<'py> {
    num_rows: usize,
    slots: PyReadonlyArray1<'py, i32>,
    starts: PyReadonlyArray1<'py, i32>,
    order: PyReadonlyArray1<'py, i32>,
}

impl<'py> AdapterRows<'py> {
    pub(crate) fn new(arrays: &RowArrays<'py>) -> PyResult<Self> {
        let (num_rows, slots, starts, order) = arrays;
        let made = Self {
            num_rows: size("num_rows of adapters", *num_rows)?,
            slots: readonly(slots, "slots of adapters")?,
            starts: readonly(starts, "starts of adapters")?,
            order: readonly(order, "rows of adapters")?,
        };
        let (slots, starts) = (made.slots.as_slice()?.len(), made.starts.as_slice()?.len());
        if starts != slots + 1 {
            let text =
                format!("starts of adapters must be one more than {slots} slots; got {starts}");
            return Err(to_py(&Error::Arrays(text)));
        }
        Ok(made)
    }
}

/// Checked arrays of a slice.
struct SliceNumbers<'py> {
    first_feature: usize,
    rank: usize,
    a: PyReadonlyArray1<'py, f32>,
    b: PyReadonlyArray1<'py, f32>,
}

impl<'py> SliceNumbers<'py> {
    fn new((first_feature, rank, a, b): &SliceArrays<'py>) -> PyResult<Self> {
        Ok(Self {
            first_feature: size("first_feature", *first_feature)?,
            rank: size("rank", *rank)?,
            a: readonly(a, "a")?,
            b: readonly(b, "b")?,
        })
    }

    fn slice(&self) -> PyResult<Slice<'_>> {
        let Self { first_feature, rank, .. } = *self;
        Ok(Slice { first_feature, rank, a: self.a.as_slice()?, b: self.b.as_slice()? })
    }
}
