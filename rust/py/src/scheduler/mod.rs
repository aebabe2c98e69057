//! The `Scheduler` class: its state, its requests and its log.

mod look;
mod step;

use std::io;
use std::path::PathBuf;

use pagedserve_core::arena::Handle;
use pagedserve_core::error::Error;
use pagedserve_core::hash::PrefixKey;
use pagedserve_core::log::DecisionLog;
use pagedserve_core::scheduler as core;
use pagedserve_core::sequence::{GroupHandle, Request, Sequence};
use pyo3::prelude::*;

use crate::arrays::readonly;
use crate::config::{CacheConfig, SchedulerConfig, count, count_or};
use crate::error::OrRaise;
use crate::gateway::{Locked, Work};
use crate::log_files::LogFiles;
use crate::outputs::GroupStats;

/// Scheduler of sequences and their KV blocks, step by step.
///
/// Requests come in with `add_seq_group`.  A step is `schedule`, `prepare_inputs`, the model, and
/// `update` with the sampled tokens; `abandon` replaces `update` if the model failed.
/// Between `schedule` and the end of its step the step is *open*, unless it was empty.
///
/// Groups (the sequences of a request) and sequences are named by handles, opaque integers.  A
/// handle dies with the object it names and is never reused; a late call with one raises
/// ``StaleHandleError``.  A call that raises has changed nothing.  Equal calls lead to equal
/// decisions: the clock is an argument.
///
/// Any thread may call; a call waits while another thread computes.  Calls that take more than
/// some 20 us run without the GIL.
///
/// Args:
///     scheduler_config: Limits and choices.
///     cache_config: KV blocks.
///     log: File of the decision log, one JSON line per step, which
///         ``python -m pagedserve.replay`` replays.  In a directory the log is written to several
///         files of ``log_max_bytes`` in total; the oldest are deleted.
///     log_max_bytes: Bytes of all logs in that directory; a file has a sixteenth of them.
///
/// Raises:
///     ``ConfigError``: Configurations that contradict each other.
///     ``OSError``: A log that cannot be written.
///
/// Example:
///     >>> import numpy as np
///     >>> from pagedserve.scheduler import CacheConfig, InputBuffers, Scheduler, SchedulerConfig
///     >>> scheduler = Scheduler(
///     ...     SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=64, max_model_len=32),
///     ...     CacheConfig(block_size=4, num_gpu_blocks=32),
///     ... )
///     >>> prompt = np.array([11, 12, 13], np.int32)
///     >>> group, seq = scheduler.add_seq_group(prompt, arrival_time=0.0)
///     >>> step = scheduler.schedule(0.0)
///     >>> step.num_rows, step.num_batched_tokens, step.num_samples
///     (1, 3, 1)
///     >>> arrays = {
///     ...     "token_ids": np.zeros(64, np.int32),
///     ...     "positions": np.zeros(64, np.int64),
///     ...     "slot_mapping": np.zeros(64, np.int64),
///     ...     "query_start": np.zeros(5, np.int32),
///     ...     "seq_lens": np.zeros(4, np.int32),
///     ...     "block_tables": np.zeros(4 * 8, np.int32),
///     ...     "sample_index": np.zeros(4, np.int32),
///     ...     "sample_rows": np.zeros(4, np.int32),
///     ...     "row_handles": np.zeros(4, np.int64),
///     ... }
///     >>> scheduler.prepare_inputs(InputBuffers(**arrays))
///     >>> arrays["token_ids"][: step.num_batched_tokens].tolist()
///     [11, 12, 13]
///     >>> rows = arrays["sample_rows"][: step.num_samples]
///     >>> token_start, tokens = np.array([0, 1], np.int32), np.array([7], np.int32)
///     >>> finish = np.array([0], np.uint8)
///     >>> handles, ended = scheduler.update(step.step_id, rows, token_start, tokens, finish)
///     >>> handles.tolist() == [seq], ended
///     (True, [])
///     >>> scheduler.token_ids(seq).tolist()
///     [11, 12, 13, 7]
#[pyclass(frozen, module = "pagedserve._core")]
pub(crate) struct Scheduler(Locked<State>);

/// Scheduler and its log.
struct State {
    core: core::Scheduler,
    log: Option<DecisionLog<LogFiles>>,
}

#[pymethods]
impl Scheduler {
    #[new]
    #[pyo3(signature = (
        scheduler_config, cache_config, *, log = None, log_max_bytes = LogFiles::DEFAULT_MAX_BYTES
    ))]
    fn new(
        scheduler_config: &SchedulerConfig,
        cache_config: &CacheConfig,
        log: Option<PathBuf>,
        log_max_bytes: u64,
    ) -> PyResult<Self> {
        let (scheduler, cache) = (&scheduler_config.0, &cache_config.0);
        let core = core::Scheduler::new(scheduler.clone(), cache).or_raise()?;
        let log = match log {
            Some(path) => {
                let named = |error: io::Error| {
                    io::Error::new(error.kind(), format!("log {}: {error}", path.display()))
                };
                let files = LogFiles::create(&path, log_max_bytes).map_err(named)?;
                Some(DecisionLog::new(files, scheduler, cache))
            }
            None => None,
        };
        Ok(Self(Locked::new(State { core, log })))
    }

    /// Queue a request.
    ///
    /// Args:
    ///     token_ids: Prompt, int32 ``[L]`` with at least one token; copied.
    ///     arrival_time: Time in seconds of the caller's clock.
    ///     max_num_running_seqs: Maximum number of live sequences: parallel samples or beams.
    ///     priority: Priority, smallest first; used only by the priority policy.
    ///     adapter: Adapter id, 0 for none; it takes one of ``max_loras`` slots.
    ///     salt: Cache salt; prefixes are shared only between equal adapters and salts.  With
    ///         prefix caching a request with an encoder needs one that identifies the encoder's
    ///         input.
    ///     num_encoder_tokens: Tokens of the encoder's output, for cross attention; 0 for a
    ///         decoder-only model.
    ///     can_regrow: Whether forks may replace ended sequences, as in beam search; the group then
    ///         keeps its whole budget of sequences.
    ///     branches: Token ids that continue the prompt, int32 ``[B]`` each, one array for each
    ///         sequence that the group starts with; empty for one sequence of the prompt alone.
    ///         The sequences share the full blocks of what they have in common, which is computed
    ///         once, and are sampled in one step.
    ///     request_id: Name of the request in the decision log; no effect on decisions.
    ///
    /// Returns:
    ///     Handles of the group and of its first sequence; `seqs_of` returns the others.
    ///
    /// Raises:
    ///     ``RequestError``: An empty prompt, a negative token, an arrival time that is no time,
    ///         more sequences than may run, an adapter where none are configured, or an encoder
    ///         without a salt where prefixes are shared.
    #[pyo3(signature = (
        token_ids, *, arrival_time, max_num_running_seqs = 1, priority = 0, adapter = 0, salt = 0,
        num_encoder_tokens = 0, can_regrow = false, branches = Vec::new(), request_id = "",
    ))]
    #[expect(clippy::too_many_arguments, reason = "keywords in Python")]
    #[expect(clippy::needless_pass_by_value, reason = "extracted from a list")]
    fn add_seq_group(
        &self,
        token_ids: &Bound<'_, PyAny>,
        arrival_time: f64,
        max_num_running_seqs: i64,
        priority: i64,
        adapter: u32,
        salt: u64,
        num_encoder_tokens: i64,
        can_regrow: bool,
        branches: Vec<Bound<'_, PyAny>>,
        request_id: &str,
    ) -> PyResult<(i64, i64)> {
        let py = token_ids.py();
        let token_ids = readonly(token_ids, "token_ids")?;
        let branches: Vec<_> = branches
            .iter()
            .map(|branch| readonly::<i32>(branch, "a branch"))
            .collect::<PyResult<_>>()?;
        let branches: Vec<&[i32]> =
            branches.iter().map(|branch| branch.as_slice()).collect::<Result<_, _>>()?;
        let mut request = Request::new(token_ids.as_slice()?, arrival_time);
        request.max_num_running_seqs = count("max_num_running_seqs", max_num_running_seqs)?;
        request.can_regrow = can_regrow;
        request.branches = &branches;
        request.priority = priority;
        request.key = PrefixKey { adapter, salt };
        request.num_encoder_tokens = count("num_encoder_tokens", num_encoder_tokens)?;
        request.request_id = request_id;
        let lengths = branches.iter().map(|branch| request.prompt.len() + branch.len());
        let work = Work::numbers(&[request.prompt.len().max(lengths.sum())]);
        let add = |state: &mut State| {
            let (group, seq) = state.core.add_seq_group(&request)?;
            state.note(|log| log.add(group, &request));
            Ok::<_, Error>((group.to_bits(), seq.to_bits()))
        };
        self.0.act(py, |_| work, add)
    }

    /// Abort a group in any state.
    ///
    /// Its blocks are freed at once, or at the end of the open step.  `update` accepts results with
    /// or without its rows of the open step.
    ///
    /// Returns:
    ///     Statistics of the group; None if it has already ended.
    fn abort(&self, py: Python<'_>, group: i64) -> PyResult<Option<GroupStats>> {
        let group = Handle::from_bits(group);
        let abort = |state: &mut State| {
            let stats = state.core.abort(group);
            if stats.is_some() {
                state.note(|log| log.abort(group));
            }
            Ok::<_, Error>(stats.map(GroupStats))
        };
        self.0.act(py, |state| state.work_of_group(group), abort)
    }

    /// Return the statistics of a live group.
    ///
    /// Raises:
    ///     ``StaleHandleError``: The group has ended.
    fn group_stats(&self, py: Python<'_>, group: i64) -> PyResult<GroupStats> {
        let group = Handle::from_bits(group);
        self.0.look(py, |state| state.core.group_stats(group)).map(GroupStats).or_raise()
    }

    /// Return why a prompt of ``num_tokens`` tokens can never run, or None if it can.
    ///
    /// Args:
    ///     num_tokens: Tokens of the prompt of a decoder-only model.
    ///
    /// Returns:
    ///     A sentence without its subject, such as "has 40 tokens; max_model_len is 32, so at
    ///     most 31 leave space for a new one"; None if such a prompt can run.
    ///
    /// Raises:
    ///     ``RequestError``: A negative number.
    fn prompt_refusal(&self, py: Python<'_>, num_tokens: i64) -> PyResult<Option<String>> {
        let num_tokens = count_or(Error::Request, "num_tokens", num_tokens)?;
        let refusal = self.0.look(py, |state| state.core.prompt_refusal(num_tokens));
        Ok(refusal.map(|refusal| refusal.to_string()))
    }

    /// Drop every cached prefix.
    ///
    /// Returns:
    ///     True if dropped; False, without effect, while a block is used.
    fn reset_prefix_cache(&self, py: Python<'_>) -> PyResult<bool> {
        let reset = |state: &mut State| {
            let is_reset = state.core.reset_prefix_cache();
            if is_reset {
                state.note(DecisionLog::reset_prefix_cache);
            }
            Ok::<_, Error>(is_reset)
        };
        self.0.act(py, |_| Work::LONG, reset)
    }

    /// Flush the decision log to its file, events since the last step included.
    fn flush_log(&self, py: Python<'_>) -> PyResult<()> {
        let flush = |state: &mut State| {
            state.note(DecisionLog::flush);
            Ok::<_, Error>(())
        };
        self.0.act(py, |_| Work::LONG, flush)
    }

    /// Error that ended the decision log, such as a full disk; None without one.
    #[getter]
    fn log_error(&self, py: Python<'_>) -> Option<String> {
        self.0.look(py, |state| state.log.as_ref()?.error().map(ToString::to_string))
    }
}

impl State {
    /// Writes to the log, if one is open.
    fn note(&mut self, note: impl FnOnce(&mut DecisionLog<LogFiles>)) {
        if let Some(log) = &mut self.log {
            note(log);
        }
    }

    /// Cost of ending a group: its blocks are freed one by one.
    fn work_of_group(&self, group: GroupHandle) -> Work {
        let seqs = self.core.store().find_group(group).map_or(&[][..], |group| &group.seqs);
        let num_tokens = |seq| self.core.sequence(seq).map_or(0, Sequence::len);
        let num_tokens: usize = seqs.iter().map(|seq| num_tokens(*seq)).sum();
        Work::rows(seqs.len()).and(Work::numbers(&[num_tokens]))
    }
}
