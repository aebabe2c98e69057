//! Configurations: keyword-only, validated when made, frozen.

use std::collections::BTreeMap;

use pagedserve_core::config as core;
use pagedserve_core::error::Error;
use pyo3::prelude::*;

use crate::error::OrRaise;

/// The decisions on blocks in which the best known way is not vLLM 0.6.2's; docs/options.md says
/// what each gives.
///
/// What is not given, or None, has the default named here: the best known way.
///
/// Args:
///     count_cached_blocks: In admission take off what a request shares with running ones; True.
///     charge_cached_tokens: Charge cached tokens to the token budget and compute them again;
///         False.
///     share_partial_blocks: Share the last, partly filled block of identical prompts; False.
///     share_generated_blocks: Let later prompts find blocks with generated tokens; True.
///     swap_in_cached_blocks: Move blocks that the other tier still has, too; False.
///     evict_blank_blocks_in_order: Evict free blocks without contents in turn with the cached
///         ones, instead of first; False.
///     exact_append_demand: Ask the pool for the blocks that a step takes, instead of one for each
///         sequence; True.
#[pyclass(frozen, eq, module = "pagedserve._core")]
#[derive(PartialEq)]
pub(crate) struct CacheChoices(core::CacheChoices);

/// The blocks of layers that see a window of each sequence, beside those that see everything.
///
/// A sequence has no more of them than the window spans and a step adds.
///
/// Args:
///     window: Tokens that a query sees, itself included, in the layer that sees most; at least 1.
///     num_gpu_blocks: Blocks on the device; at least ``num_gpu_blocks_for`` one sequence.
///     num_cpu_blocks: Blocks in host memory for swapped groups; 0, the default, turns swapping off.
///
/// Raises:
///     ``ConfigError``: Numbers out of range.
#[pyclass(frozen, eq, module = "pagedserve._core")]
#[derive(PartialEq)]
pub(crate) struct WindowGroup(core::WindowGroup);

/// The KV blocks of both tiers.
///
/// What is not given, or None, has the default named here.
///
/// Args:
///     block_size: Tokens a block holds, at least 1.
///     num_gpu_blocks: Blocks on the device, at least 1.
///     num_cpu_blocks: Blocks in host memory for swapped groups; 0, the default, turns swapping
///         off.
///     watermark: Share of the device blocks kept free when a new group is admitted, from 0 to
///         below 1; 0.01.
///     enable_prefix_caching: Keep the contents of blocks for later prompts that begin with the
///         same tokens; False.
///     sliding_window: Tokens that a query can see, itself included, where all layers have one
///         window; None.  Excludes prefix caching.
///     window_group: A ``WindowGroup``, where some layers have a window and others see everything; None.
///         Excludes prefix caching and ``sliding_window``.
///     choices: A ``CacheChoices``: where to decide as vLLM 0.6.2 did; nowhere.
///
/// Raises:
///     ``ConfigError``: Numbers out of range, or windows with prefix caching.
#[pyclass(frozen, module = "pagedserve._core")]
pub(crate) struct CacheConfig(pub(crate) core::CacheConfig);

/// The decisions on order and admission in which the best known way is not vLLM 0.6.2's;
/// docs/options.md says what each gives.
///
/// What is not given, or None, has the default named here: the best known way.
///
/// Args:
///     admit_after_preemption: Admit prompts in a step in which somebody was preempted; False.
///     reverse_swapped_order: Bring groups swapped out in one step back last first; False.
///     whole_block_chunks: Cut a chunk at a block boundary where prefix caching is on; False.
///     limit_chunked_prompts: Refuse a prompt beyond max_model_len with chunks too; True.
///     drain_adapters: Once max_num_seqs requests were admitted before one that waits for its
///         adapter's slot, admit none for the adapter that has had its slot longest; True.
#[pyclass(frozen, eq, module = "pagedserve._core")]
#[derive(PartialEq)]
pub(crate) struct SchedulerChoices(core::SchedulerChoices);

/// The limits and options of the scheduler; docs/options.md says what they give.
///
/// What is not given, or None, has the default named here.
///
/// Args:
///     max_model_len: Tokens of a sequence, prompt and output together.
///     max_num_seqs: Sequences that may run at once; 256.
///     max_num_batched_tokens: Tokens that one step may compute; 512 with chunked prefill, else
///         2048, or max_model_len if that is more; never fewer than max_num_seqs.
///     preemption_mode: "recompute" or "swap"; None takes recompute for groups of one sequence,
///         swap for those of several.
///     enable_chunked_prefill: Cut prompts into chunks that share steps with decodes; False.
///     policy: Which group is served first: "fcfs", the default, or "priority".
///     delay_factor: Hold prompts back until the oldest has waited this many times the last prompt
///         step; 0, not.
///     num_lookahead_slots: Slots of a decoding sequence beyond its next token; 0.
///     max_loras: Slots for adapters on the device, and so how many may be active in one step;
///         None, no adapters.
///     num_state_slots: Slots on the device for what layers keep of a sequence beside keys and
///         values, at least max_num_seqs; 0, they keep nothing else.
///     num_cpu_state_slots: Slots in host memory for the states of swapped groups; 0.
///     max_num_bypasses: How many groups may be admitted before a head of a queue that does not
///         fit; then nobody passes it any more.  64 with chunked prefill, else 0.
///     victim_policy: Who is preempted: "least_work", the default, or "last".
///     choices: A ``SchedulerChoices``: where to decide as vLLM 0.6.2 did; nowhere.
///
/// Raises:
///     ``ConfigError``: Numbers out of range, or limits that contradict each other.
#[pyclass(frozen, module = "pagedserve._core")]
pub(crate) struct SchedulerConfig(pub(crate) core::SchedulerConfig);

/// Properties that hand a field of the core's configuration out as it is.
macro_rules! getters {
    ($class:ident { $($field:ident: $type:ty),* $(,)? }) => {
        #[pymethods]
        impl $class {
            $(
                /// As given, or the default; see the class.
                #[getter]
                fn $field(&self) -> $type {
                    self.0.$field
                }
            )*
        }
    };
}

/// All of a class of choices: each is a keyword, a property and part of what is printed.
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

            /// All as vLLM 0.6.2 decided.
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

getters!(WindowGroup { window: usize, num_gpu_blocks: usize, num_cpu_blocks: usize });

getters!(SchedulerConfig {
    max_num_seqs: usize,
    max_num_batched_tokens: usize,
    max_model_len: usize,
    enable_chunked_prefill: bool,
    delay_factor: f64,
    num_lookahead_slots: usize,
    max_loras: Option<usize>,
    num_state_slots: usize,
    num_cpu_state_slots: usize,
    max_num_bypasses: usize,
});

#[pymethods]
impl CacheConfig {
    #[new]
    #[pyo3(signature = (
        *, block_size, num_gpu_blocks, num_cpu_blocks = None, watermark = None,
        enable_prefix_caching = None, sliding_window = None, window_group = None, choices = None,
    ))]
    #[expect(clippy::too_many_arguments, reason = "keywords in Python")]
    fn new(
        block_size: i64,
        num_gpu_blocks: i64,
        num_cpu_blocks: Option<i64>,
        watermark: Option<f64>,
        enable_prefix_caching: Option<bool>,
        sliding_window: Option<i64>,
        window_group: Option<&WindowGroup>,
        choices: Option<&CacheChoices>,
    ) -> PyResult<Self> {
        let mut config = core::CacheConfig::new(
            count("block_size", block_size)?,
            count("num_gpu_blocks", num_gpu_blocks)?,
        );
        set(&mut config.choices, choices.map(|choices| choices.0));
        config.window_group = window_group.map(|group| group.0);
        Self::with(config, num_cpu_blocks, watermark, enable_prefix_caching, sliding_window)
    }

    /// The decisions of vLLM 0.6.2's block manager, its faults excepted.
    ///
    /// Args:
    ///     block_size: As of the class.
    ///     num_gpu_blocks: As of the class.
    ///     num_cpu_blocks: As of the class.
    ///     watermark: As of the class.
    ///     enable_prefix_caching: As of the class.
    ///     sliding_window: As of the class.
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

    /// As given; see the class.
    #[getter]
    fn window_group(&self) -> Option<WindowGroup> {
        self.0.window_group.map(WindowGroup)
    }

    /// As given, or the default; see the class.
    #[getter]
    fn choices(&self) -> CacheChoices {
        CacheChoices(self.0.choices)
    }
}

impl CacheConfig {
    /// `config` with what both ways of making one accept.
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

#[pymethods]
impl WindowGroup {
    #[new]
    #[pyo3(signature = (*, window, num_gpu_blocks, num_cpu_blocks = None))]
    fn new(window: i64, num_gpu_blocks: i64, num_cpu_blocks: Option<i64>) -> PyResult<Self> {
        let group = core::WindowGroup {
            window: count("window", window)?,
            num_gpu_blocks: count("num_gpu_blocks", num_gpu_blocks)?,
            num_cpu_blocks: optional_count("num_cpu_blocks", num_cpu_blocks)?.unwrap_or(0),
        };
        group.validate().or_raise()?;
        Ok(Self(group))
    }

    /// The most device blocks that are used while so many sequences run: what each keeps between steps,
    /// and what the tokens of one step add.
    ///
    /// Args:
    ///     scheduler_config: The scheduler's limits.
    ///     window: As of the class.
    ///     block_size: Tokens a block holds, at least 1.
    ///     num_seqs: Sequences; of 1 it is the least that a scheduler accepts.
    #[staticmethod]
    #[pyo3(signature = (scheduler_config, *, window, block_size, num_seqs = 1))]
    fn num_gpu_blocks_for(
        scheduler_config: &SchedulerConfig,
        window: i64,
        block_size: i64,
        num_seqs: i64,
    ) -> PyResult<usize> {
        let block_size = count("block_size", block_size)?.max(1);
        let (window, num_seqs) = (count("window", window)?, count("num_seqs", num_seqs)?);
        Ok(scheduler_config.0.num_window_blocks(num_seqs, window, block_size))
    }

    /// What it is made of, for pickle.
    fn __getnewargs_ex__(&self) -> ((), BTreeMap<&'static str, usize>) {
        let core::WindowGroup { window, num_gpu_blocks, num_cpu_blocks } = self.0;
        let made_of = [
            ("window", window),
            ("num_gpu_blocks", num_gpu_blocks),
            ("num_cpu_blocks", num_cpu_blocks),
        ];
        ((), made_of.into())
    }

    fn __repr__(&self) -> String {
        let core::WindowGroup { window, num_gpu_blocks, num_cpu_blocks } = self.0;
        format!(
            "WindowGroup(window={window}, num_gpu_blocks={num_gpu_blocks}, \
             num_cpu_blocks={num_cpu_blocks})"
        )
    }
}

/// What both ways of making a `SchedulerConfig` accept.
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
    /// The configuration that `make` makes of the limits, and the rest of them.
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
        num_lookahead_slots = None, max_loras = None, num_state_slots = None,
        num_cpu_state_slots = None, max_num_bypasses = None, victim_policy = None, choices = None,
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
        num_state_slots: Option<i64>,
        num_cpu_state_slots: Option<i64>,
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
        set(&mut config.num_state_slots, optional_count("num_state_slots", num_state_slots)?);
        let num_cpu_slots = optional_count("num_cpu_state_slots", num_cpu_state_slots)?;
        set(&mut config.num_cpu_state_slots, num_cpu_slots);
        config.max_num_bypasses = optional_count("max_num_bypasses", max_num_bypasses)?
            .unwrap_or_else(|| {
                core::SchedulerConfig::default_max_num_bypasses(config.enable_chunked_prefill)
            });
        let victims = victim_policy.map(|name| choice("victim_policy", name, &VICTIM_POLICIES));
        set(&mut config.victim_policy, victims.transpose()?);
        set(&mut config.choices, choices.map(|choices| choices.0));
        Self::validated(config)
    }

    /// The decisions of vLLM 0.6.2's scheduler, its faults excepted.
    ///
    /// Args:
    ///     max_model_len: As of the class.
    ///     max_num_seqs: As of the class.
    ///     max_num_batched_tokens: As of the class.
    ///     preemption_mode: As of the class.
    ///     enable_chunked_prefill: As of the class.
    ///     policy: As of the class.
    ///     delay_factor: As of the class.
    ///     num_lookahead_slots: As of the class.
    ///     max_loras: As of the class.
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

    /// "recompute", "swap" or None; see the class.
    #[getter]
    fn preemption_mode(&self) -> Option<&'static str> {
        self.0.preemption_mode.map(core::PreemptionMode::as_str)
    }

    /// "fcfs" or "priority"; see the class.
    #[getter]
    fn policy(&self) -> &'static str {
        name_of(self.0.policy, &POLICIES)
    }

    /// "last" or "least_work"; see the class.
    #[getter]
    fn victim_policy(&self) -> &'static str {
        name_of(self.0.victim_policy, &VICTIM_POLICIES)
    }

    /// As given, or the default; see the class.
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

/// What is not given leaves the default.
fn set<T>(field: &mut T, given: Option<T>) {
    if let Some(value) = given {
        *field = value;
    }
}

fn optional_count(name: &str, value: Option<i64>) -> PyResult<Option<usize>> {
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
