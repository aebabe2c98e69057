//! Read access to the state of a scheduler.

use numpy::PyArray1;
use pagedserve_core::arena::Handle;
use pagedserve_core::error::Error;
use pagedserve_core::scheduler::Stats;
use pagedserve_core::sequence::GroupHandle;
use pyo3::prelude::*;

use crate::arrays::{block_array, table_blocks};
use crate::error::OrRaise;
use crate::gateway::Work;
use crate::metadata::{self, SequenceGroupMetadata};
use crate::scheduler::{Scheduler, State};

#[pymethods]
impl Scheduler {
    /// Return the token ids of a sequence, prompt and output, int32.
    ///
    /// Raises:
    ///     ``StaleHandleError``: The sequence has ended.
    fn token_ids<'py>(&self, py: Python<'py>, seq: i64) -> PyResult<Bound<'py, PyArray1<i32>>> {
        let seq = Handle::from_bits(seq);
        let tokens = self.0.look(py, |state| {
            state.core.sequence(seq).map(|sequence| sequence.token_ids().into_owned())
        });
        Ok(PyArray1::from_vec(py, tokens.or_raise()?))
    }

    /// Return the physical blocks of a sequence in a KV group, int32; empty while it waits.
    ///
    /// In the first group by logical block; under ``sliding_window`` a physical block stands for
    /// several.  In another the first block is the first that a later query sees.
    ///
    /// Args:
    ///     seq: Handle of the sequence.
    ///     kv_group: Number of the group, 0 for the first.
    ///
    /// Raises:
    ///     ``StaleHandleError``: The sequence has ended.
    ///     ``IndexError``: There is no such group.
    #[pyo3(signature = (seq, *, kv_group = 0))]
    fn block_table<'py>(
        &self,
        py: Python<'py>,
        seq: i64,
        kv_group: usize,
    ) -> PyResult<Bound<'py, PyArray1<i32>>> {
        let seq = Handle::from_bits(seq);
        let blocks = self.0.look(py, |state| {
            state.core.sequence(seq).map(|sequence| table_blocks(sequence, kv_group))
        });
        Ok(block_array(py, blocks.or_raise()??))
    }

    /// Return the computed leading blocks that all sequences of a group share, int32.
    ///
    /// Raises:
    ///     ``StaleHandleError``: The group has ended.
    fn common_computed_blocks<'py>(
        &self,
        py: Python<'py>,
        group: i64,
    ) -> PyResult<Bound<'py, PyArray1<i32>>> {
        let group = Handle::from_bits(group);
        let blocks = self.0.look(py, |state| {
            state.core.store().find_group(group)?;
            Ok::<_, Error>(
                state.core.space().common_computed_blocks(state.core.store(), group).to_vec(),
            )
        });
        Ok(block_array(py, blocks.or_raise()?))
    }

    /// Return the scheduled groups of the open step as objects, in order; none without one.
    ///
    /// Args:
    ///     delta: Return only the token ids of the step, and for decoding groups only the blocks
    ///         that the step writes, for a runner that keeps the rest.
    #[pyo3(signature = (*, delta = false))]
    fn seq_group_metadata(
        &self,
        py: Python<'_>,
        delta: bool,
    ) -> PyResult<Vec<SequenceGroupMetadata>> {
        let groups = self.0.look(py, |state| metadata::of_step(&state.core, delta)).or_raise()?;
        groups.into_iter().map(|group| SequenceGroupMetadata::new(py, group)).collect()
    }

    /// Return the live sequences of a group in order of creation, int64 handles.
    ///
    /// Raises:
    ///     ``StaleHandleError``: The group has ended.
    fn seqs_of<'py>(&self, py: Python<'py>, group: i64) -> PyResult<Bound<'py, PyArray1<i64>>> {
        let group = Handle::from_bits(group);
        let seqs = self.0.look(py, |state| {
            let group = state.core.store().find_group(group)?;
            Ok::<_, Error>(group.seqs.iter().map(|seq| seq.to_bits()).collect::<Vec<i64>>())
        });
        Ok(PyArray1::from_vec(py, seqs.or_raise()?))
    }

    /// Check every invariant of the whole state; slow, for tests and idle times.
    ///
    /// Raises:
    ///     ``InvariantError``: The first broken invariant: a bug in this package.
    fn check(&self, py: Python<'_>) -> PyResult<()> {
        self.0.act(py, |_| Work::LONG, |state| state.core.check())
    }

    /// Whether any group waits, runs or is swapped.
    #[getter]
    fn has_unfinished(&self, py: Python<'_>) -> bool {
        self.0.look(py, |state| !state.core.queues().is_empty())
    }

    /// Handles of the waiting groups, in order of service.
    #[getter]
    fn waiting(&self, py: Python<'_>) -> Vec<i64> {
        self.0.look(py, |state| handles(&state.core.queues().waiting))
    }

    /// Handles of the running groups, in order of service.
    #[getter]
    fn running(&self, py: Python<'_>) -> Vec<i64> {
        self.0.look(py, |state| handles(&state.core.queues().running))
    }

    /// Handles of the swapped groups, in order of service.
    #[getter]
    fn swapped(&self, py: Python<'_>) -> Vec<i64> {
        self.0.look(py, |state| handles(&state.core.queues().swapped))
    }

    /// Number of waiting groups.
    #[getter]
    fn num_waiting(&self, py: Python<'_>) -> usize {
        self.0.look(py, |state| state.core.queues().waiting.len())
    }

    /// Number of running groups.
    #[getter]
    fn num_running(&self, py: Python<'_>) -> usize {
        self.0.look(py, |state| state.core.queues().running.len())
    }

    /// Number of swapped groups.
    #[getter]
    fn num_swapped(&self, py: Python<'_>) -> usize {
        self.0.look(py, |state| state.core.queues().swapped.len())
    }

    /// Number of free device blocks, cached ones included.
    #[getter]
    fn num_free_gpu_blocks(&self, py: Python<'_>) -> usize {
        self.0.look(py, |state| state.core.space().gpu().num_free())
    }

    /// Number of free host blocks, cached ones included.
    #[getter]
    fn num_free_cpu_blocks(&self, py: Python<'_>) -> usize {
        self.0.look(py, |state| state.core.space().cpu().num_free())
    }

    /// Total number of preemptions, by recompute and by swap.
    #[getter]
    fn num_preemptions(&self, py: Python<'_>) -> usize {
        let stats = self.stats(py);
        stats.num_recompute_preemptions + stats.num_swap_preemptions
    }

    /// Used share of the fullest device pool of a KV group, from 0 to 1; states are left out.
    #[getter]
    fn gpu_cache_usage(&self, py: Python<'_>) -> f64 {
        self.0.look(py, |state| state.core.space().usage().0)
    }

    /// Used share of the fullest host pool of a KV group, from 0 to 1; states are left out.
    #[getter]
    fn cpu_cache_usage(&self, py: Python<'_>) -> f64 {
        self.0.look(py, |state| state.core.space().usage().1)
    }

    /// Total number of tokens whose computed keys and values were discarded.
    #[getter]
    fn num_recomputed_tokens(&self, py: Python<'_>) -> usize {
        self.stats(py).num_recomputed_tokens
    }

    /// Total number of tokens looked up in the prefix cache, counted per admission.
    #[getter]
    fn num_looked_up_tokens(&self, py: Python<'_>) -> usize {
        self.stats(py).num_looked_up_tokens
    }

    /// Total number of looked-up tokens that the prefix cache had.
    #[getter]
    fn num_cached_tokens(&self, py: Python<'_>) -> usize {
        self.stats(py).num_cached_tokens
    }

    /// Total seconds that groups waited from arrival to their first step.
    #[getter]
    fn queue_seconds(&self, py: Python<'_>) -> f64 {
        self.stats(py).queue_seconds
    }
}

impl Scheduler {
    fn stats(&self, py: Python<'_>) -> Stats {
        self.0.look(py, |state: &State| state.core.stats())
    }
}

fn handles<'a>(queue: impl IntoIterator<Item = &'a GroupHandle>) -> Vec<i64> {
    queue.into_iter().map(|group| group.to_bits()).collect()
}
