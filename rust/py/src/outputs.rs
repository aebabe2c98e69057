//! `SchedulerOutputs`: a frozen copy of one step's decisions.

use numpy::PyArray2;
use pagedserve_core::outputs as core;
use pagedserve_core::sequence;
use pyo3::prelude::*;

use crate::arrays::pair_array;

/// The decisions of one step.
#[pyclass(frozen, module = "pagedserve._core")]
pub(crate) struct SchedulerOutputs(pub(crate) core::SchedulerOutputs);

#[pymethods]
impl SchedulerOutputs {
    #[getter]
    fn step_id(&self) -> u64 {
        self.0.step_id
    }

    #[getter]
    fn num_rows(&self) -> usize {
        self.0.rows.len()
    }

    #[getter]
    fn num_batched_tokens(&self) -> usize {
        self.0.num_batched_tokens
    }

    #[getter]
    fn num_samples(&self) -> usize {
        self.0.num_samples
    }

    #[getter]
    fn max_num_blocks(&self) -> usize {
        self.0.max_num_blocks
    }

    #[getter]
    fn num_prefill_groups(&self) -> usize {
        self.0.num_prefill_groups
    }

    #[getter]
    fn num_prefill_tokens(&self) -> usize {
        self.0.num_prefill_tokens
    }

    #[getter]
    fn scheduled_seq_groups(&self) -> Vec<ScheduledSequenceGroup> {
        self.0.scheduled_seq_groups.iter().copied().map(ScheduledSequenceGroup).collect()
    }

    #[getter]
    fn blocks_to_swap_out<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyArray2<i64>>> {
        pair_array(py, &self.0.blocks_to_swap_out)
    }

    #[getter]
    fn blocks_to_swap_in<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyArray2<i64>>> {
        pair_array(py, &self.0.blocks_to_swap_in)
    }

    #[getter]
    fn blocks_to_copy<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyArray2<i64>>> {
        pair_array(py, &self.0.blocks_to_copy)
    }

    #[getter]
    fn has_moves(&self) -> bool {
        self.0.has_moves()
    }

    #[getter]
    fn ignored_seq_groups(&self) -> Vec<(i64, String, GroupStats)> {
        let ignored = self.0.ignored_seq_groups.iter();
        ignored
            .map(|(group, reason, stats)| (group.to_bits(), reason.to_string(), GroupStats(*stats)))
            .collect()
    }

    #[getter]
    fn preempted(&self) -> Vec<(i64, &'static str)> {
        self.0.preempted.iter().map(|(group, mode)| (group.to_bits(), mode.as_str())).collect()
    }

    #[getter]
    fn refused(&self) -> Vec<(i64, &'static str)> {
        self.0.refused.iter().map(|(group, reason)| (group.to_bits(), reason.as_str())).collect()
    }

    #[getter]
    fn num_lookahead_slots(&self) -> usize {
        self.0.num_lookahead_slots
    }

    #[getter]
    fn num_prefill_rows(&self) -> usize {
        self.0.num_prefill_rows
    }

    #[getter]
    fn swapped_in(&self) -> Vec<i64> {
        self.0.swapped_in.iter().map(|group| group.to_bits()).collect()
    }

    #[getter]
    fn running_queue_size(&self) -> usize {
        self.0.running_queue_size
    }

    #[getter]
    fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    fn __repr__(&self) -> String {
        let Self(outputs) = self;
        format!(
            "SchedulerOutputs(step_id={}, rows={}, prefill_groups={}, tokens={}, preempted={}, \
             ignored={})",
            outputs.step_id,
            outputs.rows.len(),
            outputs.num_prefill_groups,
            outputs.num_batched_tokens,
            outputs.preempted.len(),
            outputs.ignored_seq_groups.len()
        )
    }
}

/// One group in one step.
#[pyclass(frozen, module = "pagedserve._core")]
pub(crate) struct ScheduledSequenceGroup(core::ScheduledSequenceGroup);

#[pymethods]
impl ScheduledSequenceGroup {
    #[getter]
    fn group(&self) -> i64 {
        self.0.group.to_bits()
    }

    #[getter]
    fn token_chunk_size(&self) -> usize {
        self.0.token_chunk_size
    }

    #[getter]
    fn is_prefill(&self) -> bool {
        self.0.is_prefill
    }

    #[getter]
    fn is_sampled(&self) -> bool {
        self.0.is_sampled
    }

    #[getter]
    fn num_rows(&self) -> usize {
        self.0.num_rows
    }
}

/// What a group has been through.
#[pyclass(frozen, eq, module = "pagedserve._core")]
#[derive(PartialEq)]
pub(crate) struct GroupStats(pub(crate) sequence::GroupStats);

#[pymethods]
impl GroupStats {
    #[getter]
    fn num_preemptions(&self) -> usize {
        self.0.num_preemptions
    }

    #[getter]
    fn num_recomputed_tokens(&self) -> usize {
        self.0.num_recomputed_tokens
    }

    #[getter]
    fn num_cached_tokens(&self) -> usize {
        self.0.num_cached_tokens
    }

    fn __repr__(&self) -> String {
        let sequence::GroupStats { num_preemptions, num_recomputed_tokens, num_cached_tokens } =
            self.0;
        format!(
            "GroupStats(num_preemptions={num_preemptions}, \
             num_recomputed_tokens={num_recomputed_tokens}, num_cached_tokens={num_cached_tokens})"
        )
    }
}
