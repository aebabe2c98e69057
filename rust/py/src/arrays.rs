//! numpy arrays at the border: dtype, shape, layout and writability are checked, never
//! coerced.

use numpy::{
    Element, PyArray1, PyArrayMethods, PyReadonlyArray1, PyReadwriteArray1, PyUntypedArray,
    PyUntypedArrayMethods, dtype,
};
use pagedserve_core::error::Error;
use pyo3::prelude::*;

use crate::error::{OrRaise, to_py};

/// `array` as one-dimensional, C-contiguous, of exactly `T`.
fn checked<'py, T: Element>(
    array: &Bound<'py, PyAny>,
    name: &str,
) -> PyResult<Bound<'py, PyArray1<T>>> {
    let wanted = dtype::<T>(array.py());
    if let Ok(typed) = array.cast::<PyArray1<T>>()
        && typed.is_c_contiguous()
    {
        return Ok(typed.clone());
    }
    let given = match array.cast::<PyUntypedArray>() {
        Ok(other) => format!(
            "{} of shape {:?}{}",
            other.dtype(),
            other.shape(),
            if other.is_c_contiguous() { "" } else { ", not contiguous" }
        ),
        Err(_) => format!("a {}", array.get_type().name()?),
    };
    let text = format!("{name} must be a one-dimensional contiguous {wanted} array; got {given}");
    Err(to_py(&Error::Arrays(text)))
}

/// A view of an argument for reading.
pub(crate) fn readonly<'py, T: Element>(
    array: &Bound<'py, PyAny>,
    name: &str,
) -> PyResult<PyReadonlyArray1<'py, T>> {
    checked(array, name)?
        .try_readonly()
        .map_err(|_| Error::Arrays(format!("{name} is being written elsewhere")))
        .or_raise()
}

/// A view of a caller's array for writing.
fn readwrite<'py, T: Element>(
    array: &Bound<'py, PyArray1<T>>,
    name: &str,
) -> PyResult<PyReadwriteArray1<'py, T>> {
    let refusal = |error| Error::Arrays(format!("{name} cannot be written: {error}"));
    array.try_readwrite().map_err(refusal).or_raise()
}

macro_rules! input_buffers {
    ($($name:ident: $element:ty),* $(,)?) => {
        /// The arrays that `Scheduler.prepare_inputs` fills in place.
        #[pyclass(frozen, module = "pagedserve._core")]
        pub(crate) struct InputBuffers {
            $($name: Py<PyArray1<$element>>),*
        }

        #[pymethods]
        impl InputBuffers {
            #[new]
            #[pyo3(signature = (*, $($name),*))]
            #[expect(clippy::too_many_arguments, reason = "one for each array of a step")]
            fn new($($name: &Bound<'_, PyAny>),*) -> PyResult<Self> {
                $(
                    let $name = checked::<$element>($name, stringify!($name))?;
                    drop(readwrite(&$name, stringify!($name))?);
                )*
                Ok(Self { $($name: $name.unbind()),* })
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
                fill(&mut pagedserve_core::inputs::InputBuffers {
                    $($name: $name.as_slice_mut()?),*
                })
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
    row_handles: i64,
}
