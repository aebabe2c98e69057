//! The arrays that a caller of `prepare_inputs` keeps.

use pagedserve_core::inputs::InputBuffers;
use pagedserve_core::scheduler::Scheduler;

/// Tokens of a block in every bench.
pub(crate) const BLOCK_SIZE: usize = 16;

/// The arrays of a caller, long enough for every bench here.
pub(crate) struct Arrays {
    int32: [Vec<i32>; 5],
    int64: [Vec<i64>; 3],
    block_tables: Vec<i32>,
}

impl Arrays {
    pub(crate) fn new(num_seqs: usize, context: usize) -> Self {
        let num_tokens = num_seqs * context + 1;
        Self {
            int32: std::array::from_fn(|_| vec![0; num_tokens]),
            int64: std::array::from_fn(|_| vec![0; num_tokens]),
            block_tables: vec![0; num_seqs * (context / BLOCK_SIZE + 2)],
        }
    }

    /// Writes the inputs of the open step.
    pub(crate) fn fill(&mut self, scheduler: &Scheduler) {
        let [token_ids, query_start, seq_lens, sample_index, sample_rows] = &mut self.int32;
        let [positions, slot_mapping, row_handles] = &mut self.int64;
        let mut buffers = InputBuffers::default();
        buffers.token_ids = token_ids;
        buffers.positions = positions;
        buffers.slot_mapping = slot_mapping;
        buffers.query_start = query_start;
        buffers.seq_lens = seq_lens;
        buffers.block_tables = &mut self.block_tables;
        buffers.sample_index = sample_index;
        buffers.sample_rows = sample_rows;
        buffers.row_handles = row_handles;
        scheduler.prepare_inputs(&mut buffers).unwrap();
    }
}
