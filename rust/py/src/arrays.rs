//! numpy arrays at the border: dtype, shape, layout and writability are checked, never
//! coerced.

use std::fmt::Display;

use numpy::{
    Element, PyArray1, PyArray2, PyArrayDescr, PyArrayDescrMethods, PyArrayMethods,
    PyReadonlyArray1, PyReadwriteArray1, PyUntypedArray, PyUntypedArrayMethods, dtype,
};
use pagedserve_core::error::Error;
use pagedserve_core::ids::{BlockId, BlockPair};
use pagedserve_core::sequence::Sequence;
use pyo3::exceptions::PyIndexError;
use pyo3::prelude::*;

use crate::error::{OrRaise, to_py};

/// Borrows `array` for reading: one-dimensional, C-contiguous, of exactly `T`.
pub(crate) fn readonly<'py, T: Element>(
    array: &Bound<'py, PyAny>,
    name: &str,
) -> PyResult<PyReadonlyArray1<'py, T>> {
    if let Ok(typed) = array.cast::<PyArray1<T>>() {
        let Ok(view) = typed.try_readonly() else {
            return Err(to_py(&Error::Arrays(format!("{name} is being written elsewhere"))));
        };
        if view.as_slice().is_ok() {
            return Ok(view);
        }
    }
    Err(refusal(array, name, &dtype::<T>(array.py()))?)
}

/// Error for an argument that is not as `wanted`.
fn refusal(
    array: &Bound<'_, PyAny>,
    name: &str,
    wanted: &Bound<'_, PyArrayDescr>,
) -> PyResult<PyErr> {
    let given = match array.cast::<PyUntypedArray>() {
        Ok(other) => format!(
            "{} of shape {:?}{}",
            other.dtype(),
            other.shape(),
            match (other.dtype().is_equiv_to(wanted) && other.ndim() == 1, other.is_c_contiguous())
            {
                (true, true) => ", not aligned",
                (_, false) => ", not contiguous",
                _ => "",
            }
        ),
        Err(_) => format!("a {}", array.get_type().name()?),
    };
    let text = format!("{name} must be a one-dimensional contiguous {wanted} array; got {given}");
    Ok(to_py(&Error::Arrays(text)))
}

/// Keeps `array`, with the checks of `readonly`.
pub(crate) fn checked<'py, T: Element>(
    array: &Bound<'py, PyAny>,
    name: &str,
) -> PyResult<Bound<'py, PyArray1<T>>> {
    Ok((*readonly(array, name)?).clone())
}

/// Copies an argument's numbers.
pub(crate) fn numbers(array: &Bound<'_, PyAny>, name: &str) -> PyResult<Vec<f32>> {
    Ok(readonly::<f32>(array, name)?.as_slice()?.to_vec())
}

/// View of a caller's array for writing.
pub(crate) fn readwrite<'py, T: Element>(
    array: &Bound<'py, PyArray1<T>>,
    name: impl Display,
) -> PyResult<PyReadwriteArray1<'py, T>> {
    let refusal = |error| Error::Arrays(format!("{name} cannot be written: {error}"));
    array.try_readwrite().map_err(refusal).or_raise()
}

/// Keeps `array` for writing, with the checks of `readonly`.
fn writable<T: Element>(array: &Bound<'_, PyAny>, name: &str) -> PyResult<Py<PyArray1<T>>> {
    let array = checked(array, name)?;
    drop(readwrite(&array, name)?);
    Ok(array.unbind())
}

macro_rules! input_buffers {
    ($($name:ident: $element:ty),* ; $($optional:ident: $of_optional:ty),* $(,)?) => {
        /// Arrays that `Scheduler.prepare_inputs` fills in place.
        ///
        /// All are one-dimensional, C-contiguous, writable and of exactly these types; checked here
        /// once, never coerced.  Each may be longer than a step needs: R rows, T tokens, S samples,
        /// B blocks in the longest table, C in the longest of an encoder.
        ///
        /// Args:
        ///     token_ids: Input tokens, int32 ``[T]``, rows packed one after another.
        ///     positions: Position of each token in its sequence, int64 ``[T]``.
        ///     slot_mapping: Slot of each token's keys and values, int64 ``[T]``: block * block
        ///         size + offset, or -1 if they are already in the cache.
        ///     query_start: Row boundaries in T, int32 ``[R + 1]``.
        ///     seq_lens: Number of keys visible to the last token of each row, int32 ``[R]``.
        ///     block_tables: Physical blocks, int32 ``[R * B]``, row-major, padded with 0.
        ///     sample_index: Positions in T whose logits are sampled from, int32 ``[S]``,
        ///         ascending.
        ///     sample_rows: Row of each sample, int32 ``[S]``.
        ///     row_handles: Handle of each row's sequence, int64 ``[R]``.
        ///     adapter_slots: Adapter slot of each row, int32 ``[R]``, -1 for the base model; None,
        ///         the default, for a scheduler without ``max_loras``.
        ///     cross_lens: Tokens of the output of each row's encoder, int32 ``[R]``; None, the
        ///         default, for decoder-only models.
        ///     group_tables: Blocks of each KV group beside the first, int32 ``[R * W]`` with W
        ///         from ``SchedulerOutputs.table_widths``, laid out as ``block_tables``, 0 for
        ///         blocks that no query sees.  A row of a group of states has one entry; where its
        ///         first position is 0 it begins with a fresh state.
        ///     group_slots: Slots of keys and values in each of these groups, int64 ``[T]``; empty
        ///         for a kind other than "window".
        ///
        /// Raises:
        ///     ``StepError``: An array of another dtype or shape, by name.
        #[pyclass(frozen, module = "pagedserve._core")]
        pub(crate) struct InputBuffers {
            $($name: Py<PyArray1<$element>>,)*
            $($optional: Option<Py<PyArray1<$of_optional>>>,)*
            group_tables: Vec<Py<PyArray1<i32>>>,
            group_slots: Vec<Py<PyArray1<i64>>>,
        }

        #[pymethods]
        impl InputBuffers {
            #[new]
            #[pyo3(signature = (
                *, $($name),*, $($optional = None),*, group_tables = Vec::new(), group_slots = Vec::new()
            ))]
            #[expect(clippy::too_many_arguments, reason = "one for each array of a step")]
            fn new(
                $($name: &Bound<'_, PyAny>,)*
                $($optional: Option<&Bound<'_, PyAny>>,)*
                group_tables: Vec<Bound<'_, PyAny>>,
                group_slots: Vec<Bound<'_, PyAny>>,
            ) -> PyResult<Self> {
                $(let $name = writable::<$element>($name, stringify!($name))?;)*
                $(
                    let $optional = $optional.map(|given| writable::<$of_optional>(given, stringify!($optional)));
                )*
                Ok(Self {
                    $($name,)*
                    $($optional: $optional.transpose()?,)*
                    group_tables: all_writable(&group_tables, "group_tables")?,
                    group_slots: all_writable(&group_slots, "group_slots")?,
                })
            }
        }

        impl InputBuffers {
            /// Lends all arrays to `fill` at once; two names for one array are refused.
            pub(crate) fn lend<R>(
                &self,
                py: Python<'_>,
                fill: impl FnOnce(&mut pagedserve_core::inputs::InputBuffers<'_>) -> PyResult<R>,
            ) -> PyResult<R> {
                $(let mut $name = readwrite(self.$name.bind(py), stringify!($name))?;)*
                $(
                    let $optional = self.$optional.as_ref().map(|given| given.bind(py));
                    let mut $optional =
                        $optional.map(|given| readwrite(given, stringify!($optional))).transpose()?;
                )*
                let mut group_tables = lend_all(py, &self.group_tables, "group_tables")?;
                let mut group_slots = lend_all(py, &self.group_slots, "group_slots")?;
                let mut buffers = pagedserve_core::inputs::InputBuffers::default();
                $(buffers.$name = $name.as_slice_mut()?;)*
                $(buffers.$optional =
                    $optional.as_mut().map(|lent| lent.as_slice_mut()).transpose()?;)*
                buffers.group_tables = all_slices(&mut group_tables)?;
                buffers.group_slots = all_slices(&mut group_slots)?;
                fill(&mut buffers)
            }
        }
    };
}

input_buffers! {
    token_ids: i32,
    positions: i64,
    slot_mapping: i64,
    query_start: i32,
    seq_lens: i32,
    block_tables: i32,
    sample_index: i32,
    sample_rows: i32,
    row_handles: i64;
    adapter_slots: i32,
    cross_lens: i32,
}

/// Keeps several arrays for writing, with the checks of `readonly`.
fn all_writable<T: Element>(
    arrays: &[Bound<'_, PyAny>],
    name: &str,
) -> PyResult<Vec<Py<PyArray1<T>>>> {
    let named = arrays.iter().enumerate();
    named.map(|(index, array)| writable(array, &format!("{name}[{index}]"))).collect()
}

/// Views of several arrays for writing.
fn lend_all<'py, T: Element>(
    py: Python<'py>,
    arrays: &[Py<PyArray1<T>>],
    name: &str,
) -> PyResult<Vec<PyReadwriteArray1<'py, T>>> {
    let lend = |(index, array): (usize, &Py<PyArray1<T>>)| {
        readwrite(array.bind(py), format_args!("{name}[{index}]"))
    };
    arrays.iter().enumerate().map(lend).collect()
}

fn all_slices<'a, T: Element>(
    arrays: &'a mut [PyReadwriteArray1<'_, T>],
) -> PyResult<Vec<&'a mut [T]>> {
    arrays.iter_mut().map(|array| Ok(array.as_slice_mut()?)).collect()
}

/// Block pairs as an int64 array of shape [n, 2].
pub(crate) fn pair_array<'py>(
    py: Python<'py>,
    pairs: &[BlockPair],
) -> PyResult<Bound<'py, PyArray2<i64>>> {
    let block = |index: usize| i64::try_from(index).unwrap_or(i64::MAX);
    let flat = pairs.iter().flat_map(|(from, to)| [block(from.index()), block(to.index())]);
    PyArray1::from_iter(py, flat).reshape([pairs.len(), 2])
}

/// Block numbers as int32, the type of the step's tables.
pub(crate) fn block_array(
    py: Python<'_>,
    blocks: impl IntoIterator<Item = BlockId>,
) -> Bound<'_, PyArray1<i32>> {
    let number = |block: BlockId| i32::try_from(block.index()).unwrap_or(i32::MAX);
    PyArray1::from_iter(py, blocks.into_iter().map(number))
}

/// Physical blocks of a sequence in a KV group, 0 for the first.
pub(crate) fn table_blocks(seq: &Sequence, kv_group: usize) -> PyResult<Vec<BlockId>> {
    let Some(index) = kv_group.checked_sub(1) else {
        return Ok((0..seq.table.len()).map(|index| seq.table.block(index)).collect());
    };
    let Some(table) = seq.tables.get(index) else {
        let text = format!("kv_group is {kv_group}; there are {}", seq.tables.len() + 1);
        return Err(PyIndexError::new_err(text));
    };
    Ok(table.blocks().to_vec())
}
