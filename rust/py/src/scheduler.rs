//! The `Scheduler` class.

use numpy::PyArray1;
use pagedserve_core::arena::Handle;
use pagedserve_core::scheduler as core;
use pyo3::prelude::*;

use crate::arrays::{InputBuffers, readonly};
use crate::config::{CacheConfig, SchedulerConfig};
use crate::error::OrRaise;
use crate::outputs::SchedulerOutputs;

/// Decides step by step which sequences run and which blocks they get.
#[pyclass(module = "pagedserve._core")]
pub(crate) struct Scheduler(core::Scheduler);

#[pymethods]
impl Scheduler {
    #[new]
    fn new(scheduler_config: &SchedulerConfig, cache_config: &CacheConfig) -> PyResult<Self> {
        core::Scheduler::new(scheduler_config.0.clone(), &cache_config.0).map(Self).or_raise()
    }

    #[pyo3(signature = (token_ids, *, arrival_time, max_num_running_seqs = 1))]
    fn add_seq_group(
        &mut self,
        token_ids: &Bound<'_, PyAny>,
        arrival_time: f64,
        max_num_running_seqs: usize,
    ) -> PyResult<(i64, i64)> {
        let token_ids = readonly(token_ids, "token_ids")?;
        let (group, seq) = self
            .0
            .add_seq_group(token_ids.as_slice()?, arrival_time, max_num_running_seqs)
            .or_raise()?;
        Ok((group.to_bits(), seq.to_bits()))
    }

    fn abort(&mut self, group: i64) -> bool {
        self.0.abort(Handle::from_bits(group))
    }

    fn schedule(&mut self, now: f64) -> PyResult<SchedulerOutputs> {
        self.0.schedule(now).cloned().map(SchedulerOutputs).or_raise()
    }

    fn prepare_inputs(&self, py: Python<'_>, buffers: &InputBuffers) -> PyResult<()> {
        buffers.lend(py, |arrays| self.0.prepare_inputs(arrays).or_raise())
    }

    fn update<'py>(
        &mut self,
        py: Python<'py>,
        step_id: u64,
        parent_rows: &Bound<'py, PyAny>,
        token_start: &Bound<'py, PyAny>,
        tokens: &Bound<'py, PyAny>,
        finish: &Bound<'py, PyAny>,
    ) -> PyResult<Bound<'py, PyArray1<i64>>> {
        let parent_rows = readonly(parent_rows, "parent_rows")?;
        let token_start = readonly(token_start, "token_start")?;
        let tokens = readonly(tokens, "tokens")?;
        let finish = readonly(finish, "finish")?;
        let results = core::StepResults {
            parent_rows: parent_rows.as_slice()?,
            token_start: token_start.as_slice()?,
            tokens: tokens.as_slice()?,
            finish: finish.as_slice()?,
        };
        let handles = self.0.update(step_id, results).or_raise()?;
        Ok(PyArray1::from_iter(py, handles.iter().map(|handle| handle.to_bits())))
    }

    fn abandon(&mut self, step_id: u64) -> PyResult<()> {
        self.0.abandon(step_id).or_raise()
    }

    fn token_ids<'py>(&self, py: Python<'py>, seq: i64) -> PyResult<Bound<'py, PyArray1<i32>>> {
        let sequence = self.0.sequence(Handle::from_bits(seq)).or_raise()?;
        Ok(PyArray1::from_slice(py, sequence.token_ids()))
    }

    fn block_table<'py>(&self, py: Python<'py>, seq: i64) -> PyResult<Bound<'py, PyArray1<i32>>> {
        let sequence = self.0.sequence(Handle::from_bits(seq)).or_raise()?;
        let blocks = sequence.table.blocks().iter();
        let index = |index: usize| i32::try_from(index).unwrap_or(i32::MAX);
        Ok(PyArray1::from_iter(py, blocks.map(|block| index(block.index()))))
    }

    fn check(&self) -> PyResult<()> {
        self.0.check().or_raise()
    }

    #[getter]
    fn has_unfinished(&self) -> bool {
        !self.0.queues().is_empty()
    }

    #[getter]
    fn num_waiting(&self) -> usize {
        self.0.queues().waiting.len()
    }

    #[getter]
    fn num_running(&self) -> usize {
        self.0.queues().running.len()
    }

    #[getter]
    fn num_swapped(&self) -> usize {
        self.0.queues().swapped.len()
    }

    #[getter]
    fn num_free_gpu_blocks(&self) -> usize {
        self.0.space().gpu().num_free()
    }

    #[getter]
    fn num_free_cpu_blocks(&self) -> usize {
        self.0.space().cpu().num_free()
    }

    #[getter]
    fn num_preemptions(&self) -> usize {
        let stats = self.0.stats();
        stats.num_recompute_preemptions + stats.num_swap_preemptions
    }

    #[getter]
    fn num_recomputed_tokens(&self) -> usize {
        self.0.stats().num_recomputed_tokens
    }

    #[getter]
    fn queue_seconds(&self) -> f64 {
        self.0.stats().queue_seconds
    }
}
