//! `KVGroup`: layers that keep something else of a sequence than all its keys and values.

use std::collections::BTreeMap;

use pagedserve_core::config as core;
use pagedserve_core::error::Error;
use pyo3::prelude::*;

use crate::config::{SchedulerConfig, count, optional_count, set};
use crate::error::OrRaise;

/// Layers that keep something else of a sequence than all its keys and values.
///
/// With "window" they keep those of the newest tokens, and of sink tokens at the start: a sequence
/// has at most the blocks that its window and its sink tokens span, and those that a step adds.
/// With "chunked" they keep those of the current chunk of positions, as in Llama 4.  With "state" a
/// block is the state of one sequence, as recurrences have.  With "cross" they keep those of an
/// encoder's output, in blocks of the first group's pool.
///
/// Args:
///     kind: "window", "chunked", "state" or "cross".
///     window: Largest number of tokens that a query attends to, itself included, at least 1: for
///         "window" in the layer with the largest window, for "chunked" the size of a chunk.
///     num_sink_tokens: First tokens of a sequence, which every query attends to beside its window;
///         0, the default, keeps none; for "window" alone.
///     num_gpu_blocks: Blocks of the group's pool on the device: for "window" and "chunked" at
///         least ``num_gpu_blocks_for`` one sequence, for "state" at least ``max_num_seqs``, for
///         "cross" none.
///     num_cpu_blocks: Blocks of the pool in host memory for swapped groups; 0, the default, turns
///         swapping off.
///
/// Raises:
///     ``ConfigError``: An unknown kind, a window that does not belong to it, or numbers out of
///         range.
#[pyclass(frozen, eq, module = "pagedserve._core")]
#[derive(PartialEq)]
pub(crate) struct KVGroup(pub(crate) core::KvGroup);

#[pymethods]
impl KVGroup {
    #[new]
    #[pyo3(signature = (
        kind, *, window = None, num_sink_tokens = None, num_gpu_blocks = None, num_cpu_blocks = None
    ))]
    fn new(
        kind: &str,
        window: Option<i64>,
        num_sink_tokens: Option<i64>,
        num_gpu_blocks: Option<i64>,
        num_cpu_blocks: Option<i64>,
    ) -> PyResult<Self> {
        let window = optional_count("window", window)?;
        let sinks = optional_count("num_sink_tokens", num_sink_tokens)?.unwrap_or_default();
        let blocks = optional_count("num_gpu_blocks", num_gpu_blocks)?.unwrap_or_default();
        let mut group = match (kind, window) {
            ("window", Some(window)) => core::KvGroup::window_with_sinks(window, sinks, blocks),
            ("chunked", Some(window)) => core::KvGroup::chunked(window, blocks),
            ("state", None) => core::KvGroup::state(blocks),
            ("cross", None) => core::KvGroup::cross(),
            ("window" | "chunked", None) => {
                return refused(format!("window is missing: the kind is {kind:?}"));
            }
            ("state" | "cross", Some(window)) => {
                return refused(format!("window is {window}: the kind {kind:?} has none"));
            }
            _ => {
                return refused(format!(
                    "kind is {kind:?}; it must be \"window\", \"chunked\", \"state\" or \"cross\""
                ));
            }
        };
        if sinks != group.kind.num_sink_tokens() {
            return refused(format!("num_sink_tokens is {sinks}: the kind {kind:?} has none"));
        }
        set(&mut group.num_cpu_blocks, optional_count("num_cpu_blocks", num_cpu_blocks)?);
        group.validate().or_raise()?;
        Ok(Self(group))
    }

    /// Kind of the group: "window", "chunked", "state" or "cross".
    #[getter]
    fn kind(&self) -> &'static str {
        self.named().0
    }

    /// Value of the argument, or its default; see the class.
    #[getter]
    fn num_gpu_blocks(&self) -> usize {
        self.0.num_gpu_blocks
    }

    /// Value of the argument, or its default; see the class.
    #[getter]
    fn num_cpu_blocks(&self) -> usize {
        self.0.num_cpu_blocks
    }

    /// Tokens that a query attends to at most, itself included; None for "state" and "cross".
    #[getter]
    fn window(&self) -> Option<usize> {
        self.named().1
    }

    /// First tokens of a sequence that are kept beside a window; 0 for another kind.
    #[getter]
    fn num_sink_tokens(&self) -> usize {
        self.0.kind.num_sink_tokens()
    }

    /// Return the largest number of device blocks that ``num_seqs`` sequences use.
    ///
    /// It counts the blocks of a window, or of chunks of as many tokens, that each keeps between
    /// steps, and those that the tokens of a step add.
    ///
    /// Args:
    ///     scheduler_config: Limits of the scheduler.
    ///     window: See the class.
    ///     block_size: Tokens a block holds, at least 1.
    ///     num_seqs: Number of sequences; the result for 1 is the least that a scheduler accepts.
    ///     num_sink_tokens: See the class.
    #[staticmethod]
    #[pyo3(signature = (scheduler_config, *, window, block_size, num_seqs = 1, num_sink_tokens = 0))]
    fn num_gpu_blocks_for(
        scheduler_config: &SchedulerConfig,
        window: i64,
        block_size: i64,
        num_seqs: i64,
        num_sink_tokens: i64,
    ) -> PyResult<usize> {
        let block_size = count("block_size", block_size)?.max(1);
        let (window, num_seqs) = (count("window", window)?, count("num_seqs", num_seqs)?);
        let num_sink_tokens = count("num_sink_tokens", num_sink_tokens)?;
        let kind = core::KvKind::Window { window, num_sink_tokens };
        Ok(scheduler_config.0.num_group_blocks(kind, num_seqs, block_size))
    }

    /// Return the constructor arguments, for pickle.
    fn __getnewargs_ex__(&self) -> ((&'static str,), BTreeMap<&'static str, Option<usize>>) {
        let (kind, window) = self.named();
        let core::KvGroup { num_gpu_blocks, num_cpu_blocks, .. } = self.0;
        let made_of = [
            ("window", window),
            ("num_sink_tokens", Some(self.num_sink_tokens())),
            ("num_gpu_blocks", Some(num_gpu_blocks)),
            ("num_cpu_blocks", Some(num_cpu_blocks)),
        ];
        ((kind,), made_of.into())
    }

    fn __repr__(&self) -> String {
        let core::KvGroup { num_gpu_blocks, num_cpu_blocks, .. } = self.0;
        let (kind, window) = self.named();
        let window = window.map_or(String::new(), |window| format!("window={window}, "));
        let sinks = match self.num_sink_tokens() {
            0 => String::new(),
            num_tokens => format!("num_sink_tokens={num_tokens}, "),
        };
        format!(
            "KVGroup('{kind}', {window}{sinks}num_gpu_blocks={num_gpu_blocks}, \
             num_cpu_blocks={num_cpu_blocks})"
        )
    }
}

impl KVGroup {
    fn named(&self) -> (&'static str, Option<usize>) {
        self.0.kind.named()
    }
}

fn refused<T>(text: String) -> PyResult<T> {
    Err(Error::Config(text)).or_raise()
}
