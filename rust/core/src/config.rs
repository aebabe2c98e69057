//! What a scheduler is built from.  Checked as a whole before anything is built.

use crate::error::{Error, Result};

/// How a group gives its blocks back when others need them (Kwon et al., `PagedAttention`,
/// SOSP 2023, section 4.5).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PreemptionMode {
    /// Blocks are dropped; the group's tokens are computed again later.
    Recompute,
    /// Blocks are moved to the CPU tier and back.
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

/// Which group is served first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Policy {
    /// The one that came first.
    #[default]
    Fcfs,
    /// The smallest priority number, among equals the earliest arrival; running groups give
    /// way to waiting ones that go before them.
    Priority,
}

/// Which running group is preempted when another needs its blocks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum VictimPolicy {
    /// The last of the queue.
    Last,
    /// Of those that have not been served in the step, the one with the fewest computed
    /// tokens: what is lost is computed again.
    #[default]
    LeastWork,
}

/// The decisions on blocks in which the best known way, the default, is not vLLM 0.6.2's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CacheChoices {
    /// Count in admission what a request shares with running ones, instead of asking for
    /// blocks it will not take.
    pub count_cached_blocks: bool,
    /// Charge a request's cached tokens to the token budget and compute them again, as vLLM
    /// 0.6.2's scheduler accounts for them.
    pub charge_cached_tokens: bool,
    /// Share the last, partly filled block of a prompt with identical prompts, at the price of
    /// a copy for all but one of them.
    pub share_partial_blocks: bool,
    /// Share blocks with generated tokens with later prompts that hold the same tokens, as those
    /// of the next turn of a conversation do; else only with requests whose prompt ends at the
    /// same place.
    pub share_generated_blocks: bool,
    /// Move all blocks of a group that is swapped, also those that the other tier still has.
    pub swap_in_cached_blocks: bool,
    /// Evict free blocks without contents in turn with the cached ones, instead of first.
    pub evict_blank_blocks_in_order: bool,
    /// Ask the pool for the blocks that a step takes, instead of one for each sequence.
    pub exact_append_demand: bool,
}

impl CacheChoices {
    /// Those of vLLM 0.6.2.
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

/// The blocks of layers that see a window of each sequence, beside those that see everything.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WindowGroup {
    /// Tokens that a query sees, itself included, in the layer that sees most; at least 1.
    pub window: usize,
    /// Blocks on the device: at least [`SchedulerConfig::num_window_blocks`] of one sequence.
    pub num_gpu_blocks: usize,
    /// Blocks in host memory for swapped groups; without any nothing is swapped.
    pub num_cpu_blocks: usize,
}

impl WindowGroup {
    /// Checks all fields together.
    ///
    /// # Errors
    /// [`Error::Config`].
    pub fn validate(&self) -> Result<()> {
        at_least_one("the window of window_group", self.window)?;
        fits_i32("num_gpu_blocks of window_group", self.num_gpu_blocks)?;
        fits_i32("num_cpu_blocks of window_group", self.num_cpu_blocks)
    }
}

/// The KV blocks of both tiers.
#[derive(Clone, Debug, PartialEq)]
pub struct CacheConfig {
    /// Tokens a block holds, at least 1.
    pub block_size: usize,
    /// Blocks on the device, at least 1.
    pub num_gpu_blocks: usize,
    /// Blocks in host memory for swapped groups; 0 turns swapping off.
    pub num_cpu_blocks: usize,
    /// Share of the device blocks kept free when a new group is admitted, in `[0, 1)`.  It
    /// damps the thrashing of admitting a group and preempting it at once.
    pub watermark: f64,
    /// Whether blocks keep their contents for later requests with the same prefix.
    pub enable_prefix_caching: bool,
    /// Tokens that a query can see, itself included, where all layers have one window; a
    /// sequence then holds no more blocks than the window spans.
    pub sliding_window: Option<usize>,
    /// The blocks of layers with a window where others see everything; `None` where all layers
    /// share one kind.
    pub window_group: Option<WindowGroup>,
    /// Where the best known way is not vLLM 0.6.2's.
    pub choices: CacheChoices,
}

impl CacheConfig {
    /// The best known behaviour: no prefix caching unless it is turned on, no host blocks, a
    /// watermark of one percent.
    pub fn new(block_size: usize, num_gpu_blocks: usize) -> Self {
        Self {
            block_size,
            num_gpu_blocks,
            num_cpu_blocks: 0,
            watermark: 0.01,
            enable_prefix_caching: false,
            sliding_window: None,
            window_group: None,
            choices: CacheChoices::default(),
        }
    }

    /// The decisions of vLLM 0.6.2's block manager.
    pub fn classic(block_size: usize, num_gpu_blocks: usize) -> Self {
        Self { choices: CacheChoices::CLASSIC, ..Self::new(block_size, num_gpu_blocks) }
    }

    /// # Errors
    /// [`Error::Config`] with the field, what it was and what it may be.
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
        self.validate_window_group()?;
        if !(0.0..1.0).contains(&self.watermark) {
            return Err(Error::Config(format!(
                "watermark is {}; it must be at least 0 and below 1",
                self.watermark
            )));
        }
        Ok(())
    }

    fn validate_window_group(&self) -> Result<()> {
        let Some(group) = self.window_group else { return Ok(()) };
        group.validate()?;
        if self.sliding_window.is_some() {
            return Err(Error::Config(
                "window_group and sliding_window exclude each other: layers of one window need no \
                 group"
                    .to_owned(),
            ));
        }
        Ok(())
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

/// The decisions on order and admission in which the best known way, the default, is not vLLM
/// 0.6.2's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SchedulerChoices {
    /// Admit new prompts in a step in which somebody was preempted, and with chunks while
    /// somebody is swapped out.
    pub admit_after_preemption: bool,
    /// Bring groups swapped out in one step back in the order in which they were taken, last
    /// first.
    pub reverse_swapped_order: bool,
    /// Cut a chunk at a block boundary where prefix caching is on.
    pub whole_block_chunks: bool,
    /// Refuse a prompt beyond `max_model_len` also where prompts are cut into chunks, whatever
    /// the length of its first chunk.
    pub limit_chunked_prompts: bool,
    /// Once `max_num_seqs` groups were admitted before one that waits for its adapter's slot, admit
    /// nobody for the adapter that has had its slot longest; else it may wait for ever.
    pub drain_adapters: bool,
}

impl SchedulerChoices {
    /// Those of vLLM 0.6.2.
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
pub struct SchedulerConfig {
    /// Sequences that may run at once.
    pub max_num_seqs: usize,
    /// Tokens that one step may compute.
    pub max_num_batched_tokens: usize,
    /// Tokens of a sequence, prompt and output together.
    pub max_model_len: usize,
    /// `None` chooses by group size: recompute for one sequence, swap for several.
    pub preemption_mode: Option<PreemptionMode>,
    /// Cut prompts into chunks that share steps with decodes (Agrawal et al., Sarathi-Serve,
    /// OSDI 2024), decodes first.
    pub enable_chunked_prefill: bool,
    /// Which group is served first.
    pub policy: Policy,
    /// Hold prompts back until the oldest has waited this many times the last prompt step, so
    /// that more of them run together; 0 does not.
    pub delay_factor: f64,
    /// Slots given to a decoding sequence beyond its next token.
    pub num_lookahead_slots: usize,
    /// Slots for adapters on the device, and so how many may be active in one step; `None` without
    /// adapters.
    pub max_loras: Option<usize>,
    /// Slots on the device for what layers keep of a sequence beside keys and values, at least
    /// `max_num_seqs`; 0 where they keep nothing else.
    pub num_state_slots: usize,
    /// Slots in host memory for the states of swapped groups; without any nothing is swapped.
    pub num_cpu_state_slots: usize,
    /// How many groups may be admitted before the head of a queue, waiting or swapped, that does
    /// not fit; then nobody passes it any more.  0 keeps strict order.
    pub max_num_bypasses: usize,
    /// Who is preempted.
    pub victim_policy: VictimPolicy,
    /// Where the best known way is not vLLM 0.6.2's.
    pub choices: SchedulerChoices,
}

impl SchedulerConfig {
    /// Sequences that may run at once where nobody says.
    pub const DEFAULT_MAX_NUM_SEQS: usize = 256;

    /// Tokens of a step where nobody says: with chunks few, so that no decode waits long for a
    /// prompt; without them room for the longest prompt.  Never fewer than sequences.
    pub fn default_max_num_batched_tokens(
        enable_chunked_prefill: bool,
        max_num_seqs: usize,
        max_model_len: usize,
    ) -> usize {
        if enable_chunked_prefill { 512 } else { max_model_len.max(2048) }.max(max_num_seqs)
    }

    /// How many may pass a head of a queue where nobody says; measured in docs/options.md.
    pub fn default_max_num_bypasses(enable_chunked_prefill: bool) -> usize {
        if enable_chunked_prefill { 64 } else { 0 }
    }

    /// The best known behaviour within these limits, without chunks.
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
            num_state_slots: 0,
            num_cpu_state_slots: 0,
            max_num_bypasses: Self::default_max_num_bypasses(false),
            victim_policy: VictimPolicy::LeastWork,
            choices: SchedulerChoices::default(),
        }
    }

    /// The decisions of vLLM 0.6.2's scheduler, its faults excepted.
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

    /// # Errors
    /// [`Error::Config`] with the field, what it was and what it may be.
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
        self.validate_states()?;
        if self.max_num_batched_tokens < self.max_num_seqs {
            return Err(Error::Config(format!(
                "max_num_batched_tokens is {}, below max_num_seqs, {}; a step must have room for \
                 one token of every sequence",
                self.max_num_batched_tokens, self.max_num_seqs
            )));
        }
        Ok(())
    }

    fn validate_states(&self) -> Result<()> {
        let Self {
            num_state_slots, num_cpu_state_slots, max_num_seqs, num_lookahead_slots, ..
        } = *self;
        fits_i32("num_state_slots", num_state_slots)?;
        fits_i32("num_cpu_state_slots", num_cpu_state_slots)?;
        let refusal = if num_state_slots == 0 && num_cpu_state_slots > 0 {
            format!(
                "num_cpu_state_slots is {num_cpu_state_slots}; without num_state_slots it must be 0"
            )
        } else if num_state_slots > 0 && num_state_slots < max_num_seqs {
            format!(
                "num_state_slots is {num_state_slots}, below max_num_seqs, {max_num_seqs}; every \
                 sequence that runs has one"
            )
        } else if num_state_slots > 0 && num_lookahead_slots > 0 {
            "num_state_slots and num_lookahead_slots exclude each other: a state cannot go back \
             to before a token"
                .to_owned()
        } else {
            return Ok(());
        };
        Err(Error::Config(refusal))
    }

    /// Blocks that layers with a window can need at once while `num_seqs` sequences run: what each
    /// keeps between steps, and what the tokens of one step add.
    pub fn num_window_blocks(&self, num_seqs: usize, window: usize, block_size: usize) -> usize {
        let num_lookahead_slots = self.num_lookahead_slots;
        // m tokens lie in at most (m - 2) / block_size + 2 blocks; one more lets the chunks of a
        // step be counted together, rounded down.
        let num_kept = (window + num_lookahead_slots).saturating_sub(2) / block_size + 3;
        let longest = (self.max_model_len + num_lookahead_slots).div_ceil(block_size);
        num_seqs * num_kept.min(longest) + self.max_num_batched_tokens / block_size
    }

    /// The longest prompt that can be run: without chunks it is computed in one step.
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
        assert!(refused(|c| c.num_state_slots = 3).contains("max_num_seqs, 4"));
        assert!(refused(|c| c.num_cpu_state_slots = 3).contains("without num_state_slots"));
        assert!(
            refused(|c| (c.num_state_slots, c.num_lookahead_slots) = (4, 1)).contains("lookahead")
        );
    }
}
