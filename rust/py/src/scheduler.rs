//! The `Scheduler` class.

use std::fs::File;
use std::io::{self, BufWriter};
use std::path::PathBuf;

use numpy::PyArray1;
use pagedserve_core::arena::Handle;
use pagedserve_core::error::Error;
use pagedserve_core::hash::PrefixKey;
use pagedserve_core::log::DecisionLog;
use pagedserve_core::scheduler as core;
use pagedserve_core::sequence::{GroupHandle, Request};
use pyo3::prelude::*;

use crate::arrays::{InputBuffers, block_array, readonly};
use crate::config::{CacheConfig, SchedulerConfig, count, count_or};
use crate::error::OrRaise;
use crate::metadata::{self, SequenceGroupMetadata};
use crate::outputs::{GroupStats, SchedulerOutputs};

/// Decides step by step which sequences run and which blocks they get.
#[pyclass(module = "pagedserve._core")]
pub(crate) struct Scheduler {
    core: core::Scheduler,
    log: Option<DecisionLog<BufWriter<File>>>,
}

#[pymethods]
impl Scheduler {
    #[new]
    #[pyo3(signature = (scheduler_config, cache_config, *, log = None))]
    fn new(
        scheduler_config: &SchedulerConfig,
        cache_config: &CacheConfig,
        log: Option<PathBuf>,
    ) -> PyResult<Self> {
        let (scheduler, cache) = (&scheduler_config.0, &cache_config.0);
        let core = core::Scheduler::new(scheduler.clone(), cache).or_raise()?;
        let log = match log {
            Some(path) => {
                let named = |error: io::Error| {
                    io::Error::new(error.kind(), format!("log {}: {error}", path.display()))
                };
                let file = File::create(&path).map_err(named)?;
                Some(DecisionLog::new(BufWriter::new(file), scheduler, cache))
            }
            None => None,
        };
        Ok(Self { core, log })
    }

    #[pyo3(signature = (
        token_ids, *, arrival_time, max_num_running_seqs = 1, priority = 0, adapter = 0, salt = 0,
        num_encoder_tokens = 0,
    ))]
    #[expect(clippy::too_many_arguments, reason = "keywords in Python")]
    fn add_seq_group(
        &mut self,
        token_ids: &Bound<'_, PyAny>,
        arrival_time: f64,
        max_num_running_seqs: i64,
        priority: i64,
        adapter: u32,
        salt: u64,
        num_encoder_tokens: i64,
    ) -> PyResult<(i64, i64)> {
        let token_ids = readonly(token_ids, "token_ids")?;
        let request = Request {
            max_num_running_seqs: count("max_num_running_seqs", max_num_running_seqs)?,
            priority,
            key: PrefixKey { adapter, salt },
            num_encoder_tokens: count("num_encoder_tokens", num_encoder_tokens)?,
            ..Request::new(token_ids.as_slice()?, arrival_time)
        };
        let (group, seq) = self.core.add_seq_group(&request).or_raise()?;
        if let Some(log) = &mut self.log {
            log.add(group, &request);
        }
        Ok((group.to_bits(), seq.to_bits()))
    }

    fn abort(&mut self, group: i64) -> Option<GroupStats> {
        let group = Handle::from_bits(group);
        let stats = self.core.abort(group)?;
        if let Some(log) = &mut self.log {
            log.abort(group);
        }
        Some(GroupStats(stats))
    }

    fn schedule(&mut self, now: f64) -> PyResult<SchedulerOutputs> {
        let outputs = self.core.schedule(now).or_raise()?.clone();
        if let Some(log) = &mut self.log {
            let space = self.core.space();
            log.schedule(now, &outputs, (space.gpu().num_free(), space.cpu().num_free()));
        }
        Ok(SchedulerOutputs(outputs))
    }

    fn prepare_inputs(&self, py: Python<'_>, buffers: &InputBuffers) -> PyResult<()> {
        buffers.lend(py, |arrays| self.core.prepare_inputs(arrays).or_raise())
    }

    fn update<'py>(
        &mut self,
        py: Python<'py>,
        step_id: u64,
        parent_rows: &Bound<'py, PyAny>,
        token_start: &Bound<'py, PyAny>,
        tokens: &Bound<'py, PyAny>,
        finish: &Bound<'py, PyAny>,
    ) -> PyResult<(Bound<'py, PyArray1<i64>>, Vec<(i64, GroupStats)>)> {
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
        let updated = self.core.update(step_id, results).or_raise()?;
        let handles = PyArray1::from_iter(py, updated.handles.iter().map(|seq| seq.to_bits()));
        let ended =
            updated.ended.iter().map(|(group, stats)| (group.to_bits(), GroupStats(*stats)));
        let ended = ended.collect();
        if let Some(log) = &mut self.log {
            log.update(self.core.outputs(), &results);
        }
        Ok((handles, ended))
    }

    fn update_async(&mut self, step_id: u64) -> PyResult<bool> {
        let is_async = self.core.update_async(step_id).or_raise()?;
        if let (Some(log), true) = (&mut self.log, is_async) {
            log.update_async();
        }
        Ok(is_async)
    }

    fn resolve_tokens(&mut self, step_id: u64, tokens: &Bound<'_, PyAny>) -> PyResult<()> {
        let tokens = readonly(tokens, "tokens")?;
        let tokens = tokens.as_slice()?;
        self.core.resolve_tokens(step_id, tokens).or_raise()?;
        if let Some(log) = &mut self.log {
            log.resolve_tokens(step_id, tokens);
        }
        Ok(())
    }

    fn abandon(&mut self, step_id: u64) -> PyResult<()> {
        self.core.abandon(step_id).or_raise()?;
        if let Some(log) = &mut self.log {
            log.abandon(step_id);
        }
        Ok(())
    }

    /// Brings the decision log to its file.
    fn flush_log(&mut self) {
        if let Some(log) = &mut self.log {
            log.flush();
        }
    }

    /// What ended the decision log, if anything did.
    #[getter]
    fn log_error(&self) -> Option<String> {
        self.log.as_ref()?.error().map(ToString::to_string)
    }

    fn token_ids<'py>(&self, py: Python<'py>, seq: i64) -> PyResult<Bound<'py, PyArray1<i32>>> {
        let sequence = self.core.sequence(Handle::from_bits(seq)).or_raise()?;
        Ok(PyArray1::from_slice(py, sequence.token_ids()))
    }

    fn block_table<'py>(&self, py: Python<'py>, seq: i64) -> PyResult<Bound<'py, PyArray1<i32>>> {
        let table = &self.core.sequence(Handle::from_bits(seq)).or_raise()?.table;
        Ok(block_array(py, (0..table.len()).map(|index| table.block(index))))
    }

    fn cross_block_table<'py>(
        &self,
        py: Python<'py>,
        group: i64,
    ) -> PyResult<Bound<'py, PyArray1<i32>>> {
        let group = self.core.store().find_group(Handle::from_bits(group)).or_raise()?;
        Ok(block_array(py, group.cross_table.blocks().iter().copied()))
    }

    fn common_computed_blocks<'py>(
        &self,
        py: Python<'py>,
        group: i64,
    ) -> PyResult<Bound<'py, PyArray1<i32>>> {
        let group = Handle::from_bits(group);
        self.core.store().find_group(group).or_raise()?;
        let blocks = self.core.space().common_computed_blocks(self.core.store(), group);
        Ok(block_array(py, blocks.iter().copied()))
    }

    #[pyo3(signature = (*, delta = false))]
    fn seq_group_metadata(
        &self,
        py: Python<'_>,
        delta: bool,
    ) -> PyResult<Vec<SequenceGroupMetadata>> {
        metadata::of_step(py, &self.core, delta)
    }

    fn seqs_of<'py>(&self, py: Python<'py>, group: i64) -> PyResult<Bound<'py, PyArray1<i64>>> {
        let group = self.core.store().find_group(Handle::from_bits(group)).or_raise()?;
        Ok(PyArray1::from_iter(py, group.seqs.iter().map(|seq| seq.to_bits())))
    }

    fn group_stats(&self, group: i64) -> PyResult<GroupStats> {
        self.core.group_stats(Handle::from_bits(group)).map(GroupStats).or_raise()
    }

    fn prompt_refusal(&self, num_tokens: i64) -> PyResult<Option<String>> {
        let num_tokens = count_or(Error::Request, "num_tokens", num_tokens)?;
        Ok(self.core.prompt_refusal(num_tokens).map(|refusal| refusal.to_string()))
    }

    fn reset_prefix_cache(&mut self) -> bool {
        let is_reset = self.core.reset_prefix_cache();
        if let (Some(log), true) = (&mut self.log, is_reset) {
            log.reset_prefix_cache();
        }
        is_reset
    }

    fn check(&self) -> PyResult<()> {
        self.core.check().or_raise()
    }

    #[getter]
    fn has_unfinished(&self) -> bool {
        !self.core.queues().is_empty()
    }

    #[getter]
    fn waiting(&self) -> Vec<i64> {
        handles(&self.core.queues().waiting)
    }

    #[getter]
    fn running(&self) -> Vec<i64> {
        handles(&self.core.queues().running)
    }

    #[getter]
    fn swapped(&self) -> Vec<i64> {
        handles(&self.core.queues().swapped)
    }

    #[getter]
    fn num_waiting(&self) -> usize {
        self.core.queues().waiting.len()
    }

    #[getter]
    fn num_running(&self) -> usize {
        self.core.queues().running.len()
    }

    #[getter]
    fn num_swapped(&self) -> usize {
        self.core.queues().swapped.len()
    }

    #[getter]
    fn num_free_gpu_blocks(&self) -> usize {
        self.core.space().gpu().num_free()
    }

    #[getter]
    fn num_free_cpu_blocks(&self) -> usize {
        self.core.space().cpu().num_free()
    }

    #[getter]
    fn num_preemptions(&self) -> usize {
        let stats = self.core.stats();
        stats.num_recompute_preemptions + stats.num_swap_preemptions
    }

    #[getter]
    fn num_recomputed_tokens(&self) -> usize {
        self.core.stats().num_recomputed_tokens
    }

    #[getter]
    fn num_looked_up_tokens(&self) -> usize {
        self.core.stats().num_looked_up_tokens
    }

    #[getter]
    fn num_cached_tokens(&self) -> usize {
        self.core.stats().num_cached_tokens
    }

    #[getter]
    fn queue_seconds(&self) -> f64 {
        self.core.stats().queue_seconds
    }
}

fn handles<'a>(queue: impl IntoIterator<Item = &'a GroupHandle>) -> Vec<i64> {
    queue.into_iter().map(|group| group.to_bits()).collect()
}
