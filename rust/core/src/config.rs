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
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Recompute => "recompute",
            Self::Swap => "swap",
        }
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
}

impl CacheConfig {
    /// # Errors
    /// [`Error::Config`] with the field, what it was and what it may be.
    pub fn validate(&self) -> Result<()> {
        at_least_one("block_size", self.block_size)?;
        at_least_one("num_gpu_blocks", self.num_gpu_blocks)?;
        // Slots are 64-bit but block ids travel in 32-bit tables.
        fits_i32("num_gpu_blocks", self.num_gpu_blocks)?;
        fits_i32("num_cpu_blocks", self.num_cpu_blocks)?;
        fits_i32("block_size", self.block_size)?;
        if !(0.0..1.0).contains(&self.watermark) {
            return Err(Error::Config(format!(
                "watermark is {}; it must be at least 0 and below 1",
                self.watermark
            )));
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

/// The limits and choices of the scheduler.
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
}

impl SchedulerConfig {
    /// # Errors
    /// [`Error::Config`] with the field, what it was and what it may be.
    pub fn validate(&self) -> Result<()> {
        at_least_one("max_num_seqs", self.max_num_seqs)?;
        at_least_one("max_model_len", self.max_model_len)?;
        fits_i32("max_num_batched_tokens", self.max_num_batched_tokens)?;
        fits_i32("max_model_len", self.max_model_len)?;
        if self.max_num_batched_tokens < self.max_num_seqs {
            return Err(Error::Config(format!(
                "max_num_batched_tokens is {}, below max_num_seqs, {}; a step must have room for \
                 one token of every sequence",
                self.max_num_batched_tokens, self.max_num_seqs
            )));
        }
        Ok(())
    }

    /// The longest prompt that can be run: a prompt is computed in one step.
    pub fn prompt_limit(&self) -> usize {
        self.max_model_len.min(self.max_num_batched_tokens)
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
        let cache =
            CacheConfig { block_size: 16, num_gpu_blocks: 8, num_cpu_blocks: 0, watermark: 0.01 };
        let scheduler = SchedulerConfig {
            max_num_seqs: 4,
            max_num_batched_tokens: 64,
            max_model_len: 32,
            preemption_mode: None,
        };
        assert_eq!(cache.validate().and(scheduler.validate()), Ok(()));
        let text = |result: Result<()>| result.unwrap_err().to_string();
        for watermark in [-0.1, 1.0, f64::NAN] {
            let refusal = text(CacheConfig { watermark, ..cache.clone() }.validate());
            assert!(refusal.contains("watermark"), "{refusal}");
        }
        assert!(text(CacheConfig { block_size: 0, ..cache }.validate()).contains("block_size"));
        let small = SchedulerConfig { max_num_batched_tokens: 3, ..scheduler };
        assert!(text(small.validate()).contains("max_num_seqs, 4"));
    }
}
