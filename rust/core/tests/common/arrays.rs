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
    pub cross_lens: Vec<i32>,
    pub group_tables: Vec<Vec<i32>>,
    pub group_slots: Vec<Vec<i64>>,
}

impl Arrays {
    /// Creates arrays, filled for the open step.
    pub fn filled(scheduler: &Scheduler, limits: &Limits) -> Self {
        let num_groups = limits.cache.groups.len();
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
            cross_lens: vec![-7; rows],
            group_tables: vec![vec![-7; rows * blocks]; num_groups],
            group_slots: vec![vec![-7; tokens]; num_groups],
        };
        let mut buffers = InputBuffers::default();
        buffers.token_ids = &mut arrays.token_ids;
        buffers.positions = &mut arrays.positions;
        buffers.slot_mapping = &mut arrays.slot_mapping;
        buffers.query_start = &mut arrays.query_start;
        buffers.seq_lens = &mut arrays.seq_lens;
        buffers.block_tables = &mut arrays.block_tables;
        buffers.sample_index = &mut arrays.sample_index;
        buffers.sample_rows = &mut arrays.sample_rows;
        buffers.row_handles = &mut arrays.row_handles;
        buffers.adapter_slots = Some(&mut arrays.adapter_slots);
        buffers.cross_lens = Some(&mut arrays.cross_lens);
        buffers.group_tables = arrays.group_tables.iter_mut().map(Vec::as_mut_slice).collect();
        buffers.group_slots = arrays.group_slots.iter_mut().map(Vec::as_mut_slice).collect();
        scheduler.prepare_inputs(&mut buffers).unwrap();
        arrays
    }
}
