//! Configurations: keyword-only, validated when made, frozen.

use pagedserve_core::config as core;
use pagedserve_core::error::Error;
use pyo3::prelude::*;

use crate::error::OrRaise;
use crate::groups::KVGroup;

/// Block decisions whose default differs from vLLM 0.6.2.
///
/// docs/options.md gives the effect of each. An argument that is missing or None takes the default
/// named here.
///
/// Args:
///     count_cached_blocks: Subtract blocks shared with running requests from the
///         demand of an admission; True.
///     charge_cached_tokens: Charge cached tokens to the token budget and compute them again;
///         False.
///     share_partial_blocks: Share the last, partly filled block of identical prompts; False.
///     share_generated_blocks: Share blocks of generated tokens with later prompts; True.
///     swap_in_cached_blocks: Also move blocks that the other tier still holds; False.
///     evict_blank_blocks_in_order: Evict free blocks without contents in turn with the cached
///         ones, instead of first; False.
///     exact_append_demand: Ask the pool for the blocks that a step takes, instead of one for each
///         sequence; True.
#[pyclass(frozen, eq, module = "pagedserve._core")]
#[derive(PartialEq)]
pub(crate) struct CacheChoices(core::CacheChoices);

/// KV blocks of both tiers: device and host.
///
/// An argument that is missing or None takes the default named here.
///
/// Args:
///     block_size: Tokens a block holds, at least 1.
///     num_gpu_blocks: Blocks on the device, at least 1.
///     num_cpu_blocks: Blocks in host memory for swapped groups; 0, the default, turns swapping
///         off.
///     watermark: Fraction of the device blocks kept free when a new group is admitted, from 0
///         to below 1; 0.01.
///     enable_prefix_caching: Keep the contents of blocks for later prompts that begin with the
///         same tokens; False.
///     sliding_window: Tokens that the layers of the first group keep, if not all; None.  A
///         sequence then overwrites its oldest blocks, as with vLLM 0.6.2, which excludes prefix
///         caching; a group with a window does not.
///     groups: A ``KVGroup`` for each group of layers beside those that keep all keys and values,
///         which are the first group; none.
///     choices: A ``CacheChoices``; all defaults.
///
/// Raises:
///     ``ConfigError``: Numbers out of range, or groups that exclude each other.
#[pyclass(frozen, module = "pagedserve._core")]
pub(crate) struct CacheConfig(pub(crate) core::CacheConfig);

/// Order and admission decisions whose default differs from vLLM 0.6.2.
///
/// docs/options.md gives the effect of each. An argument that is missing or None takes the default
/// named here.
///
/// Args:
///     admit_after_preemption: Admit prompts in a step that preempts a group; False.
///     reverse_swapped_order: Swap in groups that were swapped out in one step in reverse
///         order; False.
///     whole_block_chunks: Cut a chunk at a block boundary where prefix caching is on; False.
///     limit_chunked_prompts: Also refuse a prompt longer than max_model_len with chunked
///         prefill; True.
///     drain_adapters: Once max_num_seqs requests were admitted before one that waits for its
///         adapter's slot, admit none for the adapter that has had its slot longest; True.
#[pyclass(frozen, eq, module = "pagedserve._core")]
#[derive(PartialEq)]
pub(crate) struct SchedulerChoices(core::SchedulerChoices);

/// Limits and options of the scheduler.
///
/// docs/options.md gives the effect of each. An argument that is missing or None takes the default
/// named here.
///
/// Args:
///     max_model_len: Maximum number of tokens of a sequence, prompt and output together.
///     max_num_seqs: Maximum number of running sequences; 256.
///     max_num_batched_tokens: Maximum number of tokens of one step; 512 with chunked prefill, else
///         2048 or max_model_len, whichever is larger; at least max_num_seqs.
///     preemption_mode: "recompute" or "swap"; None recomputes groups of one sequence and
///         swaps groups of several.
///     enable_chunked_prefill: Cut prompts into chunks that share steps with decodes; False.
///     policy: Order of service: "fcfs", the default, or "priority".
///     delay_factor: Delay prompts until the oldest has waited this many times the duration of the
///         last prompt step; 0 does not delay.
///     num_lookahead_slots: Slots of a decoding sequence after its next token; 0.
///     max_loras: Number of adapter slots on the device, and so of adapters in one step; None
///         without adapters.
///     max_num_bypasses: Maximum number of groups admitted ahead of the head of a queue while it
///         does not fit in memory; 64 with chunked prefill, else 0.
///     victim_policy: Which group is preempted: "least_work", the default, or "last".
///     choices: A ``SchedulerChoices``; all defaults.
///
/// Raises:
///     ``ConfigError``: Numbers out of range, or limits that contradict each other.
#[pyclass(frozen, module = "pagedserve._core")]
pub(crate) struct SchedulerConfig(pub(crate) core::SchedulerConfig);

/// Properties that return a field of the core's configuration.
macro_rules! getters {
    ($class:ident { $($field:ident: $type:ty),* $(,)? }) => {
        #[pymethods]
        impl $class {
            $(
                /// Value of the argument, or its default; see the class.
                #[getter]
                fn $field(&self) -> $type {
                    self.0.$field
                }
            )*
        }
    };
}

/// Class of choices: each is a keyword argument, a property and part of the repr.
macro_rules! choices {
    ($class:ident { $($field:ident),* $(,)? }) => {
        getters!($class { $($field: bool),* });

        #[pymethods]
        impl $class {
            #[new]
            #[pyo3(signature = (*, $($field = None),*))]
            fn new($($field: Option<bool>),*) -> Self {
                let mut choices = core::$class::default();
                $(set(&mut choices.$field, $field);)*
                Self(choices)
            }

            /// Return the choices of vLLM 0.6.2.
            #[staticmethod]
            fn classic() -> Self {
                Self(core::$class::CLASSIC)
            }

            fn __repr__(&self) -> String {
                let name = |value| if value { "True" } else { "False" };
                let fields =
                    [$(format!(concat!(stringify!($field), "={}"), name(self.0.$field))),*];
                format!("{}({})", stringify!($class), fields.join(", "))
            }
        }
    };
}

choices!(CacheChoices {
    count_cached_blocks,
    charge_cached_tokens,
    share_partial_blocks,
    share_generated_blocks,
    swap_in_cached_blocks,
    evict_blank_blocks_in_order,
    exact_append_demand,
});

choices!(SchedulerChoices {
    admit_after_preemption,
    reverse_swapped_order,
    whole_block_chunks,
    limit_chunked_prompts,
    drain_adapters,
});

getters!(CacheConfig {
    block_size: usize,
    num_gpu_blocks: usize,
    num_cpu_blocks: usize,
    watermark: f64,
    enable_prefix_caching: bool,
    sliding_window: Option<usize>,
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
});

#[pymethods]
impl CacheConfig {
    #[new]
    #[pyo3(signature = (
        *, block_size, num_gpu_blocks, num_cpu_blocks = None, watermark = None,
        enable_prefix_caching = None, sliding_window = None, groups = None, choices = None,
    ))]
    #[expect(clippy::too_many_arguments, reason = "keywords in Python")]
    fn new(
        block_size: i64,
        num_gpu_blocks: i64,
        num_cpu_blocks: Option<i64>,
        watermark: Option<f64>,
        enable_prefix_caching: Option<bool>,
        sliding_window: Option<i64>,
        groups: Option<Vec<PyRef<'_, KVGroup>>>,
        choices: Option<&CacheChoices>,
    ) -> PyResult<Self> {
        let mut config = core::CacheConfig::new(
            count("block_size", block_size)?,
            count("num_gpu_blocks", num_gpu_blocks)?,
        );
        set(&mut config.choices, choices.map(|choices| choices.0));
        config.groups = groups.into_iter().flatten().map(|group| group.0).collect();
        Self::with(config, num_cpu_blocks, watermark, enable_prefix_caching, sliding_window)
    }

    /// Return the configuration of vLLM 0.6.2's block manager, without its faults.
    ///
    /// Args:
    ///     block_size: See the class.
    ///     num_gpu_blocks: See the class.
    ///     num_cpu_blocks: See the class.
    ///     watermark: See the class.
    ///     enable_prefix_caching: See the class.
    ///     sliding_window: See the class.
    #[staticmethod]
    #[pyo3(signature = (
        *, block_size, num_gpu_blocks, num_cpu_blocks = None, watermark = None,
        enable_prefix_caching = None, sliding_window = None,
    ))]
    fn classic(
        block_size: i64,
        num_gpu_blocks: i64,
        num_cpu_blocks: Option<i64>,
        watermark: Option<f64>,
        enable_prefix_caching: Option<bool>,
        sliding_window: Option<i64>,
    ) -> PyResult<Self> {
        let config = core::CacheConfig::classic(
            count("block_size", block_size)?,
            count("num_gpu_blocks", num_gpu_blocks)?,
        );
        Self::with(config, num_cpu_blocks, watermark, enable_prefix_caching, sliding_window)
    }

    /// Groups beside the first, in order; see the class.
    #[getter]
    fn groups(&self) -> Vec<KVGroup> {
        self.0.groups.iter().copied().map(KVGroup).collect()
    }

    /// Value of the argument, or its default; see the class.
    #[getter]
    fn choices(&self) -> CacheChoices {
        CacheChoices(self.0.choices)
    }
}

impl CacheConfig {
    /// Applies the arguments that both constructors accept to `config`.
    fn with(
        mut config: core::CacheConfig,
        num_cpu_blocks: Option<i64>,
        watermark: Option<f64>,
        enable_prefix_caching: Option<bool>,
        sliding_window: Option<i64>,
    ) -> PyResult<Self> {
        set(&mut config.num_cpu_blocks, optional_count("num_cpu_blocks", num_cpu_blocks)?);
        set(&mut config.watermark, watermark);
        set(&mut config.enable_prefix_caching, enable_prefix_caching);
        config.sliding_window = optional_count("sliding_window", sliding_window)?;
        config.validate().or_raise()?;
        Ok(Self(config))
    }
}

/// Arguments that both constructors of `SchedulerConfig` accept.
struct Limits<'a> {
    max_model_len: i64,
    max_num_seqs: Option<i64>,
    max_num_batched_tokens: Option<i64>,
    preemption_mode: Option<&'a str>,
    enable_chunked_prefill: Option<bool>,
    policy: Option<&'a str>,
    delay_factor: Option<f64>,
    num_lookahead_slots: Option<i64>,
    max_loras: Option<i64>,
}

impl Limits<'_> {
    /// Returns the configuration that `make` makes of the limits, with the other arguments applied.
    fn config(
        &self,
        make: fn(usize, usize, usize) -> core::SchedulerConfig,
    ) -> PyResult<core::SchedulerConfig> {
        let is_chunked = self.enable_chunked_prefill.unwrap_or(false);
        let max_model_len = count("max_model_len", self.max_model_len)?;
        let max_num_seqs = optional_count("max_num_seqs", self.max_num_seqs)?
            .unwrap_or(core::SchedulerConfig::DEFAULT_MAX_NUM_SEQS);
        let max_num_batched_tokens =
            optional_count("max_num_batched_tokens", self.max_num_batched_tokens)?;
        let max_num_batched_tokens = max_num_batched_tokens.unwrap_or_else(|| {
            core::SchedulerConfig::default_max_num_batched_tokens(
                is_chunked,
                max_num_seqs,
                max_model_len,
            )
        });
        let mut config = make(max_num_seqs, max_num_batched_tokens, max_model_len);
        config.enable_chunked_prefill = is_chunked;
        config.preemption_mode = self.preemption_mode.map(mode).transpose()?;
        let policy = self.policy.map(|policy| choice("policy", policy, &POLICIES));
        set(&mut config.policy, policy.transpose()?);
        set(&mut config.delay_factor, self.delay_factor);
        let num_slots = optional_count("num_lookahead_slots", self.num_lookahead_slots)?;
        set(&mut config.num_lookahead_slots, num_slots);
        config.max_loras = optional_count("max_loras", self.max_loras)?;
        Ok(config)
    }
}

#[pymethods]
impl SchedulerConfig {
    #[new]
    #[pyo3(signature = (
        *, max_model_len, max_num_seqs = None, max_num_batched_tokens = None,
        preemption_mode = None, enable_chunked_prefill = None, policy = None, delay_factor = None,
        num_lookahead_slots = None, max_loras = None, max_num_bypasses = None,
        victim_policy = None, choices = None,
    ))]
    #[expect(clippy::too_many_arguments, reason = "keywords in Python")]
    fn new(
        max_model_len: i64,
        max_num_seqs: Option<i64>,
        max_num_batched_tokens: Option<i64>,
        preemption_mode: Option<&str>,
        enable_chunked_prefill: Option<bool>,
        policy: Option<&str>,
        delay_factor: Option<f64>,
        num_lookahead_slots: Option<i64>,
        max_loras: Option<i64>,
        max_num_bypasses: Option<i64>,
        victim_policy: Option<&str>,
        choices: Option<&SchedulerChoices>,
    ) -> PyResult<Self> {
        let limits = Limits {
            max_model_len,
            max_num_seqs,
            max_num_batched_tokens,
            preemption_mode,
            enable_chunked_prefill,
            policy,
            delay_factor,
            num_lookahead_slots,
            max_loras,
        };
        let mut config = limits.config(core::SchedulerConfig::new)?;
        config.max_num_bypasses = optional_count("max_num_bypasses", max_num_bypasses)?
            .unwrap_or_else(|| {
                core::SchedulerConfig::default_max_num_bypasses(config.enable_chunked_prefill)
            });
        let victims = victim_policy.map(|name| choice("victim_policy", name, &VICTIM_POLICIES));
        set(&mut config.victim_policy, victims.transpose()?);
        set(&mut config.choices, choices.map(|choices| choices.0));
        Self::validated(config)
    }

    /// Return the configuration of vLLM 0.6.2's scheduler, without its faults.
    ///
    /// Args:
    ///     max_model_len: See the class.
    ///     max_num_seqs: See the class.
    ///     max_num_batched_tokens: See the class.
    ///     preemption_mode: See the class.
    ///     enable_chunked_prefill: See the class.
    ///     policy: See the class.
    ///     delay_factor: See the class.
    ///     num_lookahead_slots: See the class.
    ///     max_loras: See the class.
    #[staticmethod]
    #[pyo3(signature = (
        *, max_model_len, max_num_seqs = None, max_num_batched_tokens = None,
        preemption_mode = None, enable_chunked_prefill = None, policy = None, delay_factor = None,
        num_lookahead_slots = None, max_loras = None,
    ))]
    #[expect(clippy::too_many_arguments, reason = "keywords in Python")]
    fn classic(
        max_model_len: i64,
        max_num_seqs: Option<i64>,
        max_num_batched_tokens: Option<i64>,
        preemption_mode: Option<&str>,
        enable_chunked_prefill: Option<bool>,
        policy: Option<&str>,
        delay_factor: Option<f64>,
        num_lookahead_slots: Option<i64>,
        max_loras: Option<i64>,
    ) -> PyResult<Self> {
        let limits = Limits {
            max_model_len,
            max_num_seqs,
            max_num_batched_tokens,
            preemption_mode,
            enable_chunked_prefill,
            policy,
            delay_factor,
            num_lookahead_slots,
            max_loras,
        };
        Self::validated(limits.config(core::SchedulerConfig::classic)?)
    }

    /// Preemption mode: "recompute", "swap" or None; see the class.
    #[getter]
    fn preemption_mode(&self) -> Option<&'static str> {
        self.0.preemption_mode.map(core::PreemptionMode::as_str)
    }

    /// Scheduling policy: "fcfs" or "priority"; see the class.
    #[getter]
    fn policy(&self) -> &'static str {
        name_of(self.0.policy, &POLICIES)
    }

    /// Victim policy: "last" or "least_work"; see the class.
    #[getter]
    fn victim_policy(&self) -> &'static str {
        name_of(self.0.victim_policy, &VICTIM_POLICIES)
    }

    /// Value of the argument, or its default; see the class.
    #[getter]
    fn choices(&self) -> SchedulerChoices {
        SchedulerChoices(self.0.choices)
    }
}

impl SchedulerConfig {
    fn validated(config: core::SchedulerConfig) -> PyResult<Self> {
        config.validate().or_raise()?;
        Ok(Self(config))
    }
}

/// Overwrites the default with an argument that is present.
pub(crate) fn set<T>(field: &mut T, given: Option<T>) {
    if let Some(value) = given {
        *field = value;
    }
}

pub(crate) fn optional_count(name: &str, value: Option<i64>) -> PyResult<Option<usize>> {
    value.map(|value| count(name, value)).transpose()
}

const POLICIES: [(&str, core::Policy); 2] =
    [("fcfs", core::Policy::Fcfs), ("priority", core::Policy::Priority)];

const VICTIM_POLICIES: [(&str, core::VictimPolicy); 2] =
    [("last", core::VictimPolicy::Last), ("least_work", core::VictimPolicy::LeastWork)];

const MODES: [(&str, core::PreemptionMode); 2] = [
    (core::PreemptionMode::Recompute.as_str(), core::PreemptionMode::Recompute),
    (core::PreemptionMode::Swap.as_str(), core::PreemptionMode::Swap),
];

/// Converts a count from Python; a negative one is refused by name.
pub(crate) fn count(name: &str, value: i64) -> PyResult<usize> {
    count_or(Error::Config, name, value)
}

/// Converts a count like `count`, with another kind of error.
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

/// Looks `given` up among names; an unknown one is an error of this kind.
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
