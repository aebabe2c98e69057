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

    fn begin_step(&mut self) {
        self.0.begin_step();
    }

    fn can_allocate(&self, group: i64) -> PyResult<&'static str> {
        self.0.can_allocate(Handle::from_bits(group)).map(status_name).or_raise()
    }

    fn allocate(&mut self, group: i64) -> PyResult<()> {
        self.0.allocate(Handle::from_bits(group)).or_raise()
    }

    fn append_token(&mut self, seq: i64, token_id: TokenId) -> PyResult<()> {
        self.0.append_token(Handle::from_bits(seq), token_id).or_raise()
    }

    fn mark_computed(&mut self, seq: i64, num_tokens: usize) -> PyResult<()> {
        self.0.mark_computed(Handle::from_bits(seq), num_tokens).or_raise()
    }

    fn can_append_slots(&self, group: i64) -> PyResult<bool> {
        self.0.can_append_slots(Handle::from_bits(group)).or_raise()
    }

    fn append_slots<'py>(&mut self, py: Python<'py>, group: i64) -> PyResult<Pairs<'py>> {
        pair_array(py, &self.0.append_slots(Handle::from_bits(group)).or_raise()?)
    }

    fn fork(&mut self, seq: i64) -> PyResult<i64> {
        self.0.fork(Handle::from_bits(seq)).map(Handle::to_bits).or_raise()
    }

    fn can_swap_out(&self, group: i64) -> PyResult<bool> {
        self.0.can_swap_out(Handle::from_bits(group)).or_raise()
    }

    fn swap_out<'py>(&mut self, py: Python<'py>, group: i64) -> PyResult<Pairs<'py>> {
        pair_array(py, &self.0.swap_out(Handle::from_bits(group)).or_raise()?)
    }

    fn can_swap_in(&self, group: i64) -> PyResult<&'static str> {
        self.0.can_swap_in(Handle::from_bits(group)).map(status_name).or_raise()
    }

    fn swap_in<'py>(&mut self, py: Python<'py>, group: i64) -> PyResult<Pairs<'py>> {
        pair_array(py, &self.0.swap_in(Handle::from_bits(group)).or_raise()?)
    }

    fn free(&mut self, seq: i64) -> PyResult<()> {
        self.0.free(Handle::from_bits(seq)).or_raise()
    }

    fn reset_prefix_cache(&mut self) -> bool {
        self.0.reset_prefix_cache()
    }

    fn num_computed_tokens(&self, seq: i64) -> PyResult<usize> {
        Ok(self.0.sequence(Handle::from_bits(seq)).or_raise()?.num_computed_tokens)
    }

    fn last_access(&self, seq: i64) -> PyResult<u64> {
        Ok(self.0.sequence(Handle::from_bits(seq)).or_raise()?.last_step)
    }

    fn block_table<'py>(&self, py: Python<'py>, seq: i64) -> PyResult<Bound<'py, PyArray1<i32>>> {
        let table = &self.0.sequence(Handle::from_bits(seq)).or_raise()?.table;
        Ok(block_array(py, (0..table.len()).map(|index| table.block(index))))
    }

    fn cross_block_table<'py>(
        &self,
        py: Python<'py>,
        group: i64,
    ) -> PyResult<Bound<'py, PyArray1<i32>>> {
        let group = self.0.group(Handle::from_bits(group)).or_raise()?;
        Ok(block_array(py, group.cross_table.blocks().iter().copied()))
    }

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

    #[getter]
    fn num_free_gpu_blocks(&self) -> usize {
        self.0.space().gpu().num_free()
    }

    #[getter]
    fn num_free_cpu_blocks(&self) -> usize {
        self.0.space().cpu().num_free()
    }

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
