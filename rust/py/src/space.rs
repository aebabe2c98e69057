//! `BlockSpaceManager` as a class of its own, for schedulers other than ours.

use numpy::{PyArray1, PyArray2};
use pagedserve_core::arena::Handle;
use pagedserve_core::hash::PrefixKey;
use pagedserve_core::ids::TokenId;
use pagedserve_core::sequence::Request;
use pagedserve_core::space::{AllocStatus, StandaloneSpace};
use pyo3::prelude::*;

use crate::arrays::{block_array, pair_array, readonly};
use crate::config::{CacheConfig, count};
use crate::error::OrRaise;

/// Block tables of groups that somebody else schedules.
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

    /// Make a group known, without blocks.
    ///
    /// Args:
    ///     token_ids: int32 ``[L]``, its prompt; copied.
    ///     max_num_running_seqs: The most sequences alive at once.
    ///     adapter: Prefixes are shared among equal adapters and salts alone.
    ///     salt: As the adapter.
    ///     num_encoder_tokens: Tokens of the encoder's output; 0 for a decoder alone.
    ///
    /// Returns:
    ///     The handles of the group and of its first sequence.
    ///
    /// Raises:
    ///     ``RequestError``: An empty prompt, a negative token, no sequence, or an encoder without a
    ///         salt where prefixes are shared.
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
        let request = Request {
            max_num_running_seqs,
            key: PrefixKey { adapter, salt },
            num_encoder_tokens,
            ..Request::new(token_ids.as_slice()?, 0.0)
        };
        let (group, seq) = self.0.add_group(&request).or_raise()?;
        Ok((group.to_bits(), seq.to_bits()))
    }

    /// Begin the decisions of the next step.
    fn begin_step(&mut self) {
        self.0.begin_step();
    }

    /// Whether a group without blocks can have them: "ok", "later" or "never".
    ///
    /// Raises:
    ///     ``StaleHandleError``: The group has ended.
    fn can_allocate(&self, group: i64) -> PyResult<&'static str> {
        self.0.can_allocate(Handle::from_bits(group)).map(status_name).or_raise()
    }

    /// Give a group blocks for its prompt, behind what the prefix cache has of it.
    ///
    /// Raises:
    ///     ``StepError``: The answer of `can_allocate` is not "ok".
    ///     ``StaleHandleError``: The group has ended.
    fn allocate(&mut self, group: i64) -> PyResult<()> {
        self.0.allocate(Handle::from_bits(group)).or_raise()
    }

    /// Append a token to a sequence.
    ///
    /// Raises:
    ///     ``RequestError``: A negative token.
    ///     ``StaleHandleError``: The sequence has ended.
    fn append_token(&mut self, seq: i64, token_id: TokenId) -> PyResult<()> {
        self.0.append_token(Handle::from_bits(seq), token_id).or_raise()
    }

    /// Count the next ``num_tokens`` tokens of a sequence as computed.
    ///
    /// Raises:
    ///     ``StepError``: More than it has.
    ///     ``StaleHandleError``: The sequence has ended.
    fn mark_computed(&mut self, seq: i64, num_tokens: usize) -> PyResult<()> {
        self.0.mark_computed(Handle::from_bits(seq), num_tokens).or_raise()
    }

    /// Whether every sequence of a group can have the slots of its next token and the lookahead.
    ///
    /// Raises:
    ///     ``StaleHandleError``: The group has ended.
    fn can_append_slots(&self, group: i64) -> PyResult<bool> {
        self.0.can_append_slots(Handle::from_bits(group)).or_raise()
    }

    /// Give every sequence of a group these slots, in blocks of its own.
    ///
    /// Returns:
    ///     Copies to make first, int64 ``[n, 2]`` (source, destination).
    ///
    /// Raises:
    ///     ``StepError``: `can_append_slots` says no.
    ///     ``StaleHandleError``: The group has ended.
    fn append_slots<'py>(&mut self, py: Python<'py>, group: i64) -> PyResult<Pairs<'py>> {
        pair_array(py, &self.0.append_slots(Handle::from_bits(group)).or_raise()?)
    }

    /// Make a second sequence with the history and the blocks of one.
    ///
    /// Returns:
    ///     Its handle.
    ///
    /// Raises:
    ///     ``StepError``: The group has as many as it asked for.
    ///     ``StaleHandleError``: The sequence has ended.
    fn fork(&mut self, seq: i64) -> PyResult<i64> {
        self.0.fork(Handle::from_bits(seq)).map(Handle::to_bits).or_raise()
    }

    /// Whether the host has room for the blocks of a group.
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
    ///     ``StepError``: `can_swap_out` says no.
    ///     ``StaleHandleError``: The group has ended.
    fn swap_out<'py>(&mut self, py: Python<'py>, group: i64) -> PyResult<Pairs<'py>> {
        pair_array(py, &self.0.swap_out(Handle::from_bits(group)).or_raise()?)
    }

    /// Whether a group can come back: "ok", "later" or "never".
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
    ///     ``StepError``: The answer of `can_swap_in` is not "ok".
    ///     ``StaleHandleError``: The group has ended.
    fn swap_in<'py>(&mut self, py: Python<'py>, group: i64) -> PyResult<Pairs<'py>> {
        pair_array(py, &self.0.swap_in(Handle::from_bits(group)).or_raise()?)
    }

    /// End a sequence and take its blocks back; the group ends with its last.
    ///
    /// Raises:
    ///     ``StaleHandleError``: The sequence has ended.
    fn free(&mut self, seq: i64) -> PyResult<()> {
        self.0.free(Handle::from_bits(seq)).or_raise()
    }

    /// Forget every cached prefix.
    ///
    /// Returns:
    ///     Whether it was done; False, and nothing is forgotten, while a block is used.
    fn reset_prefix_cache(&mut self) -> bool {
        self.0.reset_prefix_cache()
    }

    /// Leading tokens of a sequence that are computed.
    ///
    /// Raises:
    ///     ``StaleHandleError``: The sequence has ended.
    fn num_computed_tokens(&self, seq: i64) -> PyResult<usize> {
        Ok(self.0.sequence(Handle::from_bits(seq)).or_raise()?.num_computed_tokens)
    }

    /// The last step in which a sequence was touched.
    ///
    /// Raises:
    ///     ``StaleHandleError``: The sequence has ended.
    fn last_access(&self, seq: i64) -> PyResult<u64> {
        Ok(self.0.sequence(Handle::from_bits(seq)).or_raise()?.last_step)
    }

    /// The physical blocks of a sequence by logical block, int32.
    ///
    /// Raises:
    ///     ``StaleHandleError``: The sequence has ended.
    fn block_table<'py>(&self, py: Python<'py>, seq: i64) -> PyResult<Bound<'py, PyArray1<i32>>> {
        let table = &self.0.sequence(Handle::from_bits(seq)).or_raise()?.table;
        Ok(block_array(py, (0..table.len()).map(|index| table.block(index))))
    }

    /// The physical blocks of a group's encoder, int32.
    ///
    /// Raises:
    ///     ``StaleHandleError``: The group has ended.
    fn cross_block_table<'py>(
        &self,
        py: Python<'py>,
        group: i64,
    ) -> PyResult<Bound<'py, PyArray1<i32>>> {
        let group = self.0.group(Handle::from_bits(group)).or_raise()?;
        Ok(block_array(py, group.cross_table.blocks().iter().copied()))
    }

    /// The leading blocks that all sequences of a group share and that are computed, int32.
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

    /// Device blocks that nobody uses.
    #[getter]
    fn num_free_gpu_blocks(&self) -> usize {
        self.0.space().gpu().num_free()
    }

    /// Host blocks that nobody uses.
    #[getter]
    fn num_free_cpu_blocks(&self) -> usize {
        self.0.space().cpu().num_free()
    }

    /// Device blocks kept free when a new group gets its blocks.
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
