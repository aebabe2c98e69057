//! A fake engine around the scheduler: what a caller does in a step, without a model.

#![allow(dead_code, unreachable_pub, reason = "each test binary uses a part")]

use pagedserve_core::config::{CacheConfig, PreemptionMode, SchedulerConfig};
use pagedserve_core::error::Result;
use pagedserve_core::scheduler::{Scheduler, StepResults};
use pagedserve_core::sequence::{GroupHandle, SeqHandle};

/// Limits of a scheduler under test.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    pub block_size: usize,
    pub num_gpu_blocks: usize,
    pub num_cpu_blocks: usize,
    pub watermark: f64,
    pub max_num_seqs: usize,
    pub max_num_batched_tokens: usize,
    pub max_model_len: usize,
    pub preemption_mode: Option<PreemptionMode>,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            block_size: 4,
            num_gpu_blocks: 64,
            num_cpu_blocks: 0,
            watermark: 0.0,
            max_num_seqs: 8,
            max_num_batched_tokens: 64,
            max_model_len: 64,
            preemption_mode: None,
        }
    }
}

impl Limits {
    pub fn scheduler(self) -> Scheduler {
        let config = SchedulerConfig {
            max_num_seqs: self.max_num_seqs,
            max_num_batched_tokens: self.max_num_batched_tokens,
            max_model_len: self.max_model_len,
            preemption_mode: self.preemption_mode,
        };
        let cache = CacheConfig {
            block_size: self.block_size,
            num_gpu_blocks: self.num_gpu_blocks,
            num_cpu_blocks: self.num_cpu_blocks,
            watermark: self.watermark,
        };
        Scheduler::new(config, &cache).unwrap()
    }
}

/// One output of a step: the row it continues, its token, whether it ends there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Output {
    pub row: usize,
    pub token: i32,
    pub finish: bool,
}

/// Ends the open step with `outputs`.
pub fn update(
    scheduler: &mut Scheduler,
    step_id: u64,
    outputs: &[Output],
) -> Result<Vec<SeqHandle>> {
    let parent_rows: Vec<i32> = outputs.iter().map(|o| i32::try_from(o.row).unwrap()).collect();
    let token_start: Vec<i32> = (0..=i32::try_from(outputs.len()).unwrap()).collect();
    let tokens: Vec<i32> = outputs.iter().map(|o| o.token).collect();
    let finish: Vec<u8> = outputs.iter().map(|o| u8::from(o.finish)).collect();
    let results = StepResults {
        parent_rows: &parent_rows,
        token_start: &token_start,
        tokens: &tokens,
        finish: &finish,
    };
    scheduler.update(step_id, results).map(<[SeqHandle]>::to_vec)
}

/// The sampled rows of the open step.
pub fn sampled_rows(scheduler: &Scheduler) -> Vec<usize> {
    let rows = scheduler.outputs().rows.iter().enumerate();
    rows.filter(|(_, row)| row.is_sampled).map(|(index, _)| index).collect()
}

/// One output a sampled row, all living on.
pub fn one_each(scheduler: &Scheduler, token: i32) -> Vec<Output> {
    let rows = sampled_rows(scheduler).into_iter();
    rows.map(|row| Output { row, token, finish: false }).collect()
}

/// Schedules, samples `token` for every sampled row, and checks the whole state.
pub fn step(scheduler: &mut Scheduler, token: i32) -> Vec<SeqHandle> {
    let outputs = scheduler.schedule(0.0).unwrap();
    let (step_id, is_empty) = (outputs.step_id, outputs.is_empty());
    scheduler.check().unwrap();
    if is_empty {
        return Vec::new();
    }
    let outputs = one_each(scheduler, token);
    let handles = update(scheduler, step_id, &outputs).unwrap();
    scheduler.check().unwrap();
    handles
}

/// Queues a prompt of `len` tokens that starts with `first`.
pub fn add(scheduler: &mut Scheduler, first: i32, len: usize) -> (GroupHandle, SeqHandle) {
    add_wide(scheduler, first, len, 1)
}

/// The same for a group of up to `width` sequences.
pub fn add_wide(
    scheduler: &mut Scheduler,
    first: i32,
    len: usize,
    width: usize,
) -> (GroupHandle, SeqHandle) {
    let prompt: Vec<i32> = (first..).take(len).collect();
    scheduler.add_seq_group(&prompt, 0.0, width).unwrap()
}

/// Nothing lives and every block is free.
pub fn assert_all_returned(scheduler: &Scheduler) {
    scheduler.check().unwrap();
    assert!(scheduler.queues().is_empty());
    assert_eq!(scheduler.space().gpu().num_used(), 0);
    assert_eq!(scheduler.space().cpu().num_used(), 0);
    assert_eq!(scheduler.store().seqs().count(), 0);
}
