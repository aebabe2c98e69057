//! A fake engine around the scheduler: what a caller does in a step, without a model.

#![allow(dead_code, unreachable_pub, reason = "each test binary uses a part")]

pub mod arrays;
pub mod groups;
pub mod limits;
pub mod slots;

use pagedserve_core::config::{CacheConfig, SchedulerConfig};
use pagedserve_core::error::Result;
use pagedserve_core::scheduler::{Drafts, SampledOutputs, Scheduler};
use pagedserve_core::sequence::{GroupHandle, Request, SeqHandle};

/// Limits of a scheduler under test.
#[derive(Clone, Debug)]
pub struct Limits {
    pub cache: CacheConfig,
    pub scheduler: SchedulerConfig,
}

impl Default for Limits {
    fn default() -> Self {
        let cache = CacheConfig::new(4, 64).with(|cache| cache.watermark = 0.0);
        Self { cache, scheduler: SchedulerConfig::new(8, 64, 64) }
    }
}

impl Limits {
    /// The default limits, changed by `change`.
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
    update_drafted(scheduler, step_id, outputs, |_| Vec::new())
}

/// As `update`, where the tokens that `accepted` returns for a row precede its output's token.
pub fn update_drafted(
    scheduler: &mut Scheduler,
    step_id: u64,
    outputs: &[Output],
    accepted: impl Fn(usize) -> Vec<i32>,
) -> Result<Vec<SeqHandle>> {
    let parent_rows: Vec<i32> = outputs.iter().map(|o| i32::try_from(o.row).unwrap()).collect();
    let of_output = |o: &Output| [accepted(o.row), vec![o.token]].concat();
    let (token_start, tokens) = packed(outputs.iter().map(of_output));
    let finish: Vec<u8> = outputs.iter().map(|o| u8::from(o.finish)).collect();
    let results = SampledOutputs {
        parent_rows: &parent_rows,
        token_start: &token_start,
        tokens: &tokens,
        finish: &finish,
    };
    scheduler.update(step_id, results).map(|updated| updated.handles.to_vec())
}

/// Concatenates lists; returns the start of each too.
fn packed(lists: impl Iterator<Item = Vec<i32>>) -> (Vec<i32>, Vec<i32>) {
    let (mut start, mut all) = (vec![0], Vec::new());
    for list in lists {
        all.extend(list);
        start.push(i32::try_from(all.len()).unwrap());
    }
    (start, all)
}

/// Adds drafts to rows of the open step, if there are any.
pub fn propose(
    scheduler: &mut Scheduler,
    step_id: u64,
    drafts: &[(usize, Vec<i32>)],
) -> Result<()> {
    let rows: Vec<i32> = drafts.iter().map(|(row, _)| i32::try_from(*row).unwrap()).collect();
    let (token_start, tokens) = packed(drafts.iter().map(|(_, tokens)| tokens.clone()));
    let drafts = Drafts { rows: &rows, token_start: &token_start, tokens: &tokens };
    scheduler.propose(step_id, drafts).map(|_| ())
}

/// The sampled rows of the open step.
pub fn sampled_rows(scheduler: &Scheduler) -> Vec<usize> {
    let rows = scheduler.outputs().rows.iter().enumerate();
    rows.filter(|(_, row)| row.is_sampled).map(|(index, _)| index).collect()
}

/// One output per sampled row, all of which continue.
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

/// As `add`, for a group of up to `width` sequences.
pub fn add_wide(
    scheduler: &mut Scheduler,
    first: i32,
    len: usize,
    width: usize,
) -> (GroupHandle, SeqHandle) {
    let prompt: Vec<i32> = (first..).take(len).collect();
    let mut request = Request::new(&prompt, 0.0);
    request.max_num_running_seqs = width;
    scheduler.add_seq_group(&request).unwrap()
}

/// Asserts that nothing lives and every block is free.
pub fn assert_all_returned(scheduler: &Scheduler) {
    scheduler.check().unwrap();
    assert!(scheduler.queues().is_empty());
    assert_eq!(scheduler.space().gpu().num_used(), 0);
    assert_eq!(scheduler.space().cpu().num_used(), 0);
    assert_eq!(scheduler.store().seqs().count(), 0);
}
