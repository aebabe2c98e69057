//! Configurations of a scheduler, validated as a whole before anything is built.

use crate::error::{Error, Result};

/// How a preempted group releases its blocks (Kwon et al., `PagedAttention`,
/// SOSP 2023, section 4.5).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum PreemptionMode {
    /// Blocks are freed; the group's tokens are computed again later.
    Recompute,
    /// Blocks are swapped out to host memory and swapped in later.
    Swap,
}

impl PreemptionMode {
    /// The name used in configurations and logs.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Recompute => "recompute",
            Self::Swap => "swap",
        }
    }
}

/// Order in which groups are served.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Policy {
    /// First come, first served.
    #[default]
    Fcfs,
    /// Smallest priority number first, then earliest arrival; waiting groups may preempt running
    /// groups of lower priority.
    Priority,
}

/// Which running group is preempted when another needs its blocks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum VictimPolicy {
    /// The last group of the queue.
    Last,
    /// The group with the fewest computed tokens among those not yet served in the step, since
    /// computed tokens are lost.
    #[default]
    LeastWork,
}

/// Block decisions whose default differs from vLLM 0.6.2.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct CacheChoices {
    /// Subtract blocks shared with running requests from the demand of an admission.
    pub count_cached_blocks: bool,
    /// Charge a request's cached tokens to the token budget and compute them again, as vLLM
    /// 0.6.2's scheduler accounts for them.
    pub charge_cached_tokens: bool,
    /// Share the last, partly filled block of a prompt with identical prompts, at the price of
    /// a copy for all but one of them.
    pub share_partial_blocks: bool,
    /// Share blocks of generated tokens with later prompts that hold the same tokens, such as the
    /// next turn of a conversation; otherwise only with requests whose prompt ends at the same
    /// position.
    pub share_generated_blocks: bool,
    /// Move all blocks of a swapped group, also those that the other tier still holds.
    pub swap_in_cached_blocks: bool,
    /// Evict free blocks without contents in turn with the cached ones, instead of first.
    pub evict_blank_blocks_in_order: bool,
    /// Ask the pool for the blocks that a step takes, instead of one for each sequence.
    pub exact_append_demand: bool,
}

impl CacheChoices {
    /// The choices of vLLM 0.6.2.
    pub const CLASSIC: Self = Self {
        count_cached_blocks: false,
        charge_cached_tokens: true,
        share_partial_blocks: true,
        share_generated_blocks: false,
        swap_in_cached_blocks: true,
        evict_blank_blocks_in_order: true,
        exact_append_demand: false,
    };
}

impl Default for CacheChoices {
    fn default() -> Self {
        Self {
            count_cached_blocks: true,
            charge_cached_tokens: false,
            share_partial_blocks: false,
            share_generated_blocks: true,
            swap_in_cached_blocks: false,
            evict_blank_blocks_in_order: false,
            exact_append_demand: true,
        }
    }
}

/// What the layers of a [`KvGroup`] keep of a sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum KvKind {
    /// Keys and values of the newest tokens, and of sink tokens at the start (Xiao et al.,
    /// `StreamingLLM`, ICLR 2024).
    Window {
        /// Newest tokens that a query attends to, itself included, in the layer with the largest
        /// window.
        window: usize,
        /// First tokens of a sequence, which every query attends to beside its window.
        num_sink_tokens: usize,
    },
    /// Keys and values of the tokens of the current chunk: a query attends to those from the last
    /// multiple of this many positions on, itself included (Llama 4).
    Chunked(usize),
    /// One state of fixed size, as recurrences have; a block of the group is the state of one
    /// sequence.
    State,
    /// Keys and values of an encoder's output, in blocks of the first group's pool.
    Cross,
}

impl KvKind {
    /// The name of the kind, used in configurations and logs, and the maximum number of tokens that
    /// a query attends to; none for states and encoders.
    pub fn named(self) -> (&'static str, Option<usize>) {
        match self {
            Self::Window { window, .. } => ("window", Some(window)),
            Self::Chunked(chunk) => ("chunked", Some(chunk)),
            Self::State => ("state", None),
            Self::Cross => ("cross", None),
        }
    }

    /// First tokens of a sequence that a window keeps; 0 for another kind.
    pub fn num_sink_tokens(self) -> usize {
        match self {
            Self::Window { num_sink_tokens, .. } => num_sink_tokens,
            Self::Chunked(_) | Self::State | Self::Cross => 0,
        }
    }
}

/// Layers that keep something else of a sequence than all its keys and values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct KvGroup {
    /// What the layers keep of a sequence.
    pub kind: KvKind,
    /// Blocks of the group's pool on the device; 0 for cross attention, which has no pool.
    pub num_gpu_blocks: usize,
    /// Blocks of the pool in host memory for swapped groups; 0 turns swapping off.
    pub num_cpu_blocks: usize,
}

impl KvGroup {
    /// A window of `window` tokens in a pool of `num_gpu_blocks`, at least
    /// [`SchedulerConfig::num_group_blocks`] of one sequence; without host blocks.
    pub fn window(window: usize, num_gpu_blocks: usize) -> Self {
        Self::window_with_sinks(window, 0, num_gpu_blocks)
    }

    /// As [`window`](Self::window), which also keeps the first `num_sink_tokens` of a sequence.
    pub fn window_with_sinks(window: usize, num_sink_tokens: usize, num_gpu_blocks: usize) -> Self {
        let kind = KvKind::Window { window, num_sink_tokens };
        Self { kind, num_gpu_blocks, num_cpu_blocks: 0 }
    }

    /// Chunks of `chunk` tokens in a pool of `num_gpu_blocks`, at least
    /// [`SchedulerConfig::num_group_blocks`] of one sequence; without host blocks.
    pub fn chunked(chunk: usize, num_gpu_blocks: usize) -> Self {
        Self { kind: KvKind::Chunked(chunk), num_gpu_blocks, num_cpu_blocks: 0 }
    }

    /// States in a pool of `num_gpu_blocks`, at least [`SchedulerConfig::max_num_seqs`]; without
    /// host blocks.
    pub fn state(num_gpu_blocks: usize) -> Self {
        Self { kind: KvKind::State, num_gpu_blocks, num_cpu_blocks: 0 }
    }

    /// Cross attention, in the first group's pool.
    pub fn cross() -> Self {
        Self { kind: KvKind::Cross, num_gpu_blocks: 0, num_cpu_blocks: 0 }
    }

    /// Checks the group alone.
    ///
    /// # Errors
    /// [`Error::Config`].
    pub fn validate(&self) -> Result<()> {
        if let (_, Some(window)) = self.kind.named() {
            at_least_one("the window of a KV group", window)?;
        }
        fits_i32("num_sink_tokens of a KV group", self.kind.num_sink_tokens())?;
        fits_i32("num_gpu_blocks of a KV group", self.num_gpu_blocks)?;
        fits_i32("num_cpu_blocks of a KV group", self.num_cpu_blocks)
    }

    /// Checks that one sequence, and for states as many as may run, fit into the pool.
    fn validate_size(&self, scheduler: &SchedulerConfig, block_size: usize) -> Result<()> {
        let (num_blocks, max_num_seqs) = (self.num_gpu_blocks, scheduler.max_num_seqs);
        let least = scheduler.num_group_blocks(self.kind, 1, block_size);
        let refusal = match self.kind {
            KvKind::State if num_blocks < max_num_seqs => format!(
                "num_gpu_blocks of the KV group of states is {num_blocks}, below max_num_seqs, \
                 {max_num_seqs}; every sequence that runs has one"
            ),
            KvKind::State if scheduler.num_lookahead_slots > 0 => {
                "a KV group of states and num_lookahead_slots exclude each other: a state cannot \
                 go back to before a token"
                    .to_owned()
            }
            KvKind::Window { window, .. } | KvKind::Chunked(window) if num_blocks < least => {
                let num_tokens = scheduler.max_num_batched_tokens;
                format!(
                    "num_gpu_blocks of the KV group with a window of {window} tokens is \
                     {num_blocks}; a sequence and a step of {num_tokens} tokens need {least}"
                )
            }
            _ => return Ok(()),
        };
        Err(Error::Config(refusal))
    }
}

/// The KV blocks of both tiers.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct CacheConfig {
    /// Tokens a block holds, at least 1.
    pub block_size: usize,
    /// Blocks on the device, at least 1.
    pub num_gpu_blocks: usize,
    /// Blocks in host memory for swapped groups; 0 turns swapping off.
    pub num_cpu_blocks: usize,
    /// Fraction of the device blocks kept free when a new group is admitted, in `[0, 1)`.  It
    /// damps thrashing: admitting a group and preempting it at once.
    pub watermark: f64,
    /// Whether blocks keep their contents for later requests with the same prefix.
    pub enable_prefix_caching: bool,
    /// Tokens that the layers of the first group keep, if not all: a sequence then overwrites its
    /// oldest blocks, as with the block manager of vLLM 0.6.2.  Excludes prefix caching; a
    /// [`KvKind::Window`] does not.
    pub sliding_window: Option<usize>,
    /// Groups of layers beside those that keep all keys and values, which are the first group.
    pub groups: Vec<KvGroup>,
    /// Decisions whose default differs from vLLM 0.6.2.
    pub choices: CacheChoices,
}

impl CacheConfig {
    /// Defaults: no prefix caching, no host blocks, a watermark of one percent.
    pub fn new(block_size: usize, num_gpu_blocks: usize) -> Self {
        Self {
            block_size,
            num_gpu_blocks,
            num_cpu_blocks: 0,
            watermark: 0.01,
            enable_prefix_caching: false,
            sliding_window: None,
            groups: Vec::new(),
            choices: CacheChoices::default(),
        }
    }

    /// The configuration of vLLM 0.6.2's block manager.
    pub fn classic(block_size: usize, num_gpu_blocks: usize) -> Self {
        Self { choices: CacheChoices::CLASSIC, ..Self::new(block_size, num_gpu_blocks) }
    }

    /// Returns this configuration, changed by `change`.
    #[must_use]
    pub fn with(mut self, change: impl FnOnce(&mut Self)) -> Self {
        change(&mut self);
        self
    }

    /// Checks all fields together.
    ///
    /// # Errors
    /// [`Error::Config`] with the field, its value and the accepted values.
    pub fn validate(&self) -> Result<()> {
        at_least_one("block_size", self.block_size)?;
        at_least_one("num_gpu_blocks", self.num_gpu_blocks)?;
        // Slots are 64-bit but block ids travel in 32-bit tables.
        fits_i32("num_gpu_blocks", self.num_gpu_blocks)?;
        fits_i32("num_cpu_blocks", self.num_cpu_blocks)?;
        fits_i32("block_size", self.block_size)?;
        if self.sliding_window.is_some() && self.enable_prefix_caching {
            return Err(Error::Config(
                "sliding_window and enable_prefix_caching exclude each other: a window's blocks \
                 are overwritten in place"
                    .to_owned(),
            ));
        }
        if self.sliding_window == Some(0) {
            return Err(Error::Config("sliding_window is 0; it must be at least 1".to_owned()));
        }
        self.validate_groups()?;
        if !(0.0..1.0).contains(&self.watermark) {
            return Err(Error::Config(format!(
                "watermark is {}; it must be at least 0 and below 1",
                self.watermark
            )));
        }
        Ok(())
    }

    fn validate_groups(&self) -> Result<()> {
        self.groups.iter().try_for_each(KvGroup::validate)?;
        let has = |wanted: fn(KvKind) -> bool| self.groups.iter().any(|group| wanted(group.kind));
        let refusal = if has(|kind| matches!(kind, KvKind::Window { .. } | KvKind::Chunked(_)))
            && self.sliding_window.is_some()
        {
            "a KV group with a window and sliding_window exclude each other: the first group's \
             layers keep everything beside such a group"
        } else if has(|kind| kind == KvKind::State) && self.enable_prefix_caching {
            "a KV group of states and enable_prefix_caching exclude each other: a state is that \
             of a whole sequence, and no block of a prefix has one"
        } else {
            return Ok(());
        };
        Err(Error::Config(refusal.to_owned()))
    }

    /// Checks that the pools are large enough for a scheduler with these limits.
    ///
    /// # Errors
    /// [`Error::Config`].
    pub fn validate_for(&self, scheduler: &SchedulerConfig) -> Result<()> {
        self.groups.iter().try_for_each(|group| group.validate_size(scheduler, self.block_size))
    }

    /// The watermark in whole blocks, rounded down.
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        clippy::cast_precision_loss,
        reason = "validated: 0 <= watermark < 1 and under 2^31 blocks"
    )]
    pub fn watermark_blocks(&self) -> usize {
        (self.watermark * self.num_gpu_blocks as f64) as usize
    }
}

/// Order and admission decisions whose default differs from vLLM 0.6.2.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct SchedulerChoices {
    /// Admit new prompts in a step that preempts a group, and with chunked prefill while a group is
    /// swapped out.
    pub admit_after_preemption: bool,
    /// Swap in groups that were swapped out in one step in reverse order.
    pub reverse_swapped_order: bool,
    /// Cut a chunk at a block boundary where prefix caching is on.
    pub whole_block_chunks: bool,
    /// Refuse a prompt beyond `max_model_len` also where prompts are cut into chunks, whatever
    /// the length of its first chunk.
    pub limit_chunked_prompts: bool,
    /// Once `max_num_seqs` groups were admitted ahead of one that waits for an adapter slot, admit
    /// no group for the adapter that has held its slot longest; otherwise it may wait indefinitely.
    pub drain_adapters: bool,
}

impl SchedulerChoices {
    /// The choices of vLLM 0.6.2.
    pub const CLASSIC: Self = Self {
        admit_after_preemption: true,
        reverse_swapped_order: true,
        whole_block_chunks: true,
        limit_chunked_prompts: false,
        drain_adapters: false,
    };
}

impl Default for SchedulerChoices {
    fn default() -> Self {
        Self {
            admit_after_preemption: false,
            reverse_swapped_order: false,
            whole_block_chunks: false,
            limit_chunked_prompts: true,
            drain_adapters: true,
        }
    }
}

/// The limits and options of the scheduler.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct SchedulerConfig {
    /// Maximum number of running sequences.
    pub max_num_seqs: usize,
    /// Maximum number of tokens of one step.
    pub max_num_batched_tokens: usize,
    /// Maximum number of tokens of a sequence, prompt and output together.
    pub max_model_len: usize,
    /// `None` recomputes groups of one sequence and swaps groups of several.
    pub preemption_mode: Option<PreemptionMode>,
    /// Cut prompts into chunks that share steps with decodes (Agrawal et al., Sarathi-Serve,
    /// OSDI 2024), decodes first.
    pub enable_chunked_prefill: bool,
    /// Order in which groups are served.
    pub policy: Policy,
    /// Delay prompts until the oldest has waited this many times the duration of the last prompt
    /// step, so that more of them run together; 0 does not delay.
    pub delay_factor: f64,
    /// Slots of a decoding sequence after its next token.
    pub num_lookahead_slots: usize,
    /// Number of adapter slots on the device, and so of adapters in one step; `None` without
    /// adapters.
    pub max_loras: Option<usize>,
    /// Maximum number of groups admitted ahead of the head of a queue, waiting or swapped, while it
    /// does not fit in memory; 0 keeps strict order.
    pub max_num_bypasses: usize,
    /// Which running group is preempted.
    pub victim_policy: VictimPolicy,
    /// Decisions whose default differs from vLLM 0.6.2.
    pub choices: SchedulerChoices,
}

impl SchedulerConfig {
    /// Default of `max_num_seqs`.
    pub const DEFAULT_MAX_NUM_SEQS: usize = 256;

    /// Default of `max_num_batched_tokens`: small with chunked prefill, so that decodes do not wait
    /// long for a prompt; otherwise enough for the longest prompt.  At least `max_num_seqs`.
    pub fn default_max_num_batched_tokens(
        enable_chunked_prefill: bool,
        max_num_seqs: usize,
        max_model_len: usize,
    ) -> usize {
        if enable_chunked_prefill { 512 } else { max_model_len.max(2048) }.max(max_num_seqs)
    }

    /// Default of `max_num_bypasses`.
    pub fn default_max_num_bypasses(enable_chunked_prefill: bool) -> usize {
        if enable_chunked_prefill { 64 } else { 0 }
    }

    /// Defaults within these limits, without chunked prefill.
    pub fn new(max_num_seqs: usize, max_num_batched_tokens: usize, max_model_len: usize) -> Self {
        Self {
            max_num_seqs,
            max_num_batched_tokens,
            max_model_len,
            preemption_mode: None,
            enable_chunked_prefill: false,
            policy: Policy::Fcfs,
            delay_factor: 0.0,
            num_lookahead_slots: 0,
            max_loras: None,
            max_num_bypasses: Self::default_max_num_bypasses(false),
            victim_policy: VictimPolicy::LeastWork,
            choices: SchedulerChoices::default(),
        }
    }

    /// The configuration of vLLM 0.6.2's scheduler, without its faults.
    pub fn classic(
        max_num_seqs: usize,
        max_num_batched_tokens: usize,
        max_model_len: usize,
    ) -> Self {
        Self {
            max_num_bypasses: 0,
            victim_policy: VictimPolicy::Last,
            choices: SchedulerChoices::CLASSIC,
            ..Self::new(max_num_seqs, max_num_batched_tokens, max_model_len)
        }
    }

    /// Returns this configuration, changed by `change`.
    #[must_use]
    pub fn with(mut self, change: impl FnOnce(&mut Self)) -> Self {
        change(&mut self);
        self
    }

    /// Checks all fields together.
    ///
    /// # Errors
    /// [`Error::Config`] with the field, its value and the accepted values.
    pub fn validate(&self) -> Result<()> {
        at_least_one("max_num_seqs", self.max_num_seqs)?;
        at_least_one("max_model_len", self.max_model_len)?;
        fits_i32("max_num_batched_tokens", self.max_num_batched_tokens)?;
        fits_i32("max_model_len", self.max_model_len)?;
        fits_i32("num_lookahead_slots", self.num_lookahead_slots)?;
        if !(self.delay_factor.is_finite() && self.delay_factor >= 0.0) {
            return Err(Error::Config(format!(
                "delay_factor is {}; it must be finite and at least 0",
                self.delay_factor
            )));
        }
        if self.max_loras == Some(0) {
            return Err(Error::Config("max_loras is 0; it must be at least 1 or None".to_owned()));
        }
        fits_i32("max_loras", self.max_loras.unwrap_or(0))?;
        if self.max_num_batched_tokens < self.max_num_seqs {
            return Err(Error::Config(format!(
                "max_num_batched_tokens is {}, below max_num_seqs, {}; a step must be able to hold \
                 one token of every sequence",
                self.max_num_batched_tokens, self.max_num_seqs
            )));
        }
        Ok(())
    }

    /// Largest number of blocks that `num_seqs` running sequences use in the pool of a KV group of
    /// `kind`: those that each keeps between steps, and those that the tokens of a step add.
    pub fn num_group_blocks(&self, kind: KvKind, num_seqs: usize, block_size: usize) -> usize {
        let (window, num_sink_tokens) = match kind {
            KvKind::Window { window, num_sink_tokens } => (window, num_sink_tokens),
            KvKind::Chunked(chunk) => (chunk, 0),
            KvKind::State => return num_seqs,
            KvKind::Cross => return 0,
        };
        let num_lookahead_slots = self.num_lookahead_slots;
        // m tokens lie in at most (m - 2) / block_size + 2 blocks; with one more block the chunks
        // of a step can be counted together, rounded down.
        let num_kept = (window + num_lookahead_slots).saturating_sub(2) / block_size + 3;
        let num_kept = num_kept + num_sink_tokens.div_ceil(block_size);
        let longest = (self.max_model_len + num_lookahead_slots).div_ceil(block_size);
        num_seqs * num_kept.min(longest) + self.max_num_batched_tokens / block_size
    }

    /// Largest number of prompt tokens; without chunked prefill a prompt is computed in one step.
    pub fn prompt_limit(&self) -> usize {
        if self.enable_chunked_prefill {
            self.max_model_len
        } else {
            self.max_model_len.min(self.max_num_batched_tokens)
        }
    }
}

fn at_least_one(name: &str, value: usize) -> Result<()> {
    if value == 0 {
        return Err(Error::Config(format!("{name} is 0; it must be at least 1")));
    }
    Ok(())
}

fn fits_i32(name: &str, value: usize) -> Result<()> {
    if i32::try_from(value).is_err() {
        return Err(Error::Config(format!("{name} is {value}; it must be at most {}", i32::MAX)));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refusal_names_the_field_and_what_is_accepted() {
        let cache = CacheConfig::new(16, 8);
        let scheduler = SchedulerConfig::new(4, 64, 32);
        assert_eq!(cache.validate().and(scheduler.validate()), Ok(()));
        let text = |result: Result<()>| result.unwrap_err().to_string();
        for watermark in [-0.1, 1.0, f64::NAN] {
            let refusal = text(CacheConfig { watermark, ..cache.clone() }.validate());
            assert!(refusal.contains("watermark"), "{refusal}");
        }
        assert!(text(CacheConfig { block_size: 0, ..cache }.validate()).contains("block_size"));
        let window = CacheConfig {
            enable_prefix_caching: true,
            sliding_window: Some(32),
            ..CacheConfig::new(16, 8)
        };
        assert!(text(window.validate()).contains("sliding_window"));
        let refused = |change: fn(&mut SchedulerConfig)| {
            let mut config = scheduler.clone();
            change(&mut config);
            text(config.validate())
        };
        assert!(refused(|c| c.max_num_batched_tokens = 3).contains("max_num_seqs, 4"));
        assert!(refused(|c| c.delay_factor = f64::NAN).contains("delay_factor"));
        assert!(refused(|c| c.max_loras = Some(0)).contains("max_loras"));
        let refused_group = |group: KvGroup, change: fn(&mut SchedulerConfig)| {
            let cache = CacheConfig::new(16, 8).with(|cache| cache.groups = vec![group]);
            text(cache.validate().and(cache.validate_for(&scheduler.clone().with(change))))
        };
        assert!(refused_group(KvGroup::state(3), |_| ()).contains("max_num_seqs, 4"));
        let lookahead = |c: &mut SchedulerConfig| c.num_lookahead_slots = 1;
        assert!(refused_group(KvGroup::state(4), lookahead).contains("lookahead"));
        assert!(refused_group(KvGroup::window(0, 9), |_| ()).contains("at least 1"));
        assert!(refused_group(KvGroup::window(9, 1), |_| ()).contains("9 tokens is 1"));
    }
}
