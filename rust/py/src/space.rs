//! `BlockSpaceManager` as a separate class, for other schedulers.

use numpy::{PyArray1, PyArray2};
use pagedserve_core::arena::Handle;
use pagedserve_core::hash::PrefixKey;
use pagedserve_core::ids::TokenId;
use pagedserve_core::sequence::Request;
use pagedserve_core::space::{AllocStatus, StandaloneSpace};
use pyo3::prelude::*;

use crate::arrays::{block_array, pair_array, readonly, table_blocks};
use crate::config::{CacheConfig, count};
use crate::error::OrRaise;
use crate::outputs::BlockMoves;

/// Block tables of groups that the caller schedules.
#[pyclass(module = "pagedserve._core")]
pub(crate) struct BlockSpaceManager(StandaloneSpace);

type Pairs<'py> = Bound<'py, PyArray2<i64>>;

#[pymethods]
impl BlockSpaceManager {
    #[new]
    #[pyo3(signature = (cache_config, *, num_lookahead_slots = 0))]
    fn new(cache_config: &CacheConfig, num_lookahead_slots: i64) -> PyResult<Self> {
        let num_lookahead_slots = count("num_lookahead_slots", num_lookahead_slots)?;
        StandaloneSpace::new(&cache_config.0, num_lookahead_slots).map(Self).or_raise()
    }

    /// Add a group without blocks.
    ///
    /// Args:
    ///     token_ids: Prompt, int32 ``[L]``; copied.
    ///     max_num_running_seqs: Maximum number of live sequences.
    ///     adapter: Adapter id; prefixes are shared only between equal adapters and salts.
    ///     salt: Cache salt; see ``adapter``.
    ///     num_encoder_tokens: Tokens of the encoder's output; 0 for a decoder-only model.
    ///
    /// Returns:
    ///     Handles of the group and of its first sequence.
    ///
    /// Raises:
    ///     ``RequestError``: An empty prompt, a negative token, no sequence, or an encoder without
    ///         a salt where prefixes are shared.
    #[pyo3(signature = (
        token_ids, *, max_num_running_seqs = 1, adapter = 0, salt = 0, num_encoder_tokens = 0
    ))]
    fn add_seq_group(
        &mut self,
        token_ids: &Bound<'_, PyAny>,
        max_num_running_seqs: usize,
        adapter: u32,
        salt: u64,
        num_encoder_tokens: usize,
    ) -> PyResult<(i64, i64)> {
        let token_ids = readonly(token_ids, "token_ids")?;
        let mut request = Request::new(token_ids.as_slice()?, 0.0);
        request.max_num_running_seqs = max_num_running_seqs;
        request.key = PrefixKey { adapter, salt };
        request.num_encoder_tokens = num_encoder_tokens;
        let (group, seq) = self.0.add_group(&request).or_raise()?;
        Ok((group.to_bits(), seq.to_bits()))
    }

    /// Begin the decisions of the next step.
    fn begin_step(&mut self) {
        self.0.begin_step();
    }

    /// Return whether a waiting group can be given blocks: "ok", "later" or "never".
    ///
    /// Raises:
    ///     ``StaleHandleError``: The group has ended.
    fn can_allocate(&self, group: i64) -> PyResult<&'static str> {
        self.0.can_allocate(Handle::from_bits(group)).map(status_name).or_raise()
    }

    /// Allocate blocks for the prompt of a group, after its cached prefix.
    ///
    /// Raises:
    ///     ``StepError``: `can_allocate` does not return "ok".
    ///     ``StaleHandleError``: The group has ended.
    fn allocate(&mut self, group: i64) -> PyResult<()> {
        self.0.allocate(Handle::from_bits(group)).or_raise()
    }

    /// Append a token to a sequence.
    ///
    /// Raises:
    ///     ``RequestError``: A negative token.
    ///     ``StepError``: The sequence has no slot for its newest token.
    ///     ``StaleHandleError``: The sequence has ended.
    fn append_token(&mut self, seq: i64, token_id: TokenId) -> PyResult<()> {
        self.0.append_token(Handle::from_bits(seq), token_id).or_raise()
    }

    /// Mark the next ``num_tokens`` tokens of a sequence as computed.
    ///
    /// Raises:
    ///     ``StepError``: More tokens than the sequence has.
    ///     ``StaleHandleError``: The sequence has ended.
    fn mark_computed(&mut self, seq: i64, num_tokens: usize) -> PyResult<()> {
        self.0.mark_computed(Handle::from_bits(seq), num_tokens).or_raise()
    }

    /// Return whether every sequence of a group can get slots for its next token and lookahead.
    ///
    /// Raises:
    ///     ``StaleHandleError``: The group has ended.
    fn can_append_slots(&self, group: i64) -> PyResult<bool> {
        self.0.can_append_slots(Handle::from_bits(group)).or_raise()
    }

    /// Allocate slots for the next token and lookahead of every sequence of a group.
    ///
    /// A shared last block is replaced by a copy.
    ///
    /// Returns:
    ///     Copies to make first, int64 ``[n, 2]`` (source, destination).
    ///
    /// Raises:
    ///     ``StepError``: `can_append_slots` returns False.
    ///     ``StaleHandleError``: The group has ended.
    fn append_slots<'py>(&mut self, py: Python<'py>, group: i64) -> PyResult<Pairs<'py>> {
        pair_array(py, &self.0.append_slots(Handle::from_bits(group)).or_raise()?)
    }

    /// Fork a sequence: the child has its tokens and shares its blocks.
    ///
    /// Returns:
    ///     Handle of the child.
    ///
    /// Raises:
    ///     ``StepError``: The sequence has no device blocks.
    ///     ``StaleHandleError``: The sequence has ended.
    fn fork(&mut self, seq: i64) -> PyResult<i64> {
        self.0.fork(Handle::from_bits(seq)).map(Handle::to_bits).or_raise()
    }

    /// Return whether the host has enough free blocks for a group.
    ///
    /// Raises:
    ///     ``StaleHandleError``: The group has ended.
    fn can_swap_out(&self, group: i64) -> PyResult<bool> {
        self.0.can_swap_out(Handle::from_bits(group)).or_raise()
    }

    /// Move the blocks of a group to the host.
    ///
    /// Returns:
    ///     Moves to make, int64 ``[n, 2]`` (device, host).
    ///
    /// Raises:
    ///     ``StepError``: `can_swap_out` returns False.
    ///     ``StaleHandleError``: The group has ended.
    fn swap_out<'py>(&mut self, py: Python<'py>, group: i64) -> PyResult<Pairs<'py>> {
        pair_array(py, &self.0.swap_out(Handle::from_bits(group)).or_raise()?)
    }

    /// Return whether a swapped group can be swapped in: "ok", "later" or "never".
    ///
    /// Raises:
    ///     ``StaleHandleError``: The group has ended.
    fn can_swap_in(&self, group: i64) -> PyResult<&'static str> {
        self.0.can_swap_in(Handle::from_bits(group)).map(status_name).or_raise()
    }

    /// Move the blocks of a group back to the device.
    ///
    /// Returns:
    ///     Moves to make, int64 ``[n, 2]`` (host, device).
    ///
    /// Raises:
    ///     ``StepError``: `can_swap_in` does not return "ok".
    ///     ``StaleHandleError``: The group has ended.
    fn swap_in<'py>(&mut self, py: Python<'py>, group: i64) -> PyResult<Pairs<'py>> {
        pair_array(py, &self.0.swap_in(Handle::from_bits(group)).or_raise()?)
    }

    /// End a sequence and free its blocks; the group ends with its last sequence.
    ///
    /// Raises:
    ///     ``StaleHandleError``: The sequence has ended.
    fn free(&mut self, seq: i64) -> PyResult<()> {
        self.0.free(Handle::from_bits(seq)).or_raise()
    }

    /// Drop every cached prefix.
    ///
    /// Returns:
    ///     True if dropped; False, without effect, while a block is used.
    fn reset_prefix_cache(&mut self) -> bool {
        self.0.reset_prefix_cache()
    }

    /// Return the number of leading tokens of a sequence that are computed.
    ///
    /// Raises:
    ///     ``StaleHandleError``: The sequence has ended.
    fn num_computed_tokens(&self, seq: i64) -> PyResult<usize> {
        Ok(self.0.sequence(Handle::from_bits(seq)).or_raise()?.num_computed_tokens)
    }

    /// Return the last step that used a sequence.
    ///
    /// Raises:
    ///     ``StaleHandleError``: The sequence has ended.
    fn last_access(&self, seq: i64) -> PyResult<u64> {
        Ok(self.0.sequence(Handle::from_bits(seq)).or_raise()?.last_step)
    }

    /// Moves of the last call that made any, in the pool of each KV group.
    ///
    /// The first entry has what that call returned.
    #[getter]
    fn moves(&self) -> Vec<BlockMoves> {
        BlockMoves::all(self.0.moves())
    }

    /// Return the physical blocks of a sequence in a KV group, int32.
    ///
    /// In the first group by logical block; in another the first block is the first that a later
    /// query sees.
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
        let seq = self.0.sequence(Handle::from_bits(seq)).or_raise()?;
        Ok(block_array(py, table_blocks(seq, kv_group)?))
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
        self.0.group(group).or_raise()?;
        let blocks = self.0.space().common_computed_blocks(self.0.store(), group);
        Ok(block_array(py, blocks.iter().copied()))
    }

    /// Number of free device blocks.
    #[getter]
    fn num_free_gpu_blocks(&self) -> usize {
        self.0.space().gpu().num_free()
    }

    /// Number of free host blocks.
    #[getter]
    fn num_free_cpu_blocks(&self) -> usize {
        self.0.space().cpu().num_free()
    }

    /// Number of device blocks kept free when a new group is admitted.
    #[getter]
    fn watermark_blocks(&self) -> usize {
        self.0.space().gpu().num_total() - self.0.space().num_usable_blocks()
    }
}

fn status_name(status: AllocStatus) -> &'static str {
    match status {
        AllocStatus::Ok => "ok",
        AllocStatus::Later => "later",
        AllocStatus::Never => "never",
    }
}
