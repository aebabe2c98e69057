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
        let mut buffers = InputBuffers {
            token_ids,
            positions,
            slot_mapping,
            query_start,
            seq_lens,
            block_tables: &mut self.block_tables,
            sample_index,
            sample_rows,
            row_handles,
            adapter_slots: None,
            state_slots: None,
            cross_lens: None,
            window_tables: None,
            window_slots: None,
            cross_tables: None,
        };
        scheduler.prepare_inputs(&mut buffers).unwrap();
    }
}
