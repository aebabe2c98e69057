//! The calls of a step.

use numpy::PyArray1;
use pagedserve_core::error::Error;
use pagedserve_core::scheduler as core;
use pagedserve_core::sequence::Sequence;
use pyo3::prelude::*;

use crate::arrays::{InputBuffers, readonly};
use crate::gateway::Work;
use crate::outputs::{GroupStats, SchedulerOutputs};
use crate::scheduler::{Scheduler, State};

/// Sequence handle of each output, and the groups that ended.
type Updated<'py> = (Bound<'py, PyArray1<i64>>, Vec<(i64, GroupStats)>);

#[pymethods]
impl Scheduler {
    /// Decide the next step, and open it unless it is empty.
    ///
    /// Args:
    ///     now: Time in seconds of the caller's clock, not before that of the last call.
    ///
    /// Returns:
    ///     Decisions of the step.  If ``is_empty``, no step is open; groups may still have ended
    ///     (``ignored_seq_groups``).
    ///
    /// Raises:
    ///     ``StepError``: A step is open, or ``now`` is no time or lies in the past.
    fn schedule(&self, py: Python<'_>, now: f64) -> PyResult<SchedulerOutputs> {
        let schedule = |state: &mut State| {
            let outputs = state.core.schedule(now)?.clone();
            let space = state.core.space();
            let free = (space.gpu().num_free(), space.cpu().num_free());
            state.note(|log| log.schedule(now, &outputs, free));
            Ok::<_, Error>(SchedulerOutputs(outputs))
        };
        self.0.act(py, State::work_of_schedule, schedule)
    }

    /// Add draft tokens to decode rows of the open step.
    ///
    /// `prepare_inputs` then writes them after the row's token, each with a separate sample.  No
    /// decision depends on them: the tokens passed to `update` are those that were accepted.
    ///
    /// Args:
    ///     step_id: Id of the open step.
    ///     rows: Sampled decode rows of the step, int32 ``[K]``, increasing.
    ///     token_start: Start of each row's tokens in ``tokens``, int32 ``[K + 1]``, increasing
    ///         from 0.
    ///     tokens: Draft tokens, int32 ``[token_start[K]]``, each at least 0; at most
    ///         ``num_lookahead_slots`` per row.
    ///
    /// Returns:
    ///     Decisions of the step; its counts of tokens and samples include the drafts.
    ///
    /// Raises:
    ///     ``StepError``: Not the open step, a step that already has drafts, or arrays that do not
    ///         fit it; the step then has no drafts.
    fn propose(
        &self,
        py: Python<'_>,
        step_id: u64,
        rows: &Bound<'_, PyAny>,
        token_start: &Bound<'_, PyAny>,
        tokens: &Bound<'_, PyAny>,
    ) -> PyResult<SchedulerOutputs> {
        let rows = readonly(rows, "rows")?;
        let token_start = readonly(token_start, "token_start")?;
        let tokens = readonly(tokens, "tokens")?;
        let drafts = core::Drafts {
            rows: rows.as_slice()?,
            token_start: token_start.as_slice()?,
            tokens: tokens.as_slice()?,
        };
        let propose =
            |state: &mut State| state.core.propose(step_id, drafts).cloned().map(SchedulerOutputs);
        self.0.act(py, |state| Work::rows(state.core.outputs().rows.len()), propose)
    }

    /// Write the model's inputs for the open step into arrays, in place.
    ///
    /// With R rows, T tokens and S samples (``num_rows``, ``num_batched_tokens``, ``num_samples``
    /// of the step) the first R, T or S entries are written, as `InputBuffers` describes; later
    /// entries are left unchanged.
    ///
    /// Raises:
    ///     ``StepError``: No step is open, an array is too short (nothing was written then), or one
    ///         is in use elsewhere.
    fn prepare_inputs(&self, py: Python<'_>, buffers: &InputBuffers) -> PyResult<()> {
        buffers.lend(py, |arrays| {
            self.0.act(py, State::work_of_inputs, |state| state.core.prepare_inputs(arrays))
        })
    }

    /// Apply the sampled tokens, forks and ends of sequences, and end the open step.
    ///
    /// Output *i* continues row ``parent_rows[i]`` with ``tokens[token_start[i]:token_start[i +
    /// 1]]``.  Several outputs may name one row: the last continues its sequence, the others are
    /// forks of it.  A sampled row that no output names is dropped.  A group without sequences
    /// ends.
    ///
    /// Args:
    ///     step_id: Id of the open step.
    ///     parent_rows: Sampled row that each output continues, int32 ``[K]``, not decreasing.
    ///     token_start: Start of each row's tokens in ``tokens``, int32 ``[K + 1]``, increasing
    ///         from 0.
    ///     tokens: Sampled tokens, int32 ``[token_start[K]]``, each at least 0; one per output, or
    ///         up to ``num_lookahead_slots + 1`` for the only output of a decode row.
    ///     finish: Whether each output ends its sequence, uint8 ``[K]``; 0 continues.
    ///
    /// Returns:
    ///     Handle of each output's sequence, int64 ``[K]``, and ``(handle, stats)`` of each group
    ///     that ended. Handles of ended sequences and groups are dead.
    ///
    /// Raises:
    ///     ``StepError``: Not the open step, unresolved tokens of the previous step, or arrays that
    ///         do not fit the step; the step stays open.
    fn update<'py>(
        &self,
        py: Python<'py>,
        step_id: u64,
        parent_rows: &Bound<'py, PyAny>,
        token_start: &Bound<'py, PyAny>,
        tokens: &Bound<'py, PyAny>,
        finish: &Bound<'py, PyAny>,
    ) -> PyResult<Updated<'py>> {
        let parent_rows = readonly(parent_rows, "parent_rows")?;
        let token_start = readonly(token_start, "token_start")?;
        let tokens = readonly(tokens, "tokens")?;
        let finish = readonly(finish, "finish")?;
        let results = core::SampledOutputs {
            parent_rows: parent_rows.as_slice()?,
            token_start: token_start.as_slice()?,
            tokens: tokens.as_slice()?,
            finish: finish.as_slice()?,
        };
        let update = |state: &mut State| {
            let updated = state.core.update(step_id, results)?;
            let handles: Vec<i64> = updated.handles.iter().map(|seq| seq.to_bits()).collect();
            let ended = updated.ended.iter();
            let ended = ended.map(|(group, stats)| (group.to_bits(), GroupStats(*stats))).collect();
            if let Some(log) = &mut state.log {
                log.update(state.core.outputs(), &results);
            }
            Ok::<_, Error>((handles, ended))
        };
        let (handles, ended) = self.0.act(py, |state| state.work_of_update(&results), update)?;
        Ok((PyArray1::from_vec(py, handles), ended))
    }

    /// End the open step before its tokens are known, so that the next one can be scheduled.
    ///
    /// Every sampled row continues with one token.  Until `resolve_tokens` sets it, the next step's
    /// ``token_ids`` hold the placeholder ``-1 - i`` for sample ``i``.  A sequence that ends with
    /// its token is aborted once the token is known.
    ///
    /// Returns:
    ///     False, and the step stays open, if it has drafts, a sampled group may have several
    ///     sequences, or a sequence is at ``max_model_len``.
    ///
    /// Raises:
    ///     ``StepError``: Not the open step, or unresolved tokens of the previous step.
    fn update_async(&self, py: Python<'_>, step_id: u64) -> PyResult<bool> {
        let update = |state: &mut State| {
            let is_async = state.core.update_async(step_id)?;
            if is_async {
                state.note(pagedserve_core::log::DecisionLog::update_async);
            }
            Ok::<_, Error>(is_async)
        };
        self.0.act(py, |state| Work::rows(state.core.outputs().rows.len()), update)
    }

    /// Set the tokens of the step that `update_async` ended.
    ///
    /// Args:
    ///     step_id: Id of that step.
    ///     tokens: Sampled tokens, int32 ``[S]``, in order of samples; those of sequences that have
    ///         ended are ignored.
    ///
    /// Raises:
    ///     ``StepError``: Not that step, too few or too many tokens, or a negative one.
    fn resolve_tokens(&self, step_id: u64, tokens: &Bound<'_, PyAny>) -> PyResult<()> {
        let py = tokens.py();
        let tokens = readonly(tokens, "tokens")?;
        let tokens = tokens.as_slice()?;
        let resolve = |state: &mut State| {
            state.core.resolve_tokens(step_id, tokens)?;
            state.note(|log| log.resolve_tokens(step_id, tokens));
            Ok::<_, Error>(())
        };
        self.0.act(py, |_| Work::rows(tokens.len()), resolve)
    }

    /// Abandon the open step and an unresolved one, after the model failed.
    ///
    /// Every group that ran or moved in them returns to the queue and is recomputed from its
    /// tokens, in the old order.
    ///
    /// Args:
    ///     step_id: Id of either step.
    ///
    /// Raises:
    ///     ``StepError``: Neither step has this id.
    fn abandon(&self, py: Python<'_>, step_id: u64) -> PyResult<()> {
        let abandon = |state: &mut State| {
            state.core.abandon(step_id)?;
            state.note(|log| log.abandon(step_id));
            Ok::<_, Error>(())
        };
        self.0.act(py, State::work_of_inputs, abandon)
    }
}

impl State {
    /// Cost of a step: every group may be considered, and prompts are looked up token by token.
    fn work_of_schedule(&self) -> Work {
        let queues = self.core.queues();
        let num_groups = queues.waiting.len() + queues.running.len() + queues.swapped.len();
        let first =
            queues.waiting.front().and_then(|group| self.core.store().find_group(*group).ok());
        let longest = first.and_then(|group| self.core.sequence(group.seqs[0]).ok());
        Work::rows(num_groups).and(Work::numbers(&[longest.map_or(0, Sequence::len)]))
    }

    /// Cost of the inputs: tokens and block tables.
    fn work_of_inputs(&self) -> Work {
        let outputs = self.core.outputs();
        let tables = Work::numbers(&[outputs.rows.len(), outputs.max_num_blocks]);
        Work::rows(outputs.rows.len()).and(tables).and(Work::numbers(&[outputs.num_batched_tokens]))
    }

    /// Cost of an update: rows, and the blocks of those that end.
    fn work_of_update(&self, results: &core::SampledOutputs<'_>) -> Work {
        let outputs = self.core.outputs();
        let num_ended = results.finish.iter().filter(|finish| **finish != 0).count();
        let freed = Work::numbers(&[num_ended, outputs.max_num_blocks, 16]);
        Work::rows(outputs.rows.len().max(results.finish.len())).and(freed)
    }
}
