//! Packing of linear layers from the rows of a mapped file.
#![expect(unsafe_code, reason = "addresses from Python become pointers")]

use pagedserve_cpu::pack::{PanelsMut, Rows, Storage, pack};
use pyo3::prelude::*;

use crate::arrays::{checked, readwrite};
use crate::cpu::{choice, dtype_of, on_threads, size};
use crate::gateway::Work;

const STORAGES: [(&str, Storage); 13] = [
    ("F32", Storage::Float32),
    ("F16", Storage::Float16),
    ("BF16", Storage::BFloat16),
    ("Q4_0", Storage::Q4_0),
    ("Q4_1", Storage::Q4_1),
    ("Q5_0", Storage::Q5_0),
    ("Q5_1", Storage::Q5_1),
    ("Q8_0", Storage::Q8_0),
    ("Q2_K", Storage::Q2K),
    ("Q3_K", Storage::Q3K),
    ("Q4_K", Storage::Q4K),
    ("Q5_K", Storage::Q5K),
    ("Q6_K", Storage::Q6K),
];

/// Address of the first row, number of rows, storage, and size of interleaved heads or 0.
type RowsAt = (usize, i64, String, i64);

/// Pack the rows of a linear layer of K input features into panels for `PackedWeights`.
///
/// Args:
///     panels: uint32 units, or with ``scales`` int8, of the length that `PackedWeights` takes;
///         written.
///     rows: Parts of the layer, one after another: address of the first row, number of rows,
///         storage ("F32", "F16", "BF16", or a block type of GGUF such as "Q4_K"), and the size of
///         heads whose halves are interleaved, or 0.  Rows are contiguous; an address needs no
///         alignment.
///     dtype: Type that weights are rounded to.
///     in_features: Number of input features K.
///     is_gated: Whether the first of two parts is the gate of the second: they alternate in the
///         panels, 32 features each.
///     scales: Scales of int8 panels, float32 ``[N]``, written.
///     num_threads: Number of threads, the caller's included.
///     instructions: Instruction set; None for the one in use.
///
/// Returns:
///     How many weights of each part are not finite in the dtype.
///
/// Raises:
///     ``StepError``: Arguments that do not fit each other; nothing was written.
#[pyfunction]
#[pyo3(signature = (
    panels, *, rows, dtype, in_features, is_gated = false, scales = None, num_threads = 1,
    instructions = None
))]
#[expect(clippy::too_many_arguments, reason = "named by callers")]
#[expect(clippy::needless_pass_by_value, reason = "Python's arguments are extracted by value")]
pub(crate) fn pack_rows(
    panels: &Bound<'_, PyAny>,
    rows: Vec<RowsAt>,
    dtype: &str,
    in_features: i64,
    is_gated: bool,
    scales: Option<&Bound<'_, PyAny>>,
    num_threads: i64,
    instructions: Option<&str>,
) -> PyResult<Vec<usize>> {
    let py = panels.py();
    let dtype = dtype_of("dtype", dtype)?;
    let in_features = size("in_features", in_features)?;
    let rows = rows.iter().map(rows_at).collect::<PyResult<Vec<_>>>()?;
    let num_rows = rows.iter().map(|part| part.num_rows).sum();
    let work = Work::numbers(&[num_rows, in_features]);
    let mut odd = Vec::new();
    let mut run = |panels: PanelsMut<'_>| {
        on_threads(py, num_threads, instructions, work, |execution| {
            // SAFETY: that the addresses are those of a mapped file with these rows is the caller's
            // promise, as the stub says; everything else is checked.
            odd = unsafe { pack(&rows, in_features, dtype, is_gated, panels, execution)? };
            Ok(())
        })
    };
    if let Some(scales) = scales {
        let (values, scales) = (checked::<i8>(panels, "panels")?, checked(scales, "scales")?);
        let mut values = readwrite(&values, "panels")?;
        let mut scales = readwrite::<f32>(&scales, "scales")?;
        run(PanelsMut::Int8 { values: values.as_slice_mut()?, scales: scales.as_slice_mut()? })?;
    } else {
        let units = checked::<u32>(panels, "panels")?;
        let mut units = readwrite(&units, "panels")?;
        run(PanelsMut::Units(units.as_slice_mut()?))?;
    }
    Ok(odd)
}

fn rows_at((address, num_rows, storage, head_size): &RowsAt) -> PyResult<Rows> {
    let head_size = size("the size of interleaved heads", *head_size)?;
    Ok(Rows {
        first: std::ptr::with_exposed_provenance(*address),
        num_rows: size("the number of rows", *num_rows)?,
        storage: choice("storage", storage, &STORAGES)?,
        interleaved: (head_size > 0).then_some(head_size),
    })
}
