//! A fake engine around the scheduler: what a caller does in a step, without a model.

#![allow(dead_code, unreachable_pub, reason = "each test binary uses a part")]

pub mod arrays;
pub mod limits;
pub mod slots;
pub mod windows;

use pagedserve_core::config::{CacheConfig, SchedulerConfig};
use pagedserve_core::error::Result;
use pagedserve_core::scheduler::{SampledOutputs, Scheduler};
use pagedserve_core::sequence::{GroupHandle, Request, SeqHandle};

/// Limits of a scheduler under test.
#[derive(Clone, Debug)]
pub struct Limits {
    pub cache: CacheConfig,
    pub scheduler: SchedulerConfig,
}

impl Default for Limits {
    fn default() -> Self {
        let cache = CacheConfig { watermark: 0.0, ..CacheConfig::new(4, 64) };
        Self { cache, scheduler: SchedulerConfig::new(8, 64, 64) }
    }
}

impl Limits {
    /// The defaults but for a few.
    pub fn with(change: impl FnOnce(&mut CacheConfig, &mut SchedulerConfig)) -> Self {
        let mut limits = Self::default();
        change(&mut limits.cache, &mut limits.scheduler);
        limits
    }

    pub fn scheduler(&self) -> Scheduler {
        Scheduler::new(self.scheduler.clone(), &self.cache).unwrap()
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
    let results = SampledOutputs {
        parent_rows: &parent_rows,
        token_start: &token_start,
        tokens: &tokens,
        finish: &finish,
    };
    scheduler.update(step_id, results).map(|updated| updated.handles.to_vec())
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
    let request = Request { max_num_running_seqs: width, ..Request::new(&prompt, 0.0) };
    scheduler.add_seq_group(&request).unwrap()
}

/// Nothing lives and every block is free.
pub fn assert_all_returned(scheduler: &Scheduler) {
    scheduler.check().unwrap();
    assert!(scheduler.queues().is_empty());
    assert_eq!(scheduler.space().gpu().num_used(), 0);
    assert_eq!(scheduler.space().cpu().num_used(), 0);
    assert_eq!(scheduler.store().seqs().count(), 0);
}
