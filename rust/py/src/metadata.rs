//! `SequenceGroupMetadata`: one scheduled group as an object, made only on request.

use numpy::PyArray1;
use pagedserve_core::error::Result;
use pagedserve_core::ids::{BlockId, TokenId};
use pagedserve_core::outputs::{Row, ScheduledSequenceGroup};
use pagedserve_core::scheduler::Scheduler;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::arrays::block_array;

/// Scheduled group as a model runner of vLLM 0.6.2's kind takes it.
///
/// Dictionaries are keyed by sequence handles.
#[pyclass(frozen, get_all, module = "pagedserve._core")]
pub(crate) struct SequenceGroupMetadata {
    /// Handle of the group.
    group: i64,
    /// Whether the group computed or recomputed its prompt before the step.
    is_prompt: bool,
    /// Whether its next tokens are sampled.
    do_sample: bool,
    /// Number of tokens computed in the step: for a prompt in all, for a decode per sequence.
    token_chunk_size: usize,
    /// Whether tokens and tables are those of the step only.
    is_delta: bool,
    /// Adapter id, 0 for none.
    adapter: u32,
    /// Token ids of each sequence, int32; those of the step come last.
    token_ids: Py<PyDict>,
    /// Number of tokens of each sequence computed before the step.
    num_computed_tokens: Py<PyDict>,
    /// Physical blocks of each sequence, int32.
    block_tables: Py<PyDict>,
    /// Physical blocks of the encoder, int32.
    cross_block_table: Py<PyArray1<i32>>,
    /// Computed leading blocks that all sequences share, int32.
    computed_block_nums: Py<PyArray1<i32>>,
}

/// Metadata of a group before conversion to Python objects.
pub(crate) struct Group {
    scheduled: ScheduledSequenceGroup,
    is_delta: bool,
    adapter: u32,
    rows: Vec<RowData>,
    cross_blocks: Vec<BlockId>,
    computed_blocks: Vec<BlockId>,
}

struct RowData {
    seq: i64,
    token_ids: Vec<TokenId>,
    num_computed_tokens: usize,
    blocks: Vec<BlockId>,
}

/// Returns the groups of the open step, in its order; none where no step is open.  As a delta the
/// token ids are those of the step only, and the block table of a decoding group holds only the
/// blocks that the step touches.
pub(crate) fn of_step(scheduler: &Scheduler, is_delta: bool) -> Result<Vec<Group>> {
    if !scheduler.is_step_open() {
        return Ok(Vec::new());
    }
    let outputs = scheduler.outputs();
    let mut rows = outputs.rows.as_slice();
    let mut groups = Vec::with_capacity(outputs.scheduled_seq_groups.len());
    for scheduled in &outputs.scheduled_seq_groups {
        let (own, rest) = rows.split_at(scheduled.num_rows);
        rows = rest;
        let Ok(group) = scheduler.store().find_group(scheduled.group) else { continue };
        let computed = scheduler.space().common_computed_blocks(scheduler.store(), scheduled.group);
        let is_cut = is_delta && !scheduled.is_prefill;
        let rows = own.iter().map(|row| row_data(scheduler, row, is_delta, is_cut));
        groups.push(Group {
            scheduled: *scheduled,
            is_delta,
            adapter: group.key.adapter,
            rows: rows.collect::<Result<_>>()?,
            cross_blocks: scheduler
                .space()
                .cross_blocks(scheduler.store(), scheduled.group)
                .to_vec(),
            computed_blocks: computed.to_vec(),
        });
    }
    Ok(groups)
}

/// Metadata of one row; a cut table starts at the first block that the step writes.
fn row_data(scheduler: &Scheduler, row: &Row, is_delta: bool, is_cut: bool) -> Result<RowData> {
    let seq = scheduler.sequence(row.seq)?;
    let num_computed_tokens = seq.num_computed_tokens;
    let first_token = if is_delta { num_computed_tokens } else { 0 };
    let first_block = if is_cut { num_computed_tokens / scheduler.space().block_size() } else { 0 };
    Ok(RowData {
        seq: row.seq.to_bits(),
        token_ids: seq.token_ids_at(first_token..num_computed_tokens + row.num_tokens).into_owned(),
        num_computed_tokens,
        blocks: (first_block..seq.table.len()).map(|index| seq.table.block(index)).collect(),
    })
}

impl SequenceGroupMetadata {
    pub(crate) fn new(py: Python<'_>, group: Group) -> PyResult<Self> {
        let (token_ids, num_computed_tokens, block_tables) =
            (PyDict::new(py), PyDict::new(py), PyDict::new(py));
        for row in group.rows {
            token_ids.set_item(row.seq, PyArray1::from_vec(py, row.token_ids))?;
            num_computed_tokens.set_item(row.seq, row.num_computed_tokens)?;
            block_tables.set_item(row.seq, block_array(py, row.blocks))?;
        }
        Ok(Self {
            group: group.scheduled.group.to_bits(),
            is_prompt: group.scheduled.is_prefill,
            do_sample: group.scheduled.is_sampled,
            token_chunk_size: group.scheduled.token_chunk_size,
            is_delta: group.is_delta,
            adapter: group.adapter,
            token_ids: token_ids.unbind(),
            num_computed_tokens: num_computed_tokens.unbind(),
            block_tables: block_tables.unbind(),
            cross_block_table: block_array(py, group.cross_blocks).unbind(),
            computed_block_nums: block_array(py, group.computed_blocks).unbind(),
        })
    }
}
