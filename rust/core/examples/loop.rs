//! A whole scheduling loop: three requests through a pool of eight blocks, with a model that
//! counts.
//!
//! Run it with `cargo run -p pagedserve-core --example loop`.

#![allow(clippy::print_stdout, clippy::disallowed_macros, reason = "an example prints")]

use pagedserve_core::{
    CacheConfig, InputBuffers, Request, Result, SampledOutputs, Scheduler, SchedulerConfig,
};

const BLOCK_SIZE: usize = 4;
const NUM_BLOCKS: usize = 8;
const MAX_NUM_SEQS: usize = 4;
const MAX_MODEL_LEN: usize = 24;
const MAX_NUM_TOKENS: usize = 24; // of one step

fn main() -> Result<()> {
    let config = SchedulerConfig::new(MAX_NUM_SEQS, MAX_NUM_TOKENS, MAX_MODEL_LEN);
    let cache =
        CacheConfig::new(BLOCK_SIZE, NUM_BLOCKS).with(|cache| cache.enable_prefix_caching = true);
    let mut scheduler = Scheduler::new(config, &cache)?;
    for first in [10, 20, 30] {
        let prompt: Vec<i32> = (first..first + 7).collect();
        scheduler.add_seq_group(&Request::new(&prompt, 0.0))?;
    }

    // One set of arrays serves every step: allocate them once, in memory that the device can read.
    let mut token_ids = [0; MAX_NUM_TOKENS];
    let (mut positions, mut slots) = ([0; MAX_NUM_TOKENS], [0; MAX_NUM_TOKENS]);
    let (mut query_start, mut seq_lens) = ([0; MAX_NUM_SEQS + 1], [0; MAX_NUM_SEQS]);
    let mut block_tables = [0; MAX_NUM_SEQS * MAX_MODEL_LEN / BLOCK_SIZE];
    let (mut sample_index, mut sample_rows) = ([0; MAX_NUM_SEQS], [0; MAX_NUM_SEQS]);
    let mut row_handles = [0; MAX_NUM_SEQS];

    while !scheduler.queues().is_empty() {
        let outputs = scheduler.schedule(0.0)?;
        let (step_id, num_samples) = (outputs.step_id, outputs.num_samples);
        println!(
            "step {step_id}: {} rows, {} tokens, {} preempted",
            outputs.rows.len(),
            outputs.num_batched_tokens,
            outputs.preempted.len()
        );
        if outputs.is_empty() {
            continue; // no step is open
        }
        // A device would now move blocks: swap out, swap in, then copy.

        let mut inputs = InputBuffers::default();
        inputs.token_ids = &mut token_ids;
        inputs.positions = &mut positions;
        inputs.slot_mapping = &mut slots;
        inputs.query_start = &mut query_start;
        inputs.seq_lens = &mut seq_lens;
        inputs.block_tables = &mut block_tables;
        inputs.sample_index = &mut sample_index;
        inputs.sample_rows = &mut sample_rows;
        inputs.row_handles = &mut row_handles;
        scheduler.prepare_inputs(&mut inputs)?;

        // The model: the token after the last one; every sequence ends after 16 tokens.
        let last = |sample: usize| usize::try_from(sample_index[sample]).unwrap_or(0);
        let tokens: Vec<i32> = (0..num_samples).map(|sample| token_ids[last(sample)] + 1).collect();
        let finish: Vec<u8> =
            (0..num_samples).map(|sample| u8::from(positions[last(sample)] >= 14)).collect();
        let token_start: Vec<i32> = (0..).take(num_samples + 1).collect();
        let updated = scheduler.update(
            step_id,
            SampledOutputs {
                parent_rows: &sample_rows[..num_samples],
                token_start: &token_start,
                tokens: &tokens,
                finish: &finish,
            },
        )?;
        println!("        sampled {tokens:?}, {} groups ended", updated.ended.len());
    }
    scheduler.check()
}
