//! All decoder layers of a step in one call.
//!
//! Costs: arguments are converted, the interpreter's lock released and the compute threads woken
//! once a step instead of once a layer.
#![expect(unsafe_code, reason = "addresses from Python become pointers")]

use pagedserve_core::error::Error;
use pagedserve_cpu::layer::Part;
use pyo3::prelude::*;

use crate::cpu::attention::RowArrays;
use crate::cpu::layer::{DecoderLayer, layer_memory};
use crate::cpu::lora::{self, AdapterRows};
use crate::cpu::{cache_dtype_of, on_threads, size};
use crate::error::to_py;
use crate::gateway::Work;

/// Layer of a decoder.
struct Placed {
    layer: Py<DecoderLayer>,
    window: Option<usize>,
    /// Index of its rotation.
    rotation: usize,
}

/// Decoder layers that run one after another.
///
/// Args:
///     layers: For each layer: the layer, its window (a query attends only to keys with position >
///         query position - window), and the index of its rotation.
///
/// Raises:
///     ``StepError``: Layers with hidden states of different sizes or types.
#[pyclass(frozen, module = "pagedserve._core.cpu")]
pub(crate) struct Decoder(Vec<Placed>);

#[pymethods]
impl Decoder {
    #[new]
    fn new(layers: Vec<(Py<DecoderLayer>, Option<i64>, i64)>) -> PyResult<Self> {
        let placed = layers.into_iter().map(|(layer, window, rotation)| {
            let window = window.map(|window| size("window", window)).transpose()?;
            Ok(Placed { layer, window, rotation: size("rotation", rotation)? })
        });
        let placed: Vec<_> = placed.collect::<PyResult<_>>()?;
        let mut hidden = placed.iter().map(|placed| placed.layer.get().hidden());
        if let Some(first) = hidden.next()
            && let Some(other) = hidden.find(|other| *other != first)
        {
            return Err(to_py(&Error::Arrays(format!(
                "hidden states of all layers must be alike; the first has {first:?}, another \
                 {other:?}"
            ))));
        }
        Ok(Self(placed))
    }

    /// Compute all layers for a step of R rows and T tokens.
    ///
    /// Args:
    ///     hidden: Address of ``[T, F]``, contiguous, changed in place.
    ///     rotations: Addresses of cosines and sines ``[T, rotary_size]``, contiguous, and
    ///         ``rotary_size``, the elements of a head that are rotated.
    ///     pools: For each layer: address of its KV blocks, in the layout of `paged_attention`,
    ///         number of blocks, tokens per block, index of its KV group.
    ///     groups: For each KV group: block tables, int32 ``[R * B]``, and slots of keys and
    ///         values, int64 ``[T]``.
    ///     query_start: Row boundaries in T, int32 ``[R + 1]``.
    ///     seq_lens: Number of keys of each row, int32 ``[R]``.
    ///     adapters: Adapters of the tokens, as for `PackedWeights.multiply`.
    ///     last_only_writes: Whether the last layer only writes its keys and values.
    ///     cache_dtype: Storage type of keys and values in the pools, as of `paged_attention`.
    ///     num_threads: Number of threads, the caller's included.
    ///     instructions: Instruction set; None for the one in use.
    ///
    /// Raises:
    ///     ``StepError``: Arguments that do not fit each other; the layers before were computed.
    #[pyo3(signature = (
        hidden, rotations, pools, groups, query_start, seq_lens, *, adapters = None,
        last_only_writes = false, cache_dtype = "auto", num_threads = 1, instructions = None
    ))]
    #[expect(clippy::too_many_arguments, reason = "tensors without torch: addresses and sizes")]
    #[expect(clippy::needless_pass_by_value, reason = "Python's arguments are extracted by value")]
    fn forward(
        &self,
        py: Python<'_>,
        hidden: usize,
        rotations: Vec<(usize, usize, i64)>,
        pools: Vec<(usize, i64, i64, i64)>,
        groups: Vec<(Bound<'_, PyAny>, Bound<'_, PyAny>)>,
        query_start: &Bound<'_, PyAny>,
        seq_lens: &Bound<'_, PyAny>,
        adapters: Option<lora::RowArrays<'_>>,
        last_only_writes: bool,
        cache_dtype: &str,
        num_threads: i64,
        instructions: Option<&str>,
    ) -> PyResult<()> {
        if pools.len() != self.0.len() {
            let text =
                format!("pools must be {}, one of each layer; got {}", self.0.len(), pools.len());
            return Err(to_py(&Error::Arrays(text)));
        }
        let cache_dtype = cache_dtype_of("cache_dtype", cache_dtype)?;
        let arrays = groups
            .iter()
            .map(|(tables, slots)| RowArrays::new(tables, query_start, seq_lens, slots));
        let arrays: Vec<_> = arrays.collect::<PyResult<_>>()?;
        let rows: Vec<_> = arrays.iter().map(RowArrays::rows).collect::<PyResult<_>>()?;
        let num_tokens = rows.first().map_or(0, |rows| rows.slot_mapping.len());
        if rows.iter().any(|rows| rows.slot_mapping.len() != num_tokens) {
            let text = "slots of all groups must be those of the same tokens";
            return Err(to_py(&Error::Arrays(text.into())));
        }
        let adapters = adapters.as_ref().map(AdapterRows::new).transpose()?;
        let num_keys = arrays.first().map_or(Ok(0), RowArrays::num_keys)?;
        let mut calls = Vec::with_capacity(self.0.len());
        let mut work = Work::numbers(&[]);
        for (placed, (pool, num_blocks, block_size, group)) in self.0.iter().zip(pools) {
            let rotation = *at("rotations", &rotations, placed.rotation)?;
            let rows = at("groups", &rows, size("group", group)?)?;
            let pool = (pool, num_blocks, block_size);
            let memory = layer_memory(hidden, rotation, pool, cache_dtype)?;
            let layer = placed.layer.get();
            let layer = layer.prepare(py, placed.window, adapters.as_ref(), num_tokens)?;
            work = work.and(layer.work(num_keys));
            calls.push((layer, Part::Whole, memory, rows));
        }
        if last_only_writes && let Some((_, part, ..)) = calls.last_mut() {
            *part = Part::Cache;
        }
        on_threads(py, num_threads, instructions, work, move |execution| {
            calls.iter().try_for_each(|(layer, part, memory, rows)| {
                // SAFETY: the caller promises, as the stub says, that the addresses are those of
                // live tensors of these sizes; everything else is checked.
                unsafe { layer.run(*part, memory, rows, execution) }
            })
        })
    }
}

/// Looks an index up in a list.
fn at<'a, T>(name: &str, list: &'a [T], index: usize) -> PyResult<&'a T> {
    list.get(index).ok_or_else(|| {
        to_py(&Error::Arrays(format!(
            "{name} has {} items; a layer has the index {index}",
            list.len()
        )))
    })
}
