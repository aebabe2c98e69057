//! Norms and whole decoder layers over the memory of torch tensors.
#![expect(unsafe_code, reason = "addresses from Python become pointers")]

use pagedserve_core::error::Error;
use pagedserve_cpu::attention::Options;
use pagedserve_cpu::layer::{Layer, LayerMemory, forward};
use pagedserve_cpu::{DType, Norm, rms_norm};
use pyo3::prelude::*;

use crate::arrays::{numbers, readonly};
use crate::attention::RowArrays;
use crate::cpu::{dtype_of, on_torch_threads, refused, size};
use crate::error::to_py;
use crate::linear::PackedWeights;

/// The numbers of a norm.
type NormWeight = Option<Vec<f32>>;

/// A decoder layer of a family that is known, with packed weights.
#[pyclass(frozen, module = "pagedserve._core")]
pub(crate) struct DecoderLayer {
    dtype: DType,
    num_heads: usize,
    num_kv_heads: usize,
    head_size: usize,
    epsilon: f32,
    scale: f32,
    softcap: Option<f32>,
    attention_norm: Vec<f32>,
    attention_output_norm: NormWeight,
    mlp_norm: Vec<f32>,
    mlp_output_norm: NormWeight,
    query_norm: NormWeight,
    key_norm: NormWeight,
    qkv: Py<PackedWeights>,
    output: Py<PackedWeights>,
    gate_up: Py<PackedWeights>,
    down: Py<PackedWeights>,
}

impl DecoderLayer {
    fn layer<'a>(&'a self, py: Python<'a>) -> PyResult<Layer<'a>> {
        let norm = |weight| Norm { weight, epsilon: self.epsilon };
        let maybe = |weight: &'a NormWeight| weight.as_deref().map(norm);
        let Some(activation) = self.gate_up.get().gate() else {
            let text = "gate_up must be made with a gate, 'silu' or 'gelu_tanh'; it has none";
            return Err(to_py(&Error::Arrays(text.into())));
        };
        Ok(Layer {
            dtype: self.dtype,
            num_heads: self.num_heads,
            num_kv_heads: self.num_kv_heads,
            head_size: self.head_size,
            attention_norm: norm(&self.attention_norm),
            attention_output_norm: maybe(&self.attention_output_norm),
            mlp_norm: norm(&self.mlp_norm),
            mlp_output_norm: maybe(&self.mlp_output_norm),
            query_norm: maybe(&self.query_norm),
            key_norm: maybe(&self.key_norm),
            qkv: self.qkv.get().weights(py)?,
            output: self.output.get().weights(py)?,
            gate_up: self.gate_up.get().weights(py)?,
            activation,
            down: self.down.get().weights(py)?,
        })
    }
}

#[pymethods]
impl DecoderLayer {
    #[new]
    #[pyo3(signature = (
        *, dtype, num_heads, num_kv_heads, head_size, epsilon, scale, attention_norm, mlp_norm, qkv,
        output, gate_up, down, softcap = None, attention_output_norm = None,
        mlp_output_norm = None, query_norm = None, key_norm = None
    ))]
    #[expect(clippy::too_many_arguments, reason = "the parts of a layer, by name")]
    fn new(
        py: Python<'_>,
        dtype: &str,
        num_heads: i64,
        num_kv_heads: i64,
        head_size: i64,
        epsilon: f32,
        scale: f32,
        attention_norm: &Bound<'_, PyAny>,
        mlp_norm: &Bound<'_, PyAny>,
        qkv: Py<PackedWeights>,
        output: Py<PackedWeights>,
        gate_up: Py<PackedWeights>,
        down: Py<PackedWeights>,
        softcap: Option<f32>,
        attention_output_norm: Option<&Bound<'_, PyAny>>,
        mlp_output_norm: Option<&Bound<'_, PyAny>>,
        query_norm: Option<&Bound<'_, PyAny>>,
        key_norm: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Self> {
        let maybe = |name: &str, array: Option<&Bound<'_, PyAny>>| {
            array.map(|array| numbers(array, name)).transpose()
        };
        let made = Self {
            dtype: dtype_of("dtype", dtype)?,
            num_heads: size("num_heads", num_heads)?,
            num_kv_heads: size("num_kv_heads", num_kv_heads)?,
            head_size: size("head_size", head_size)?,
            epsilon,
            scale,
            softcap,
            attention_norm: numbers(attention_norm, "attention_norm")?,
            attention_output_norm: maybe("attention_output_norm", attention_output_norm)?,
            mlp_norm: numbers(mlp_norm, "mlp_norm")?,
            mlp_output_norm: maybe("mlp_output_norm", mlp_output_norm)?,
            query_norm: maybe("query_norm", query_norm)?,
            key_norm: maybe("key_norm", key_norm)?,
            qkv,
            output,
            gate_up,
            down,
        };
        made.layer(py)?.check().map_err(|error| refused(&error))?;
        Ok(made)
    }

    #[pyo3(signature = (
        hidden, cosines, sines, rotary_size, pool, num_blocks, block_size, block_tables,
        query_start, seq_lens, slot_mapping, window = None, num_threads = 1, instructions = None
    ))]
    #[expect(clippy::too_many_arguments, reason = "tensors without torch: addresses and sizes")]
    fn forward(
        &self,
        py: Python<'_>,
        hidden: usize,
        cosines: usize,
        sines: usize,
        rotary_size: i64,
        pool: usize,
        num_blocks: i64,
        block_size: i64,
        block_tables: &Bound<'_, PyAny>,
        query_start: &Bound<'_, PyAny>,
        seq_lens: &Bound<'_, PyAny>,
        slot_mapping: &Bound<'_, PyAny>,
        window: Option<i64>,
        num_threads: i64,
        instructions: Option<&str>,
    ) -> PyResult<()> {
        let memory = LayerMemory {
            hidden: std::ptr::with_exposed_provenance_mut(hidden),
            cosines: std::ptr::with_exposed_provenance(cosines),
            sines: std::ptr::with_exposed_provenance(sines),
            rotary_size: size("rotary_size", rotary_size)?,
            pool: std::ptr::with_exposed_provenance_mut(pool),
            num_blocks: size("num_blocks", num_blocks)?,
            block_size: size("block_size", block_size)?,
        };
        let arrays = RowArrays::new(block_tables, query_start, seq_lens, slot_mapping)?;
        let rows = arrays.rows()?;
        let options = Options {
            scale: self.scale,
            window: window.map(|window| size("window", window)).transpose()?,
            softcap: self.softcap,
            sinks: None,
            alibi: None,
        };
        let layer = self.layer(py)?;
        on_torch_threads(num_threads, instructions, |execution| {
            // SAFETY: that the addresses are those of live tensors of these sizes is the caller's
            // promise, as the stub says; everything else is checked.
            unsafe { forward(&layer, &memory, &rows, &options, execution) }
        })
    }
}

#[pyfunction]
#[pyo3(signature = (
    *, dtype, num_rows, x, output, weight, epsilon, num_threads = 1, instructions = None
))]
#[expect(clippy::too_many_arguments, reason = "tensors without torch: addresses and sizes")]
pub(crate) fn rms_norm_cpu(
    dtype: &str,
    num_rows: i64,
    x: usize,
    output: usize,
    weight: &Bound<'_, PyAny>,
    epsilon: f32,
    num_threads: i64,
    instructions: Option<&str>,
) -> PyResult<()> {
    let dtype = dtype_of("dtype", dtype)?;
    let num_rows = size("num_rows", num_rows)?;
    let weight = readonly::<f32>(weight, "weight")?;
    let norm = Norm { weight: weight.as_slice()?, epsilon };
    let memory =
        (std::ptr::with_exposed_provenance(x), std::ptr::with_exposed_provenance_mut(output));
    on_torch_threads(num_threads, instructions, |execution| {
        // SAFETY: that the addresses are those of live tensors of these sizes is the caller's
        // promise, as the stub says; everything else is checked.
        unsafe { rms_norm(norm, dtype, num_rows, memory, execution) }
    })
}
