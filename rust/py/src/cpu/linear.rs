//! Linear layers with packed weights, over the memory of torch tensors.
#![expect(unsafe_code, reason = "addresses from Python become pointers")]

use numpy::{PyArray1, PyArrayMethods};
use pagedserve_cpu::DType;
use pagedserve_cpu::bytes::{BytePanels, Format, Section};
use pagedserve_cpu::embedding::gather;
use pagedserve_cpu::linear::{Activation, Finish, Matrix, Panels, Weights, linear};
use pagedserve_cpu::lora::Adapters;
use pyo3::prelude::*;

use crate::arrays::{checked, numbers, readonly};
use crate::cpu::lora::{AdapterRows, AdapterSlots, Held, RowArrays, SliceArrays};
use crate::cpu::{choice, dtype_of, on_threads, size};
use crate::error::OrRaise;
use crate::gateway::Work;

const ACTIVATIONS: [(&str, Activation); 2] =
    [("silu", Activation::Silu), ("gelu_tanh", Activation::GeluTanh)];

const FORMATS: [(&str, Format); 13] = [
    ("I8_ROWS", Format::I8Rows),
    ("I8_TURNED", Format::I8Turned),
    ("Q8_0", Format::Q8_0),
    ("Q4_0", Format::Q4_0),
    ("Q4_1", Format::Q4_1),
    ("Q4_0_64", Format::Q4_0_64),
    ("Q4_1_64", Format::Q4_1_64),
    ("Q5_0", Format::Q5_0),
    ("Q5_1", Format::Q5_1),
    ("Q4_K", Format::Q4K),
    ("Q5_K", Format::Q5K),
    ("Q6_K", Format::Q6K),
    ("IQ4_NL", Format::Iq4Nl),
];

/// Format and number of features.
pub(crate) type SectionAt = (String, i64);

/// Looks up the format that an argument names.
pub(crate) fn format_of(name: &str, given: &str) -> PyResult<Format> {
    choice(name, given, &FORMATS)
}

/// Looks up the formats of sections.
pub(crate) fn sections_of(given: &[SectionAt]) -> PyResult<Vec<Section>> {
    let section = |(format, num_features): &SectionAt| {
        Ok(Section {
            format: format_of("the format of a section", format)?,
            num_features: size("the features of a section", *num_features)?,
        })
    };
    given.iter().map(section).collect()
}

/// Panels in an array allocated by Python.
enum PanelArray {
    Units(Py<PyArray1<u32>>),
    Int8 { values: Py<PyArray1<i8>>, scales: Vec<f32> },
    Bytes { sections: Vec<Section>, values: Py<PyArray1<u8>>, scales: Option<Vec<f32>> },
}

/// Weights of a linear layer of K to N features, packed for the kernels.
///
/// rust/cpu/src/linear.rs describes the layout.
///
/// Args:
///     panels: ``ceil(N / 64)`` panels of ``K * 64`` weights, as uint32 units; with ``scales`` int8
///         ``[ceil(N / 64) * K * 64]``; with ``sections`` uint8.  Kept by reference and must not be
///         written afterwards.
///     dtype: Type of the rows.
///     in_features: Number of input features K.
///     out_features: Number of output features N.
///     scales: Scales of int8 panels and of sections of "I8_ROWS" or "I8_TURNED", float32 ``[N]``.
///     bias: Bias, float32 ``[N]``.
///     gate: Activation between the halves of a gated layer: "silu" or "gelu_tanh".
///     sections: Panels whose products are those of bytes: format and number of features of each
///         section: a block type of GGUF such as "Q4_K", those of 64 inputs "Q4_0_64" and
///         "Q4_1_64", "I8_ROWS", bytes that share a scale in a feature and in a row, or
///         "I8_TURNED", these of inputs that are turned by 64 (rust/cpu/src/bytes/turn.rs).  All
///         but the last are multiples of 64 features; sections share the scales of rows.
///     weight_dtype: Type of the weights in units: that of the rows, or any for rows of float32.
///         None for that of the rows.
///
/// Raises:
///     ``StepError``: Arguments that do not fit each other.
#[pyclass(frozen, module = "pagedserve._core.cpu")]
pub(crate) struct PackedWeights {
    dtype: DType,
    weight_dtype: DType,
    in_features: usize,
    out_features: usize,
    gate: Option<Activation>,
    panels: PanelArray,
    bias: Option<Vec<f32>>,
    adapters: AdapterSlots,
}

impl PackedWeights {
    /// Weights in the form that a kernel takes.
    pub(crate) fn weights<'a>(&'a self, py: Python<'a>) -> PyResult<Weights<'a>> {
        // SAFETY: the array was checked, it lives as long as this object, and the caller does not
        // write it any more, as the stub requires.
        let panels = unsafe {
            match &self.panels {
                PanelArray::Units(units) => Panels::Units(units.bind(py).as_slice()?),
                PanelArray::Int8 { values, scales } => {
                    Panels::Int8 { values: values.bind(py).as_slice()?, scales }
                }
                PanelArray::Bytes { sections, values, scales } => {
                    let (values, scales) = (values.bind(py).as_slice()?, scales.as_deref());
                    Panels::Bytes(BytePanels { sections, values, scales })
                }
            }
        };
        Ok(Weights {
            dtype: self.dtype,
            weight_dtype: self.weight_dtype,
            in_features: self.in_features,
            out_features: self.out_features,
            panels,
            bias: self.bias.as_deref(),
        })
    }

    /// Activation between the halves.
    pub(crate) fn gate(&self) -> Option<Activation> {
        self.gate
    }

    /// Adapters by slot.
    pub(crate) fn adapters(&self) -> &AdapterSlots {
        &self.adapters
    }
}

#[pymethods]
impl PackedWeights {
    #[new]
    #[pyo3(signature = (
        panels, *, dtype, in_features, out_features, scales = None, bias = None, gate = None,
        sections = None, weight_dtype = None
    ))]
    #[expect(clippy::too_many_arguments, reason = "an array without a layout: sizes and names")]
    fn new(
        panels: &Bound<'_, PyAny>,
        dtype: &str,
        in_features: i64,
        out_features: i64,
        scales: Option<&Bound<'_, PyAny>>,
        bias: Option<&Bound<'_, PyAny>>,
        gate: Option<&str>,
        sections: Option<Vec<SectionAt>>,
        weight_dtype: Option<&str>,
    ) -> PyResult<Self> {
        let scales = scales.map(|scales| numbers(scales, "scales")).transpose()?;
        let weights = Self {
            dtype: dtype_of("dtype", dtype)?,
            weight_dtype: dtype_of("weight_dtype", weight_dtype.unwrap_or(dtype))?,
            in_features: size("in_features", in_features)?,
            out_features: size("out_features", out_features)?,
            gate: gate.map(|gate| choice("gate", gate, &ACTIVATIONS)).transpose()?,
            panels: match (sections, scales) {
                (Some(sections), scales) => PanelArray::Bytes {
                    sections: sections_of(&sections)?,
                    values: checked::<u8>(panels, "panels")?.unbind(),
                    scales,
                },
                (None, Some(scales)) => {
                    PanelArray::Int8 { values: checked::<i8>(panels, "panels")?.unbind(), scales }
                }
                (None, None) => PanelArray::Units(checked::<u32>(panels, "panels")?.unbind()),
            },
            bias: bias.map(|bias| numbers(bias, "bias")).transpose()?,
            adapters: AdapterSlots::new(),
        };
        weights.weights(panels.py())?.check().or_raise()?;
        Ok(weights)
    }

    /// Number of input features K.
    #[getter]
    fn in_features(&self) -> usize {
        self.in_features
    }

    /// Number of output features N, both halves of a gated layer.
    #[getter]
    fn out_features(&self) -> usize {
        self.out_features
    }

    /// Bytes of the packed weights, scales included.
    #[getter]
    fn nbytes(&self, py: Python<'_>) -> PyResult<usize> {
        Ok(match self.weights(py)?.panels {
            Panels::Units(units) => size_of_val(units),
            Panels::Int8 { values, scales } => size_of_val(values) + size_of_val(scales),
            Panels::Bytes(panels) => {
                size_of_val(panels.values) + panels.scales.map_or(0, size_of_val)
            }
        })
    }

    /// Replace the adapter of a slot.
    ///
    /// Args:
    ///     slot: Slot number.
    ///     slices: Slices of the adapter, in order of their features: first feature (in a gated
    ///         layer gates before ups), rank r, A as float32 ``[r * K]``, scaled B as float32
    ///         ``[features * r]``.  An empty list empties the slot.
    ///
    /// Raises:
    ///     ``StepError``: Slices that do not fit the layer.
    #[expect(clippy::needless_pass_by_value, reason = "Python's arguments are extracted by value")]
    fn load_adapter(
        &self,
        py: Python<'_>,
        slot: i64,
        slices: Vec<SliceArrays<'_>>,
    ) -> PyResult<()> {
        let features = (self.in_features, self.out_features);
        self.adapters.load(py, size("slot", slot)?, &slices, features, self.gate.is_some())
    }

    /// Multiply rows with the weights and add the outputs of their adapters.
    ///
    /// Args:
    ///     num_rows: Number of rows.
    ///     x: Address of ``[num_rows, K]``.
    ///     x_stride: Elements from a row to the next.
    ///     output: Address of ``[num_rows, N]``, or ``[num_rows, N / 2]`` of a gated layer.
    ///     output_stride: Elements from a row to the next.
    ///     output_dtype: Type of the output.
    ///     adds: Whether to add to the output instead of overwriting it.
    ///     adapters: Number of rows; int32 ``[G]`` slots in use; int32 ``[G + 1]`` starts of their
    ///         rows in the last array; int32 row indices, ascending within a slot.
    ///     num_threads: Number of threads, the caller's included.
    ///     instructions: Instruction set; None for the one in use.
    ///
    /// Raises:
    ///     ``StepError``: Arguments that do not fit each other.
    #[pyo3(signature = (
        *, num_rows, x, x_stride, output, output_stride, output_dtype, adds = false,
        adapters = None, num_threads = 1, instructions = None
    ))]
    #[expect(clippy::too_many_arguments, reason = "tensors without torch: addresses and sizes")]
    #[expect(clippy::needless_pass_by_value, reason = "Python's arguments are extracted by value")]
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
        adapters: Option<RowArrays<'_>>,
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
        let adapters = adapters.as_ref().map(AdapterRows::new).transpose()?;
        let held = self.adapters.held(py, adapters.as_ref(), num_rows)?;
        let groups: Vec<_> = held.iter().map(Held::group).collect();
        let work = Work::numbers(&[num_rows.div_ceil(4), self.in_features, self.out_features]);
        on_threads(py, num_threads, instructions, work, move |execution| {
            // SAFETY: the caller promises, as the stub says, that the addresses are those of live
            // tensors of these sizes; everything else is checked.
            let adapters = Adapters { groups: &groups, first_row: 0 };
            unsafe { linear(&weights, finish, num_rows, x, output, adapters, execution) }
        })
    }

    /// Copy the weights of some output features, converted to the dtype.
    ///
    /// Args:
    ///     features: Output features, int32 ``[T]``, each below N.
    ///     output: Address of ``[T, K]``, contiguous.
    ///     num_threads: Number of threads, the caller's included.
    ///
    /// Raises:
    ///     ``StepError``: A feature that does not exist.
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
        let work = Work::numbers(&[features.len(), self.in_features]);
        on_threads(py, num_threads, None, work, move |execution| {
            // SAFETY: the caller promises, as the stub says, that the address is that of a live
            // tensor of this size; everything else is checked.
            let output = std::ptr::with_exposed_provenance_mut(output);
            unsafe { gather(&weights, features, output, execution) }
        })
    }
}
