//! Linear layers with packed weights, over the memory of torch tensors.
#![expect(unsafe_code, reason = "addresses from Python become pointers")]

use numpy::{PyArray1, PyArrayMethods};
use pagedserve_cpu::DType;
use pagedserve_cpu::linear::{Activation, Finish, Matrix, Panels, Weights, gather, linear};
use pyo3::prelude::*;

use crate::arrays::{checked, numbers, readonly};
use crate::cpu::{choice, dtype_of, on_torch_threads, refused, size};

const ACTIVATIONS: [(&str, Activation); 2] =
    [("silu", Activation::Silu), ("gelu_tanh", Activation::GeluTanh)];

/// Panels in an array that Python made.
enum PanelArray {
    Units(Py<PyArray1<u32>>),
    Int8 { values: Py<PyArray1<i8>>, scales: Vec<f32> },
}

/// The packed weights of a linear layer.
#[pyclass(frozen, module = "pagedserve._core")]
pub(crate) struct PackedWeights {
    dtype: DType,
    in_features: usize,
    out_features: usize,
    gate: Option<Activation>,
    panels: PanelArray,
    bias: Option<Vec<f32>>,
}

impl PackedWeights {
    /// The weights as a kernel takes them.
    pub(crate) fn weights<'a>(&'a self, py: Python<'a>) -> PyResult<Weights<'a>> {
        // SAFETY: the array was checked, it lives as long as this object, and whoever made it
        // does not write it any more, as the stub says.
        let panels = unsafe {
            match &self.panels {
                PanelArray::Units(units) => Panels::Units(units.bind(py).as_slice()?),
                PanelArray::Int8 { values, scales } => {
                    Panels::Int8 { values: values.bind(py).as_slice()?, scales }
                }
            }
        };
        Ok(Weights {
            dtype: self.dtype,
            in_features: self.in_features,
            out_features: self.out_features,
            panels,
            bias: self.bias.as_deref(),
        })
    }

    /// What stands between its halves.
    pub(crate) fn gate(&self) -> Option<Activation> {
        self.gate
    }
}

#[pymethods]
impl PackedWeights {
    #[new]
    #[pyo3(signature = (
        panels, *, dtype, in_features, out_features, scales = None, bias = None, gate = None
    ))]
    fn new(
        panels: &Bound<'_, PyAny>,
        dtype: &str,
        in_features: i64,
        out_features: i64,
        scales: Option<&Bound<'_, PyAny>>,
        bias: Option<&Bound<'_, PyAny>>,
        gate: Option<&str>,
    ) -> PyResult<Self> {
        let weights = Self {
            dtype: dtype_of("dtype", dtype)?,
            in_features: size("in_features", in_features)?,
            out_features: size("out_features", out_features)?,
            gate: gate.map(|gate| choice("gate", gate, &ACTIVATIONS)).transpose()?,
            panels: match scales {
                None => PanelArray::Units(checked::<u32>(panels, "panels")?.unbind()),
                Some(scales) => PanelArray::Int8 {
                    values: checked::<i8>(panels, "panels")?.unbind(),
                    scales: numbers(scales, "scales")?,
                },
            },
            bias: bias.map(|bias| numbers(bias, "bias")).transpose()?,
        };
        weights.weights(panels.py())?.check().map_err(|error| refused(&error))?;
        Ok(weights)
    }

    #[getter]
    fn in_features(&self) -> usize {
        self.in_features
    }

    #[getter]
    fn out_features(&self) -> usize {
        self.out_features
    }

    #[getter]
    fn nbytes(&self, py: Python<'_>) -> PyResult<usize> {
        Ok(match self.weights(py)?.panels {
            Panels::Units(units) => size_of_val(units),
            Panels::Int8 { values, scales } => size_of_val(values) + size_of_val(scales),
        })
    }

    #[pyo3(signature = (
        *, num_rows, x, x_stride, output, output_stride, output_dtype, adds = false,
        num_threads = 1, instructions = None
    ))]
    #[expect(clippy::too_many_arguments, reason = "tensors without torch: addresses and sizes")]
    fn multiply(
        &self,
        py: Python<'_>,
        num_rows: i64,
        x: usize,
        x_stride: i64,
        output: usize,
        output_stride: i64,
        output_dtype: &str,
        adds: bool,
        num_threads: i64,
        instructions: Option<&str>,
    ) -> PyResult<()> {
        let matrix = |name: &str, address: usize, stride: i64| {
            let pointer = std::ptr::with_exposed_provenance_mut(address);
            Ok::<_, PyErr>(Matrix { pointer, stride: size(name, stride)? })
        };
        let x = matrix("x_stride", x, x_stride)?;
        let output = (
            matrix("output_stride", output, output_stride)?,
            dtype_of("output_dtype", output_dtype)?,
        );
        let num_rows = size("num_rows", num_rows)?;
        let finish = match self.gate {
            Some(activation) => Finish::Gate(activation),
            None if adds => Finish::Add,
            None => Finish::Store,
        };
        let weights = self.weights(py)?;
        on_torch_threads(num_threads, instructions, |execution| {
            // SAFETY: that the addresses are those of live tensors of these sizes is the caller's
            // promise, as the stub says; everything else is checked.
            unsafe { linear(&weights, finish, num_rows, x, output, execution) }
        })
    }

    #[pyo3(signature = (features, output, num_threads = 1))]
    fn gather(
        &self,
        py: Python<'_>,
        features: &Bound<'_, PyAny>,
        output: usize,
        num_threads: i64,
    ) -> PyResult<()> {
        let features = readonly::<i32>(features, "features")?;
        let (weights, features) = (self.weights(py)?, features.as_slice()?);
        on_torch_threads(num_threads, None, |execution| {
            // SAFETY: that the address is that of a live tensor of this size is the caller's
            // promise, as the stub says; everything else is checked.
            let output = std::ptr::with_exposed_provenance_mut(output);
            unsafe { gather(&weights, features, output, execution) }
        })
    }
}
