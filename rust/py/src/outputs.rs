//! `SchedulerOutputs`: a frozen copy of one step's decisions.

use numpy::PyArray2;
use pagedserve_core::outputs as core;
use pagedserve_core::sequence;
use pyo3::prelude::*;

use crate::arrays::pair_array;

/// Moves of the blocks of one pool, to be made in this order before the rows run.
#[pyclass(frozen, module = "pagedserve._core")]
pub(crate) struct BlockMoves(core::Moves);

impl BlockMoves {
    /// Converts the moves of every pool.
    pub(crate) fn all(moves: &[core::Moves]) -> Vec<Self> {
        moves.iter().cloned().map(Self).collect()
    }
}

#[pymethods]
impl BlockMoves {
    /// Moves to the host, int64 ``[n, 2]`` (device, host).
    #[getter]
    fn swap_out<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyArray2<i64>>> {
        pair_array(py, &self.0.swap_out)
    }

    /// Moves from the host, int64 ``[n, 2]`` (host, device).
    #[getter]
    fn swap_in<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyArray2<i64>>> {
        pair_array(py, &self.0.swap_in)
    }

    /// Copies on the device, int64 ``[n, 2]`` (source, destination).
    #[getter]
    fn copy<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyArray2<i64>>> {
        pair_array(py, &self.0.copy)
    }

    fn __repr__(&self) -> String {
        let [swap_out, swap_in, copy] = self.0.counts();
        format!("BlockMoves({swap_out} out, {swap_in} in, {copy} copied)")
    }
}

/// Decisions of one step.
#[pyclass(frozen, module = "pagedserve._core")]
pub(crate) struct SchedulerOutputs(pub(crate) core::SchedulerOutputs);

#[pymethods]
impl SchedulerOutputs {
    /// Id of the step for `update` and `abandon`; counts up from 0.
    #[getter]
    fn step_id(&self) -> u64 {
        self.0.step_id
    }

    /// Number of rows R: sequences that run.
    #[getter]
    fn num_rows(&self) -> usize {
        self.0.rows.len()
    }

    /// Number of tokens T computed in all rows.
    #[getter]
    fn num_batched_tokens(&self) -> usize {
        self.0.num_batched_tokens
    }

    /// Number of samples S: rows whose next token is sampled.
    #[getter]
    fn num_samples(&self) -> usize {
        self.0.num_samples
    }

    /// Width B: blocks of the longest block table of a row in the first KV group.
    #[getter]
    fn max_num_blocks(&self) -> usize {
        self.0.max_num_blocks
    }

    /// Entries of the longest table of a row in each KV group beside the first.
    #[getter]
    fn table_widths(&self) -> Vec<usize> {
        self.0.table_widths.clone()
    }

    /// Number of leading groups that compute or recompute their prompt.
    #[getter]
    fn num_prefill_groups(&self) -> usize {
        self.0.num_prefill_groups
    }

    /// Number of tokens of the prefill groups.
    #[getter]
    fn num_prefill_tokens(&self) -> usize {
        self.0.num_prefill_tokens
    }

    /// Groups that run, prefills first; the rows of a group are adjacent, in this order.
    #[getter]
    fn scheduled_seq_groups(&self) -> Vec<ScheduledSequenceGroup> {
        self.0.scheduled_seq_groups.iter().copied().map(ScheduledSequenceGroup).collect()
    }

    /// Moves in the pool of each KV group, the first group's first.
    ///
    /// A group without a separate pool moves in the first, and its entry is empty.
    #[getter]
    fn moves(&self) -> Vec<BlockMoves> {
        BlockMoves::all(&self.0.moves)
    }

    /// Moves to the host in the first KV group, int64 ``[n, 2]`` (device, host).
    #[getter]
    fn blocks_to_swap_out<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyArray2<i64>>> {
        pair_array(py, &self.0.moves[0].swap_out)
    }

    /// Moves from the host in the first KV group, int64 ``[n, 2]`` (host, device).
    #[getter]
    fn blocks_to_swap_in<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyArray2<i64>>> {
        pair_array(py, &self.0.moves[0].swap_in)
    }

    /// Copies on the device in the first KV group, int64 ``[n, 2]`` (source, destination).
    #[getter]
    fn blocks_to_copy<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyArray2<i64>>> {
        pair_array(py, &self.0.moves[0].copy)
    }

    /// Adapters to load before the rows run, as ``(adapter, slot)``.
    ///
    /// The previous content of a slot is no longer needed once the earlier steps have run.
    #[getter]
    fn adapters_to_load(&self) -> Vec<(u32, i32)> {
        self.0.adapters_to_load.clone()
    }

    /// Whether blocks must be moved before the rows run.
    #[getter]
    fn has_moves(&self) -> bool {
        self.0.has_moves()
    }

    /// Groups that the scheduler ended: handle (now dead), reason, statistics.
    #[getter]
    fn ignored_seq_groups(&self) -> Vec<(i64, String, GroupStats)> {
        let ignored = self.0.ignored_seq_groups.iter();
        ignored
            .map(|(group, reason, stats)| (group.to_bits(), reason.to_string(), GroupStats(*stats)))
            .collect()
    }

    /// Groups preempted in this step, each with "recompute" or "swap".
    #[getter]
    fn preempted(&self) -> Vec<(i64, &'static str)> {
        self.0.preempted.iter().map(|(group, mode)| (group.to_bits(), mode.as_str())).collect()
    }

    /// Groups that were considered and did not run, each with the reason.
    #[getter]
    fn refused(&self) -> Vec<(i64, &'static str)> {
        self.0.refused.iter().map(|(group, reason)| (group.to_bits(), reason.as_str())).collect()
    }

    /// Number of slots of every decoding sequence after its next token.
    #[getter]
    fn num_lookahead_slots(&self) -> usize {
        self.0.num_lookahead_slots
    }

    /// Number of leading rows that belong to prefill groups.
    #[getter]
    fn num_prefill_rows(&self) -> usize {
        self.0.num_prefill_rows
    }

    /// Number of draft tokens added by `Scheduler.propose`, included in T and S.
    #[getter]
    fn num_drafts(&self) -> usize {
        self.0.drafts.len()
    }

    /// Groups swapped in from the host.
    #[getter]
    fn swapped_in(&self) -> Vec<i64> {
        self.0.swapped_in.iter().map(|group| group.to_bits()).collect()
    }

    /// Number of groups in the running queue after the decisions.
    #[getter]
    fn running_queue_size(&self) -> usize {
        self.0.running_queue_size
    }

    /// Whether the step has nothing to execute; then no step is open.
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

/// Scheduled group of one step.
#[pyclass(frozen, module = "pagedserve._core")]
pub(crate) struct ScheduledSequenceGroup(core::ScheduledSequenceGroup);

#[pymethods]
impl ScheduledSequenceGroup {
    /// Handle of the group.
    #[getter]
    fn group(&self) -> i64 {
        self.0.group.to_bits()
    }

    /// Number of tokens computed: for a prefill in all its rows, for a decode in each.
    #[getter]
    fn token_chunk_size(&self) -> usize {
        self.0.token_chunk_size
    }

    /// Whether the group computed or recomputed its prompt before this step.
    #[getter]
    fn is_prefill(&self) -> bool {
        self.0.is_prefill
    }

    /// Whether its next tokens are sampled: False for a chunk that stops before the end.
    #[getter]
    fn is_sampled(&self) -> bool {
        self.0.is_sampled
    }

    /// Number of rows of the group.
    #[getter]
    fn num_rows(&self) -> usize {
        self.0.num_rows
    }
}

/// Statistics of a group.
#[pyclass(frozen, eq, module = "pagedserve._core")]
#[derive(PartialEq)]
pub(crate) struct GroupStats(pub(crate) sequence::GroupStats);

#[pymethods]
impl GroupStats {
    /// Number of preemptions, by recompute or by swap.
    #[getter]
    fn num_preemptions(&self) -> usize {
        self.0.num_preemptions
    }

    /// Number of tokens computed and discarded, by recompute or by an abandoned step.
    #[getter]
    fn num_recomputed_tokens(&self) -> usize {
        self.0.num_recomputed_tokens
    }

    /// Number of prompt tokens found in the prefix cache at the first admission.
    #[getter]
    fn num_cached_tokens(&self) -> usize {
        self.0.num_cached_tokens
    }

    fn __repr__(&self) -> String {
        let sequence::GroupStats {
            num_preemptions, num_recomputed_tokens, num_cached_tokens, ..
        } = self.0;
        format!(
            "GroupStats(num_preemptions={num_preemptions}, \
             num_recomputed_tokens={num_recomputed_tokens}, num_cached_tokens={num_cached_tokens})"
        )
    }
}
