//! The arrays that a caller of `prepare_inputs` keeps.

use pagedserve_core::inputs::InputBuffers;
use pagedserve_core::scheduler::Scheduler;

use crate::common::Limits;

/// The arrays of a step.
pub struct Arrays {
    pub token_ids: Vec<i32>,
    pub positions: Vec<i64>,
    pub slot_mapping: Vec<i64>,
    pub query_start: Vec<i32>,
    pub seq_lens: Vec<i32>,
    pub block_tables: Vec<i32>,
    pub sample_index: Vec<i32>,
    pub sample_rows: Vec<i32>,
    pub row_handles: Vec<i64>,
    pub adapter_slots: Vec<i32>,
    pub state_slots: Vec<i32>,
    pub window_tables: Vec<i32>,
    pub window_slots: Vec<i64>,
    pub cross_lens: Vec<i32>,
    pub cross_tables: Vec<i32>,
}

impl Arrays {
    /// Those of the open step, filled.
    pub fn filled(scheduler: &Scheduler, limits: &Limits) -> Self {
        let limits = &limits.scheduler;
        let rows = limits.max_num_seqs;
        let tokens = limits.max_num_batched_tokens;
        let blocks = limits.max_model_len + limits.num_lookahead_slots;
        let samples = rows * (1 + limits.num_lookahead_slots);
        let mut arrays = Self {
            token_ids: vec![-7; tokens],
            positions: vec![-7; tokens],
            slot_mapping: vec![-7; tokens],
            query_start: vec![-7; rows + 1],
            seq_lens: vec![-7; rows],
            block_tables: vec![-7; rows * blocks],
            sample_index: vec![-7; samples],
            sample_rows: vec![-7; samples],
            row_handles: vec![-7; rows],
            adapter_slots: vec![-7; rows],
            state_slots: vec![-7; rows],
            window_tables: vec![-7; rows * blocks],
            window_slots: vec![-7; tokens],
            cross_lens: vec![-7; rows],
            cross_tables: vec![-7; rows * blocks],
        };
        scheduler
            .prepare_inputs(&mut InputBuffers {
                token_ids: &mut arrays.token_ids,
                positions: &mut arrays.positions,
                slot_mapping: &mut arrays.slot_mapping,
                query_start: &mut arrays.query_start,
                seq_lens: &mut arrays.seq_lens,
                block_tables: &mut arrays.block_tables,
                sample_index: &mut arrays.sample_index,
                sample_rows: &mut arrays.sample_rows,
                row_handles: &mut arrays.row_handles,
                adapter_slots: Some(&mut arrays.adapter_slots),
                state_slots: Some(&mut arrays.state_slots),
                window_tables: Some(&mut arrays.window_tables),
                window_slots: Some(&mut arrays.window_slots),
                cross_lens: Some(&mut arrays.cross_lens),
                cross_tables: Some(&mut arrays.cross_tables),
            })
            .unwrap();
        arrays
    }
}
