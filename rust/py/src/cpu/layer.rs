//! Norms and whole decoder layers over the memory of tensors.
#![expect(unsafe_code, reason = "addresses from Python become pointers")]

use pagedserve_core::error::Error;
use pagedserve_cpu::attention::{CacheDType, Options, Rows};
use pagedserve_cpu::layer::{Layer, LayerAdapters, LayerMemory, Part, forward};
use pagedserve_cpu::{DType, Execution, Norm};
use pyo3::prelude::*;

use crate::arrays::{numbers, readonly};
use crate::cpu::attention::RowArrays;
use crate::cpu::linear::PackedWeights;
use crate::cpu::lora::{self, AdapterRows, Held};
use crate::cpu::{cache_dtype_of, choice, dtype_of, on_threads, size};
use crate::error::{OrRaise, to_py};
use crate::gateway::Work;

/// Weights of a norm.
type NormWeight = Option<Vec<f32>>;

/// Decoder layer of the Llama architecture with packed weights.
///
/// It computes norm, attention, norm and gated MLP, with residual connections.
///
/// F hidden features, H query heads and Hkv KV heads of size D.
///
/// Args:
///     dtype: Type of hidden states, weights, keys and values.
///     num_heads: Number of query heads H.
///     num_kv_heads: Number of KV heads Hkv.
///     head_size: Head size D.
///     epsilon: Epsilon of all norms.
///     scale: Factor of the scores.
///     attention_norm: Norm weight before attention, float32 ``[F]``.
///     mlp_norm: Norm weight before the MLP, float32 ``[F]``.
///     qkv: Query, key and value projection, F to ``(H + 2 * Hkv) * D`` features.
///     output: Output projection, ``H * D`` to F features.
///     gate_up: Gate and up projection, F to twice the inner features, made with a gate.
///     down: Down projection, inner features to F.
///     softcap: Scores become ``softcap * tanh(scores / softcap)``.
///     attention_output_norm: Norm weight after attention, float32 ``[F]``.
///     mlp_output_norm: Norm weight after the MLP, float32 ``[F]``.
///     query_norm: Norm weight of each query head, float32 ``[D]``.
///     key_norm: Norm weight of each key head, float32 ``[D]``.
///
/// Raises:
///     ``StepError``: Weights that do not fit each other.
#[pyclass(frozen, module = "pagedserve._core.cpu")]
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

    /// Borrows what a step of ``num_tokens`` tokens reads besides its memory.
    pub(crate) fn prepare<'a>(
        &'a self,
        py: Python<'a>,
        window: Option<usize>,
        adapters: Option<&'a AdapterRows<'a>>,
        num_tokens: usize,
    ) -> PyResult<PreparedLayer<'a>> {
        let [qkv, output, gate_up, down] = [&self.qkv, &self.output, &self.gate_up, &self.down]
            .map(|weights| weights.get().adapters().held(py, adapters, num_tokens));
        let options = Options {
            scale: self.scale,
            window,
            softcap: self.softcap,
            sinks: None,
            alibi: None,
            position_bias: None,
            causal: true,
        };
        let held = [qkv?, output?, gate_up?, down?];
        Ok(PreparedLayer { layer: self.layer(py)?, options, held })
    }

    /// Type and features of hidden states.
    pub(crate) fn hidden(&self) -> (DType, usize) {
        (self.dtype, self.attention_norm.len())
    }
}

/// Memory of a layer: hidden states; cosines, sines and `rotary_size`; address, blocks and block
/// size of the pool.
pub(crate) fn layer_memory(
    hidden: usize,
    (cosines, sines, rotary_size): (usize, usize, i64),
    (pool, num_blocks, block_size): (usize, i64, i64),
    cache_dtype: CacheDType,
) -> PyResult<LayerMemory> {
    Ok(LayerMemory {
        hidden: std::ptr::with_exposed_provenance_mut(hidden),
        cosines: std::ptr::with_exposed_provenance(cosines),
        sines: std::ptr::with_exposed_provenance(sines),
        rotary_size: size("rotary_size", rotary_size)?,
        pool: std::ptr::with_exposed_provenance_mut(pool),
        cache_dtype,
        num_blocks: size("num_blocks", num_blocks)?,
        block_size: size("block_size", block_size)?,
    })
}

/// Layer of a step: its weights, and the adapters of its four products.
pub(crate) struct PreparedLayer<'a> {
    layer: Layer<'a>,
    options: Options<'a>,
    held: [Vec<Held<'a>>; 4],
}

impl PreparedLayer<'_> {
    /// Cost over this number of keys.
    pub(crate) fn work(&self, num_keys: usize) -> Work {
        let Layer { qkv, output, gate_up, down, num_kv_heads, head_size, .. } = self.layer;
        let weights =
            [qkv, output, gate_up, down].map(|weights| weights.in_features * weights.out_features);
        let keys = Work::numbers(&[num_keys, num_kv_heads, 2 * head_size]);
        Work::numbers(&[weights.iter().sum()]).and(keys)
    }

    /// Computes the layer; see [`forward`].
    ///
    /// # Safety
    /// As of [`forward`].
    pub(crate) unsafe fn run(
        &self,
        part: Part,
        memory: &LayerMemory,
        rows: &Rows<'_>,
        execution: &Execution<'_>,
    ) -> pagedserve_cpu::Result<()> {
        let [qkv, output, gate_up, down] =
            self.held.each_ref().map(|held| held.iter().map(Held::group).collect::<Vec<_>>());
        let adapters = LayerAdapters { qkv: &qkv, output: &output, gate_up: &gate_up, down: &down };
        // SAFETY: the caller's promise.
        unsafe { forward(&self.layer, part, memory, rows, &self.options, &adapters, execution) }
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
        made.layer(py)?.check().or_raise()?;
        Ok(made)
    }

    /// Compute the layer for a step of R rows and T tokens.
    ///
    /// Args:
    ///     hidden: Address of ``[T, F]``, contiguous, changed in place.
    ///     cosines: Rotary cosines; address of ``[T, rotary_size]``, contiguous.
    ///     sines: Rotary sines; address of ``[T, rotary_size]``, contiguous.
    ///     rotary_size: Elements of a head that are rotated.
    ///     pool: Address of the layer's KV blocks, in the layout of `paged_attention`.
    ///     num_blocks: Number of blocks of the pool.
    ///     block_size: Tokens per block.
    ///     block_tables: Block tables, int32 ``[R * B]``.
    ///     query_start: Row boundaries in T, int32 ``[R + 1]``.
    ///     seq_lens: Number of keys of each row, int32 ``[R]``.
    ///     slot_mapping: Slots of keys and values, int64 ``[T]``.
    ///     window: A query attends only to keys with position > query position - window.
    ///     adapters: Adapters of the tokens, as for `PackedWeights.multiply`.
    ///     part: None computes the layer; "attention" and "mlp" write the output of that module
    ///         before its norm to ``sums`` and leave ``hidden`` unchanged, for tensor parallelism:
    ///         a partial sum over this rank's heads or inner features.
    ///     sums: Address of ``[T, F]``, contiguous; used with ``part``.
    ///     cache_dtype: Storage type of keys and values in the pool, as of `paged_attention`.
    ///     num_threads: Number of threads, the caller's included.
    ///     instructions: Instruction set; None for the one in use.
    ///
    /// Raises:
    ///     ``StepError``: Arguments that do not fit each other; nothing was read or written.
    #[pyo3(signature = (
        hidden, cosines, sines, rotary_size, pool, num_blocks, block_size, block_tables,
        query_start, seq_lens, slot_mapping, window = None, adapters = None, part = None, sums = 0,
        cache_dtype = "auto", num_threads = 1, instructions = None
    ))]
    #[expect(clippy::too_many_arguments, reason = "tensors without torch: addresses and sizes")]
    #[expect(clippy::needless_pass_by_value, reason = "Python's arguments are extracted by value")]
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
        adapters: Option<lora::RowArrays<'_>>,
        part: Option<&str>,
        sums: usize,
        cache_dtype: &str,
        num_threads: i64,
        instructions: Option<&str>,
    ) -> PyResult<()> {
        let memory = layer_memory(
            hidden,
            (cosines, sines, rotary_size),
            (pool, num_blocks, block_size),
            cache_dtype_of("cache_dtype", cache_dtype)?,
        )?;
        let sums = std::ptr::with_exposed_provenance_mut(sums);
        let part = match part {
            None => Part::Whole,
            Some(name) => choice(
                "part",
                name,
                &[("attention", Part::Attention(sums)), ("mlp", Part::Mlp(sums))],
            )?,
        };
        let arrays = RowArrays::new(block_tables, query_start, seq_lens, slot_mapping)?;
        let rows = arrays.rows()?;
        let adapters = adapters.as_ref().map(AdapterRows::new).transpose()?;
        let window = window.map(|window| size("window", window)).transpose()?;
        let layer = self.prepare(py, window, adapters.as_ref(), rows.slot_mapping.len())?;
        let work = layer.work(arrays.num_keys()?);
        on_threads(py, num_threads, instructions, work, move |execution| {
            // SAFETY: the caller promises, as the stub says, that the addresses are those of live
            // tensors of these sizes; everything else is checked.
            unsafe { layer.run(part, &memory, &rows, execution) }
        })
    }
}

/// Compute the RMS norm of rows: divide by the root mean square and multiply with a weight.
///
/// Args:
///     dtype: Type of both tensors.
///     num_rows: Number of rows.
///     x: Address of ``[num_rows, features]``, contiguous.
///     output: Address of ``[num_rows, features]``; may be ``x``.
///     weight: Norm weight, float32 ``[features]``.
///     epsilon: Added to the mean square.
///     num_threads: Number of threads, the caller's included.
///     instructions: Instruction set; None for the one in use.
///
/// Raises:
///     ``StepError``: Arguments that do not fit each other.
#[pyfunction]
#[pyo3(signature = (
    *, dtype, num_rows, x, output, weight, epsilon, num_threads = 1, instructions = None
))]
#[expect(clippy::too_many_arguments, reason = "tensors without torch: addresses and sizes")]
pub(crate) fn rms_norm(
    dtype: &str,
    num_rows: i64,
    x: usize,
    output: usize,
    weight: &Bound<'_, PyAny>,
    epsilon: f32,
    num_threads: i64,
    instructions: Option<&str>,
) -> PyResult<()> {
    let py = weight.py();
    let dtype = dtype_of("dtype", dtype)?;
    let num_rows = size("num_rows", num_rows)?;
    let weight = readonly::<f32>(weight, "weight")?;
    let norm = Norm { weight: weight.as_slice()?, epsilon };
    let work = Work::numbers(&[num_rows, norm.weight.len()]);
    on_threads(py, num_threads, instructions, work, move |execution| {
        let memory =
            (std::ptr::with_exposed_provenance(x), std::ptr::with_exposed_provenance_mut(output));
        // SAFETY: the caller promises, as the stub says, that the addresses are those of live
        // tensors of these sizes; everything else is checked.
        unsafe { pagedserve_cpu::rms_norm(norm, dtype, num_rows, memory, execution) }
    })
}
