//! Configurations: keyword-only, validated when made, frozen.

use pagedserve_core::config as core;
use pagedserve_core::error::Error;
use pyo3::prelude::*;

use crate::error::OrRaise;

/// The KV blocks of both tiers.
#[pyclass(frozen, module = "pagedserve._core")]
pub(crate) struct CacheConfig(pub(crate) core::CacheConfig);

/// The limits and choices of the scheduler.
#[pyclass(frozen, module = "pagedserve._core")]
pub(crate) struct SchedulerConfig(pub(crate) core::SchedulerConfig);

/// Properties that hand a field of the core's configuration out as it is.
macro_rules! getters {
    ($class:ident { $($field:ident: $type:ty),* $(,)? }) => {
        #[pymethods]
        impl $class {
            $(
                #[getter]
                fn $field(&self) -> $type {
                    self.0.$field
                }
            )*
        }
    };
}

getters!(CacheConfig {
    block_size: usize,
    num_gpu_blocks: usize,
    num_cpu_blocks: usize,
    watermark: f64,
    enable_prefix_caching: bool,
    sliding_window: Option<usize>,
    count_cached_blocks: bool,
    charge_cached_tokens: bool,
    share_partial_blocks: bool,
    share_generated_blocks: bool,
    swap_in_cached_blocks: bool,
    evict_blank_blocks_in_order: bool,
    exact_append_demand: bool,
});

getters!(SchedulerConfig {
    max_num_seqs: usize,
    max_num_batched_tokens: usize,
    max_model_len: usize,
    enable_chunked_prefill: bool,
    delay_factor: f64,
    num_lookahead_slots: usize,
    max_loras: Option<usize>,
    max_num_bypasses: usize,
    admit_after_preemption: bool,
    reverse_swapped_order: bool,
    whole_block_chunks: bool,
    limit_chunked_prompts: bool,
});

#[pymethods]
impl CacheConfig {
    #[new]
    #[pyo3(signature = (
        *, block_size, num_gpu_blocks, num_cpu_blocks = 0, watermark = 0.01,
        enable_prefix_caching = false, sliding_window = None, count_cached_blocks = true,
        charge_cached_tokens = false, share_partial_blocks = false,
        share_generated_blocks = true, swap_in_cached_blocks = false,
        evict_blank_blocks_in_order = false, exact_append_demand = true,
    ))]
    #[expect(clippy::too_many_arguments, clippy::fn_params_excessive_bools, reason = "keywords")]
    fn new(
        block_size: i64,
        num_gpu_blocks: i64,
        num_cpu_blocks: i64,
        watermark: f64,
        enable_prefix_caching: bool,
        sliding_window: Option<i64>,
        count_cached_blocks: bool,
        charge_cached_tokens: bool,
        share_partial_blocks: bool,
        share_generated_blocks: bool,
        swap_in_cached_blocks: bool,
        evict_blank_blocks_in_order: bool,
        exact_append_demand: bool,
    ) -> PyResult<Self> {
        Self::validated(core::CacheConfig {
            num_cpu_blocks: count("num_cpu_blocks", num_cpu_blocks)?,
            watermark,
            enable_prefix_caching,
            sliding_window: sliding_window
                .map(|tokens| count("sliding_window", tokens))
                .transpose()?,
            count_cached_blocks,
            charge_cached_tokens,
            share_partial_blocks,
            share_generated_blocks,
            swap_in_cached_blocks,
            evict_blank_blocks_in_order,
            exact_append_demand,
            ..core::CacheConfig::new(
                count("block_size", block_size)?,
                count("num_gpu_blocks", num_gpu_blocks)?,
            )
        })
    }

    #[staticmethod]
    #[pyo3(signature = (
        *, block_size, num_gpu_blocks, num_cpu_blocks = 0, watermark = 0.01,
        enable_prefix_caching = false, sliding_window = None,
    ))]
    fn classic(
        block_size: i64,
        num_gpu_blocks: i64,
        num_cpu_blocks: i64,
        watermark: f64,
        enable_prefix_caching: bool,
        sliding_window: Option<i64>,
    ) -> PyResult<Self> {
        Self::validated(core::CacheConfig {
            num_cpu_blocks: count("num_cpu_blocks", num_cpu_blocks)?,
            watermark,
            enable_prefix_caching,
            sliding_window: sliding_window
                .map(|tokens| count("sliding_window", tokens))
                .transpose()?,
            ..core::CacheConfig::classic(
                count("block_size", block_size)?,
                count("num_gpu_blocks", num_gpu_blocks)?,
            )
        })
    }
}

impl CacheConfig {
    fn validated(config: core::CacheConfig) -> PyResult<Self> {
        config.validate().or_raise()?;
        Ok(Self(config))
    }
}

#[pymethods]
impl SchedulerConfig {
    #[new]
    #[pyo3(signature = (
        *, max_num_seqs, max_num_batched_tokens, max_model_len, preemption_mode = None,
        enable_chunked_prefill = false, policy = "fcfs", delay_factor = 0.0,
        num_lookahead_slots = 0, max_loras = None, max_num_bypasses = None, victim_policy = "least_work",
        admit_after_preemption = false, reverse_swapped_order = false, whole_block_chunks = false,
        limit_chunked_prompts = true,
    ))]
    #[expect(clippy::too_many_arguments, clippy::fn_params_excessive_bools, reason = "keywords")]
    fn new(
        max_num_seqs: i64,
        max_num_batched_tokens: i64,
        max_model_len: i64,
        preemption_mode: Option<&str>,
        enable_chunked_prefill: bool,
        policy: &str,
        delay_factor: f64,
        num_lookahead_slots: i64,
        max_loras: Option<i64>,
        max_num_bypasses: Option<i64>,
        victim_policy: &str,
        admit_after_preemption: bool,
        reverse_swapped_order: bool,
        whole_block_chunks: bool,
        limit_chunked_prompts: bool,
    ) -> PyResult<Self> {
        Self::validated(core::SchedulerConfig {
            preemption_mode: preemption_mode.map(mode).transpose()?,
            enable_chunked_prefill,
            policy: choice("policy", policy, &POLICIES)?,
            delay_factor,
            num_lookahead_slots: count("num_lookahead_slots", num_lookahead_slots)?,
            max_loras: max_loras.map(|loras| count("max_loras", loras)).transpose()?,
            max_num_bypasses: match max_num_bypasses {
                Some(number) => count("max_num_bypasses", number)?,
                None if enable_chunked_prefill => BYPASSES_WITH_CHUNKS,
                None => 0,
            },
            victim_policy: choice("victim_policy", victim_policy, &VICTIM_POLICIES)?,
            admit_after_preemption,
            reverse_swapped_order,
            whole_block_chunks,
            limit_chunked_prompts,
            ..core::SchedulerConfig::new(
                count("max_num_seqs", max_num_seqs)?,
                count("max_num_batched_tokens", max_num_batched_tokens)?,
                count("max_model_len", max_model_len)?,
            )
        })
    }

    #[staticmethod]
    #[pyo3(signature = (
        *, max_num_seqs, max_num_batched_tokens, max_model_len, preemption_mode = None,
        enable_chunked_prefill = false, policy = "fcfs", delay_factor = 0.0,
        num_lookahead_slots = 0, max_loras = None,
    ))]
    #[expect(clippy::too_many_arguments, reason = "keywords in Python")]
    fn classic(
        max_num_seqs: i64,
        max_num_batched_tokens: i64,
        max_model_len: i64,
        preemption_mode: Option<&str>,
        enable_chunked_prefill: bool,
        policy: &str,
        delay_factor: f64,
        num_lookahead_slots: i64,
        max_loras: Option<i64>,
    ) -> PyResult<Self> {
        Self::validated(core::SchedulerConfig {
            preemption_mode: preemption_mode.map(mode).transpose()?,
            enable_chunked_prefill,
            policy: choice("policy", policy, &POLICIES)?,
            delay_factor,
            num_lookahead_slots: count("num_lookahead_slots", num_lookahead_slots)?,
            max_loras: max_loras.map(|loras| count("max_loras", loras)).transpose()?,
            ..core::SchedulerConfig::classic(
                count("max_num_seqs", max_num_seqs)?,
                count("max_num_batched_tokens", max_num_batched_tokens)?,
                count("max_model_len", max_model_len)?,
            )
        })
    }

    #[getter]
    fn preemption_mode(&self) -> Option<&'static str> {
        self.0.preemption_mode.map(core::PreemptionMode::as_str)
    }

    #[getter]
    fn policy(&self) -> &'static str {
        name_of(self.0.policy, &POLICIES)
    }

    #[getter]
    fn victim_policy(&self) -> &'static str {
        name_of(self.0.victim_policy, &VICTIM_POLICIES)
    }
}

impl SchedulerConfig {
    fn validated(config: core::SchedulerConfig) -> PyResult<Self> {
        config.validate().or_raise()?;
        Ok(Self(config))
    }
}

/// Measured: docs/options.md.
const BYPASSES_WITH_CHUNKS: usize = 64;

const POLICIES: [(&str, core::Policy); 2] =
    [("fcfs", core::Policy::Fcfs), ("priority", core::Policy::Priority)];

const VICTIM_POLICIES: [(&str, core::VictimPolicy); 2] =
    [("last", core::VictimPolicy::Last), ("least_work", core::VictimPolicy::LeastWork)];

const MODES: [(&str, core::PreemptionMode); 2] = [
    (core::PreemptionMode::Recompute.as_str(), core::PreemptionMode::Recompute),
    (core::PreemptionMode::Swap.as_str(), core::PreemptionMode::Swap),
];

/// A count from Python; a negative one is named instead of overflowing.
pub(crate) fn count(name: &str, value: i64) -> PyResult<usize> {
    count_or(Error::Config, name, value)
}

/// The same, refused with an error of another kind.
pub(crate) fn count_or(kind: fn(String) -> Error, name: &str, value: i64) -> PyResult<usize> {
    let refusal = |_| kind(format!("{name} is {value}; it must not be negative"));
    usize::try_from(value).map_err(refusal).or_raise()
}

fn mode(given: &str) -> PyResult<core::PreemptionMode> {
    choice("preemption_mode", given, &MODES)
}

fn choice<T: Copy>(name: &str, given: &str, choices: &[(&str, T)]) -> PyResult<T> {
    choice_or(Error::Config, name, given, choices)
}

/// What `given` names, refused with an error of this kind where it names nothing.
pub(crate) fn choice_or<T: Copy>(
    kind: fn(String) -> Error,
    name: &str,
    given: &str,
    choices: &[(&str, T)],
) -> PyResult<T> {
    let found = choices.iter().find(|(choice, _)| *choice == given);
    let refusal = || {
        let names: Vec<&str> = choices.iter().map(|(choice, _)| *choice).collect();
        kind(format!("{name} is {given:?}; it must be one of {names:?}"))
    };
    found.map(|(_, value)| *value).ok_or_else(refusal).or_raise()
}

fn name_of<T: Copy + PartialEq>(value: T, choices: &[(&'static str, T)]) -> &'static str {
    choices.iter().find(|(_, choice)| *choice == value).map_or("", |(name, _)| *name)
}
