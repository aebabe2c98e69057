//! Configurations: keyword-only, validated when made, frozen.

use pagedserve_core::config as core;
use pagedserve_core::error::Error;
use pyo3::prelude::*;

use crate::error::OrRaise;

/// The KV blocks of both tiers.
#[pyclass(frozen, module = "pagedserve._core")]
pub(crate) struct CacheConfig(pub(crate) core::CacheConfig);

#[pymethods]
impl CacheConfig {
    #[new]
    #[pyo3(signature = (*, block_size, num_gpu_blocks, num_cpu_blocks = 0, watermark = 0.01))]
    fn new(
        block_size: i64,
        num_gpu_blocks: i64,
        num_cpu_blocks: i64,
        watermark: f64,
    ) -> PyResult<Self> {
        let config = core::CacheConfig {
            block_size: count("block_size", block_size)?,
            num_gpu_blocks: count("num_gpu_blocks", num_gpu_blocks)?,
            num_cpu_blocks: count("num_cpu_blocks", num_cpu_blocks)?,
            watermark,
        };
        config.validate().or_raise()?;
        Ok(Self(config))
    }

    #[getter]
    fn block_size(&self) -> usize {
        self.0.block_size
    }

    #[getter]
    fn num_gpu_blocks(&self) -> usize {
        self.0.num_gpu_blocks
    }

    #[getter]
    fn num_cpu_blocks(&self) -> usize {
        self.0.num_cpu_blocks
    }

    #[getter]
    fn watermark(&self) -> f64 {
        self.0.watermark
    }
}

/// The limits and choices of the scheduler.
#[pyclass(frozen, module = "pagedserve._core")]
pub(crate) struct SchedulerConfig(pub(crate) core::SchedulerConfig);

#[pymethods]
impl SchedulerConfig {
    #[new]
    #[pyo3(signature = (*, max_num_seqs, max_num_batched_tokens, max_model_len, preemption_mode = None))]
    fn new(
        max_num_seqs: i64,
        max_num_batched_tokens: i64,
        max_model_len: i64,
        preemption_mode: Option<&str>,
    ) -> PyResult<Self> {
        let config = core::SchedulerConfig {
            max_num_seqs: count("max_num_seqs", max_num_seqs)?,
            max_num_batched_tokens: count("max_num_batched_tokens", max_num_batched_tokens)?,
            max_model_len: count("max_model_len", max_model_len)?,
            preemption_mode: preemption_mode.map(mode).transpose()?,
        };
        config.validate().or_raise()?;
        Ok(Self(config))
    }

    #[getter]
    fn max_num_seqs(&self) -> usize {
        self.0.max_num_seqs
    }

    #[getter]
    fn max_num_batched_tokens(&self) -> usize {
        self.0.max_num_batched_tokens
    }

    #[getter]
    fn max_model_len(&self) -> usize {
        self.0.max_model_len
    }

    #[getter]
    fn preemption_mode(&self) -> Option<&'static str> {
        self.0.preemption_mode.map(core::PreemptionMode::as_str)
    }
}

/// A count from Python; a negative one is named instead of overflowing.
fn count(name: &str, value: i64) -> PyResult<usize> {
    let refusal = |_| Error::Config(format!("{name} is {value}; it must not be negative"));
    usize::try_from(value).map_err(refusal).or_raise()
}

fn mode(name: &str) -> PyResult<core::PreemptionMode> {
    [core::PreemptionMode::Recompute, core::PreemptionMode::Swap]
        .into_iter()
        .find(|mode| mode.as_str() == name)
        .ok_or_else(|| {
            Error::Config(format!(
                "preemption_mode is {name:?}; it must be \"recompute\", \"swap\" or None"
            ))
        })
        .or_raise()
}
