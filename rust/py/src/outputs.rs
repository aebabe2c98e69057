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
    /// Names the step in `update` and `abandon`; counts up from 0.
    #[getter]
    fn step_id(&self) -> u64 {
        self.0.step_id
    }

    /// R: sequences that run.
    #[getter]
    fn num_rows(&self) -> usize {
        self.0.rows.len()
    }

    /// T: tokens computed in all rows.
    #[getter]
    fn num_batched_tokens(&self) -> usize {
        self.0.num_batched_tokens
    }

    /// S: rows whose next token is wanted.
    #[getter]
    fn num_samples(&self) -> usize {
        self.0.num_samples
    }

    /// B: blocks of the longest table of a row.
    #[getter]
    fn max_num_blocks(&self) -> usize {
        self.0.max_num_blocks
    }

    /// C: blocks of the longest table of an encoder's keys and values.
    #[getter]
    fn max_num_cross_blocks(&self) -> usize {
        self.0.max_num_cross_blocks
    }

    /// Leading groups that still compute their prompt, or recompute.
    #[getter]
    fn num_prefill_groups(&self) -> usize {
        self.0.num_prefill_groups
    }

    /// Tokens of these groups.
    #[getter]
    fn num_prefill_tokens(&self) -> usize {
        self.0.num_prefill_tokens
    }

    /// Groups that run, prefills first; the rows of a group are neighbours, in this order.
    #[getter]
    fn scheduled_seq_groups(&self) -> Vec<ScheduledSequenceGroup> {
        self.0.scheduled_seq_groups.iter().copied().map(ScheduledSequenceGroup).collect()
    }

    /// Moves to the host, int64 ``[n, 2]`` (device, host); carried out first.
    #[getter]
    fn blocks_to_swap_out<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyArray2<i64>>> {
        pair_array(py, &self.0.blocks_to_swap_out)
    }

    /// Moves from the host, int64 ``[n, 2]`` (host, device); carried out second.
    #[getter]
    fn blocks_to_swap_in<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyArray2<i64>>> {
        pair_array(py, &self.0.blocks_to_swap_in)
    }

    /// Copies on the device, int64 ``[n, 2]`` (source, destination); carried out third.
    #[getter]
    fn blocks_to_copy<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyArray2<i64>>> {
        pair_array(py, &self.0.blocks_to_copy)
    }

    /// States to the host, int64 ``[n, 2]`` (device slot, host slot); states move as blocks do, and
    /// in the same order.
    #[getter]
    fn states_to_swap_out<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyArray2<i64>>> {
        pair_array(py, &self.0.states_to_swap_out)
    }

    /// States from the host, int64 ``[n, 2]`` (host slot, device slot).
    #[getter]
    fn states_to_swap_in<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyArray2<i64>>> {
        pair_array(py, &self.0.states_to_swap_in)
    }

    /// Copies of states on the device, int64 ``[n, 2]`` (source slot, destination slot).
    #[getter]
    fn states_to_copy<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyArray2<i64>>> {
        pair_array(py, &self.0.states_to_copy)
    }

    /// Window blocks to the host, int64 ``[n, 2]`` (device, host); they move as blocks do, and in the
    /// same order.
    #[getter]
    fn window_blocks_to_swap_out<'py>(
        &self,
        py: Python<'py>,
    ) -> PyResult<Bound<'py, PyArray2<i64>>> {
        pair_array(py, &self.0.window_blocks_to_swap_out)
    }

    /// Window blocks from the host, int64 ``[n, 2]`` (host, device).
    #[getter]
    fn window_blocks_to_swap_in<'py>(
        &self,
        py: Python<'py>,
    ) -> PyResult<Bound<'py, PyArray2<i64>>> {
        pair_array(py, &self.0.window_blocks_to_swap_in)
    }

    /// Copies of window blocks on the device, int64 ``[n, 2]`` (source, destination).
    #[getter]
    fn window_blocks_to_copy<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyArray2<i64>>> {
        pair_array(py, &self.0.window_blocks_to_copy)
    }

    /// Adapters to be copied into their slots, ``(adapter, slot)``, before the rows run; what lay
    /// there is not needed any more, once the steps before have run.
    #[getter]
    fn adapters_to_load(&self) -> Vec<(u32, i32)> {
        self.0.adapters_to_load.clone()
    }

    /// Whether blocks or states are to be moved before the rows run.
    #[getter]
    fn has_moves(&self) -> bool {
        self.0.has_moves()
    }

    /// Groups ended in this step: handle (now dead), reason, what it had been through.
    #[getter]
    fn ignored_seq_groups(&self) -> Vec<(i64, String, GroupStats)> {
        let ignored = self.0.ignored_seq_groups.iter();
        ignored
            .map(|(group, reason, stats)| (group.to_bits(), reason.to_string(), GroupStats(*stats)))
            .collect()
    }

    /// Groups that lost their device blocks in this step, and how: "recompute" or "swap".
    #[getter]
    fn preempted(&self) -> Vec<(i64, &'static str)> {
        self.0.preempted.iter().map(|(group, mode)| (group.to_bits(), mode.as_str())).collect()
    }

    /// Groups that were looked at and did not run, and why; those behind them were not.
    #[getter]
    fn refused(&self) -> Vec<(i64, &'static str)> {
        self.0.refused.iter().map(|(group, reason)| (group.to_bits(), reason.as_str())).collect()
    }

    /// Slots beyond its next token that every decoding sequence has.
    #[getter]
    fn num_lookahead_slots(&self) -> usize {
        self.0.num_lookahead_slots
    }

    /// Leading rows that belong to prefill groups.
    #[getter]
    fn num_prefill_rows(&self) -> usize {
        self.0.num_prefill_rows
    }

    /// Drafts that `Scheduler.propose` put behind rows; the tokens and samples of the step count them.
    #[getter]
    fn num_drafts(&self) -> usize {
        self.0.drafts.len()
    }

    /// Groups that came back from the host.
    #[getter]
    fn swapped_in(&self) -> Vec<i64> {
        self.0.swapped_in.iter().map(|group| group.to_bits()).collect()
    }

    /// Groups in the running queue after the decisions.
    #[getter]
    fn running_queue_size(&self) -> usize {
        self.0.running_queue_size
    }

    /// Whether there is nothing to execute; then no step is open.
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
    /// Handle of the group.
    #[getter]
    fn group(&self) -> i64 {
        self.0.group.to_bits()
    }

    /// Tokens computed for it: of a prefill in all its rows, of a decode in each.
    #[getter]
    fn token_chunk_size(&self) -> usize {
        self.0.token_chunk_size
    }

    /// Whether it was still computing its prompt, or recomputing, before this step.
    #[getter]
    fn is_prefill(&self) -> bool {
        self.0.is_prefill
    }

    /// Whether its next tokens are wanted: False for a chunk that stops before the end.
    #[getter]
    fn is_sampled(&self) -> bool {
        self.0.is_sampled
    }

    /// Its rows.
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
    /// How often it was preempted, by recompute or by swap.
    #[getter]
    fn num_preemptions(&self) -> usize {
        self.0.num_preemptions
    }

    /// Tokens that were computed and given up, by recompute or by a step that failed.
    #[getter]
    fn num_recomputed_tokens(&self) -> usize {
        self.0.num_recomputed_tokens
    }

    /// Tokens of the prompt that the prefix cache had when the group was first admitted.
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
