//! `SequenceGroupMetadata`: one scheduled group as an object, made only when asked for.

use numpy::PyArray1;
use pagedserve_core::outputs::Row;
use pagedserve_core::scheduler::Scheduler;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::arrays::block_array;

/// What a model runner of the classic kind wants to know of a scheduled group.
#[pyclass(frozen, get_all, module = "pagedserve._core")]
pub(crate) struct SequenceGroupMetadata {
    group: i64,
    is_prompt: bool,
    do_sample: bool,
    token_chunk_size: usize,
    is_delta: bool,
    adapter: u32,
    token_ids: Py<PyDict>,
    num_computed_tokens: Py<PyDict>,
    block_tables: Py<PyDict>,
    cross_block_table: Py<PyArray1<i32>>,
    computed_block_nums: Py<PyArray1<i32>>,
}

/// The groups of the open step, in its order.  As a delta the token ids are those of the step
/// alone, and of a group that decodes the block table holds only what the step touches.
pub(crate) fn of_step(
    py: Python<'_>,
    scheduler: &Scheduler,
    is_delta: bool,
) -> PyResult<Vec<SequenceGroupMetadata>> {
    let outputs = scheduler.outputs();
    let mut rows = outputs.rows.as_slice();
    let mut metadata = Vec::with_capacity(outputs.scheduled_seq_groups.len());
    for scheduled in &outputs.scheduled_seq_groups {
        let (own, rest) = rows.split_at(scheduled.num_rows);
        rows = rest;
        let Ok(group) = scheduler.store().find_group(scheduled.group) else { continue };
        let computed = scheduler.space().common_computed_blocks(scheduler.store(), scheduled.group);
        let (token_ids, num_computed_tokens, block_tables) =
            (PyDict::new(py), PyDict::new(py), PyDict::new(py));
        for row in own {
            let seq = scheduler.sequence(row.seq).map_err(|error| crate::error::to_py(&error))?;
            let key = row.seq.to_bits();
            let first_token = if is_delta { seq.num_computed_tokens } else { 0 };
            let end = seq.num_computed_tokens + row.num_tokens;
            token_ids
                .set_item(key, PyArray1::from_slice(py, &seq.token_ids()[first_token..end]))?;
            num_computed_tokens.set_item(key, seq.num_computed_tokens)?;
            let first_block = first_block(scheduler, row, is_delta && !scheduled.is_prefill);
            let blocks = (first_block..seq.table.len()).map(|index| seq.table.block(index));
            block_tables.set_item(key, block_array(py, blocks))?;
        }
        metadata.push(SequenceGroupMetadata {
            group: scheduled.group.to_bits(),
            is_prompt: scheduled.is_prefill,
            do_sample: scheduled.is_sampled,
            token_chunk_size: scheduled.token_chunk_size,
            is_delta,
            adapter: group.key.adapter,
            token_ids: token_ids.unbind(),
            num_computed_tokens: num_computed_tokens.unbind(),
            block_tables: block_tables.unbind(),
            cross_block_table: block_array(py, group.cross_table.blocks().iter().copied()).unbind(),
            computed_block_nums: block_array(py, computed.iter().copied()).unbind(),
        });
    }
    Ok(metadata)
}

/// The first logical block that the row writes, or 0 for the whole table.
fn first_block(scheduler: &Scheduler, row: &Row, is_delta: bool) -> usize {
    let computed = scheduler.sequence(row.seq).map_or(0, |seq| seq.num_computed_tokens);
    if is_delta { computed / scheduler.space().block_size() } else { 0 }
}
