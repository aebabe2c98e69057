//! Packing of linear layers from the rows of files.
#![expect(unsafe_code, reason = "file descriptors from Python are borrowed")]

use std::fs::File;
use std::io;
use std::mem::ManuallyDrop;
use std::os::fd::FromRawFd;

use numpy::PyReadwriteArray1;
use pagedserve_cpu::DType;
use pagedserve_cpu::bytes::Section;
use pagedserve_cpu::pack::{Layer, PackError, PanelsMut, Rows, Storage, pack};
use pyo3::exceptions::PyOSError;
use pyo3::prelude::*;

use crate::arrays::{checked, numbers, readonly, readwrite};
use crate::cpu::linear::{SectionAt, format_of, sections_of};
use crate::cpu::{choice, dtype_of, on_threads, size};
use crate::gateway::Work;

const STORAGES: [(&str, Storage); 18] = [
    ("F32", Storage::Float32),
    ("F16", Storage::Float16),
    ("BF16", Storage::BFloat16),
    ("I8_ROWS", Storage::I8Rows),
    ("Q4_0", Storage::Q4_0),
    ("Q4_1", Storage::Q4_1),
    ("Q4_0_64", Storage::Q4_0_64),
    ("Q4_1_64", Storage::Q4_1_64),
    ("Q5_0", Storage::Q5_0),
    ("Q5_1", Storage::Q5_1),
    ("Q8_0", Storage::Q8_0),
    ("Q2_K", Storage::Q2K),
    ("Q3_K", Storage::Q3K),
    ("Q4_K", Storage::Q4K),
    ("Q5_K", Storage::Q5K),
    ("Q6_K", Storage::Q6K),
    ("IQ4_NL", Storage::Iq4Nl),
    ("IQ4_XS", Storage::Iq4Xs),
];

/// File descriptor, offset of the first row, number of rows, storage, scales of the rows, and size
/// of interleaved heads or 0.
type RowsAt<'py> = (i64, u64, i64, String, Option<Bound<'py, PyAny>>, i64);

/// Panels, type of the weights, parts, number of input features, whether the first part is a gate,
/// scales of the features, and sections of bytes.
type LayerAt<'py> = (
    Bound<'py, PyAny>,
    String,
    Vec<RowsAt<'py>>,
    i64,
    bool,
    Option<Bound<'py, PyAny>>,
    Option<Vec<SectionAt>>,
);

/// Round numbers to the blocks of GGUF files.
///
/// Args:
///     numbers: Numbers, float32, whole blocks of 32.
///     storage: "Q8_0", as the gguf package rounds, or "Q4_1", with errors no larger than its.
///     blocks: The blocks, one after another, uint8 of 34 or 20 bytes a block; written.
///     instructions: Instruction set; None for the one in use.
///
/// Raises:
///     ``StepError``: Another storage, numbers that are no whole blocks, an output of another
///         length.
#[pyfunction]
#[pyo3(signature = (numbers, storage, blocks, *, instructions = None))]
pub(crate) fn round_to_blocks(
    py: Python<'_>,
    numbers: &Bound<'_, PyAny>,
    storage: &str,
    blocks: &Bound<'_, PyAny>,
    instructions: Option<&str>,
) -> PyResult<()> {
    let format = format_of("storage", storage)?;
    let numbers = readonly::<f32>(numbers, "numbers")?;
    let mut blocks = readwrite(&checked::<u8>(blocks, "blocks")?, "blocks")?;
    let (numbers, blocks) = (numbers.as_slice()?, blocks.as_slice_mut()?);
    let work = Work::numbers(&[numbers.len(), 8]);
    on_threads(py, 1, instructions, work, |execution| {
        pagedserve_cpu::round_to_blocks(format, numbers, blocks, execution)
    })
}

/// Pack the rows of linear layers into panels for `PackedWeights`.
///
/// Args:
///     layers: For each layer:
///         panels: uint32 units, with ``scales`` int8, with ``sections`` uint8, of the length that
///         `PackedWeights` takes; written.
///         Type that weights are rounded to, that of units.
///         Parts of the layer, one after another, each as file descriptor, offset of the first row,
///         number of rows, storage ("F32", "F16", "BF16", or one that sections have), scales of
///         the rows, float32 ``[rows]`` of "I8_ROWS" and None of others, and the size of heads
///         whose halves are interleaved, or 0.  Rows are contiguous.
///         Number of input features K.
///         Whether the first of two parts is the gate of the second: they alternate in the panels,
///         32 features each.
///         Scales of int8 panels and of sections of "I8_ROWS" or "I8_TURNED", float32 ``[N]``,
///         written; None for other panels.
///         Sections as for `PackedWeights`, in the storage of the rows, or "Q8_0", "Q4_1" or
///         "I8_TURNED", which rows of any storage become.  None for numbers.
///     num_threads: Number of threads, the caller's included.
///     instructions: Instruction set; None for the one in use.
///
/// Returns:
///     How many weights of each part of each layer are not finite in its type.
///
/// Raises:
///     ``StepError``: Arguments that do not fit each other; nothing was written.
///     OSError: A file cannot be read, or ends before its rows do.
#[pyfunction]
#[pyo3(signature = (layers, *, num_threads = 1, instructions = None))]
pub(crate) fn pack_layers(
    py: Python<'_>,
    layers: Vec<LayerAt<'_>>,
    num_threads: i64,
    instructions: Option<&str>,
) -> PyResult<Vec<Vec<usize>>> {
    let mut taken = layers.into_iter().map(Taken::of).collect::<PyResult<Vec<_>>>()?;
    let work = taken.iter().fold(Work::numbers(&[0]), |work, layer| work.and(layer.work()));
    let layers = taken.iter_mut().map(Taken::layer).collect::<PyResult<Vec<_>>>()?;
    let mut packed = Ok(Vec::new());
    on_threads(py, num_threads, instructions, work, |execution| {
        packed = match pack(layers, execution) {
            Ok(odd) => Ok(odd),
            Err(PackError::Arguments(error)) => return Err(error),
            Err(PackError::File(error)) => Err(error),
        };
        Ok(())
    })?;
    packed.map_err(|error| match error.kind() {
        io::ErrorKind::UnexpectedEof => PyOSError::new_err("the file ends before its rows do"),
        _ => error.into(),
    })
}

/// Panels of a layer, borrowed for writing.
enum Panels<'py> {
    Units(PyReadwriteArray1<'py, u32>),
    Int8 {
        values: PyReadwriteArray1<'py, i8>,
        scales: PyReadwriteArray1<'py, f32>,
    },
    Bytes {
        sections: Vec<Section>,
        values: PyReadwriteArray1<'py, u8>,
        scales: Option<PyReadwriteArray1<'py, f32>>,
    },
}

/// Arguments of a layer.
struct Taken<'py> {
    panels: Panels<'py>,
    dtype: DType,
    parts: Vec<Part>,
    in_features: usize,
    is_gated: bool,
}

/// Arguments of a part; its file stays open when it is dropped.
struct Part {
    file: ManuallyDrop<File>,
    offset: u64,
    num_rows: usize,
    storage: Storage,
    scales: Option<Vec<f32>>,
    interleaved: Option<usize>,
}

impl<'py> Taken<'py> {
    fn of(layer: LayerAt<'py>) -> PyResult<Self> {
        let (panels, dtype, parts, in_features, is_gated, scales, sections) = layer;
        let scales = scales
            .map(|scales| readwrite(&checked::<f32>(&scales, "scales")?, "scales"))
            .transpose()?;
        let panels = match (sections, scales) {
            (Some(sections), scales) => Panels::Bytes {
                sections: sections_of(&sections)?,
                values: readwrite(&checked::<u8>(&panels, "panels")?, "panels")?,
                scales,
            },
            (None, Some(scales)) => {
                let values = readwrite(&checked::<i8>(&panels, "panels")?, "panels")?;
                Panels::Int8 { values, scales }
            }
            (None, None) => {
                Panels::Units(readwrite(&checked::<u32>(&panels, "panels")?, "panels")?)
            }
        };
        let parts = parts.iter().map(Part::of).collect::<PyResult<_>>()?;
        Ok(Self {
            panels,
            dtype: dtype_of("dtype", &dtype)?,
            parts,
            in_features: size("in_features", in_features)?,
            is_gated,
        })
    }

    fn work(&self) -> Work {
        let num_rows = self.parts.iter().map(|part| part.num_rows).sum();
        Work::numbers(&[num_rows, self.in_features])
    }

    fn layer(&mut self) -> PyResult<Layer<'_>> {
        let panels = match &mut self.panels {
            Panels::Units(units) => PanelsMut::Units(units.as_slice_mut()?),
            Panels::Int8 { values, scales } => {
                PanelsMut::Int8 { values: values.as_slice_mut()?, scales: scales.as_slice_mut()? }
            }
            Panels::Bytes { sections, values, scales } => PanelsMut::Bytes {
                sections,
                values: values.as_slice_mut()?,
                scales: scales.as_mut().map(PyReadwriteArray1::as_slice_mut).transpose()?,
            },
        };
        let parts = self.parts.iter().map(Part::rows).collect();
        let Self { dtype, in_features, is_gated, .. } = *self;
        Ok(Layer { parts, dtype, in_features, is_gated, panels })
    }
}

impl Part {
    fn of((file, offset, num_rows, storage, scales, head_size): &RowsAt<'_>) -> PyResult<Self> {
        let head_size = size("the size of interleaved heads", *head_size)?;
        let file = i32::try_from(size("the file descriptor", *file)?).unwrap_or(i32::MAX);
        Ok(Self {
            // SAFETY: the file is only read, during the call, and never closed here.
            file: ManuallyDrop::new(unsafe { File::from_raw_fd(file) }),
            offset: *offset,
            num_rows: size("the number of rows", *num_rows)?,
            storage: choice("storage", storage, &STORAGES)?,
            scales: scales.as_ref().map(|scales| numbers(scales, "scales")).transpose()?,
            interleaved: (head_size > 0).then_some(head_size),
        })
    }

    fn rows(&self) -> Rows<'_> {
        let Self { ref file, offset, num_rows, storage, ref scales, interleaved } = *self;
        Rows { file, offset, num_rows, storage, scales: scales.as_deref(), interleaved }
    }
}
