//! Allocators and evictor as separate classes, for other block managers.
//!
//! The core's allocators trust their one caller; here every block number is checked first.

use pagedserve_core::block as core;
use pagedserve_core::error::Error;
use pagedserve_core::hash::PrefixKey;
use pagedserve_core::ids::{BlockId, TokenId};
use pyo3::prelude::*;

use crate::arrays::readonly;
use crate::config::count;
use crate::error::OrRaise;

/// Allocator of reference-counted blocks without prefix caching.
#[pyclass(module = "pagedserve._core")]
pub(crate) struct UncachedBlockAllocator(core::UncachedBlockAllocator);

#[pymethods]
impl UncachedBlockAllocator {
    #[new]
    fn new(num_blocks: i64) -> PyResult<Self> {
        let num_blocks = num_of_blocks(num_blocks)?;
        core::check_memory(num_blocks, 0).or_raise()?;
        Ok(Self(core::UncachedBlockAllocator::new(num_blocks)))
    }

    /// Take a free block.
    ///
    /// Returns:
    ///     Block number, or None if all are used.
    fn allocate(&mut self) -> Option<usize> {
        self.0.allocate().map(BlockId::index)
    }

    /// Take one more reference to a used block.
    ///
    /// Raises:
    ///     ``RequestError``: No such block, or a free one.
    fn fork(&mut self, block: i64) -> PyResult<()> {
        self.0.fork(self.used(block)?);
        Ok(())
    }

    /// Release one reference; the last one frees the block.
    ///
    /// Raises:
    ///     ``RequestError``: No such block, or a free one.
    fn free(&mut self, block: i64) -> PyResult<()> {
        self.0.free(self.used(block)?);
        Ok(())
    }

    /// Return the number of references to a block, 0 for a free one.
    ///
    /// Raises:
    ///     ``RequestError``: No such block.
    fn ref_count(&self, block: i64) -> PyResult<u32> {
        Ok(self.0.ref_count(block_of(block, self.0.num_total())?))
    }

    /// Number of blocks without references.
    #[getter]
    fn num_free(&self) -> usize {
        self.0.num_free()
    }

    /// Number of all blocks.
    #[getter]
    fn num_total(&self) -> usize {
        self.0.num_total()
    }
}

impl UncachedBlockAllocator {
    fn used(&self, block: i64) -> PyResult<BlockId> {
        let id = block_of(block, self.0.num_total())?;
        expect(self.0.ref_count(id) > 0, || format!("block {block} is free; it must be used"))?;
        Ok(id)
    }
}

/// Prefix of whole blocks, a key of `CachedBlockAllocator`.
#[pyclass(frozen, module = "pagedserve._core")]
pub(crate) struct Prefix(core::Prefix);

#[pymethods]
impl Prefix {
    /// Return the prefix before the first block.
    ///
    /// Args:
    ///     adapter: Adapter id; prefixes of different adapters are never equal.
    ///     salt: Cache salt; prefixes of different salts are never equal.
    #[staticmethod]
    #[pyo3(signature = (*, adapter = 0, salt = 0))]
    fn root(adapter: u32, salt: u64) -> Self {
        Self(core::Prefix::root(PrefixKey { adapter, salt }))
    }
}

/// Allocator of reference-counted blocks with prefix caching.
///
/// A free block keeps its contents until it is evicted.
#[pyclass(module = "pagedserve._core")]
pub(crate) struct CachedBlockAllocator {
    core: core::CachedBlockAllocator,
    block_size: usize,
}

#[pymethods]
impl CachedBlockAllocator {
    #[new]
    fn new(num_blocks: i64, block_size: i64) -> PyResult<Self> {
        let block_size = count("block_size", block_size)?;
        expect(block_size > 0, || "block_size is 0; it must be at least 1".to_owned())?;
        let num_blocks = num_of_blocks(num_blocks)?;
        core::check_memory(num_blocks, block_size).or_raise()?;
        let core = core::CachedBlockAllocator::new(num_blocks, block_size, false);
        Ok(Self { core, block_size })
    }

    /// Take a free block and drop its contents: blank ones first, then the least recent.
    ///
    /// Args:
    ///     num_prefix_tokens: Tokens up to the end of the block; of equally old blocks the one with
    ///         the longest prefix is evicted first.
    ///
    /// Returns:
    ///     Block number, or None if all are used.
    #[pyo3(signature = (num_prefix_tokens = 0))]
    fn allocate(&mut self, num_prefix_tokens: usize) -> Option<usize> {
        self.core.allocate(num_prefix_tokens).map(BlockId::index)
    }

    /// Find the block that holds these tokens after a prefix, compared token by token.
    ///
    /// Args:
    ///     before: Prefix up to its start.
    ///     token_ids: int32 ``[1..block_size]``.
    ///
    /// Returns:
    ///     Block number, or None.
    fn find(&self, before: &Prefix, token_ids: &Bound<'_, PyAny>) -> PyResult<Option<usize>> {
        let token_ids = readonly::<TokenId>(token_ids, "token_ids")?;
        Ok(self.core.find(before.0, token_ids.as_slice()?).map(BlockId::index))
    }

    /// Take one more reference to a block that `find` returned, used or free.
    ///
    /// Raises:
    ///     ``RequestError``: No such block, or one that is free and holds nothing.
    fn acquire(&mut self, block: i64) -> PyResult<()> {
        let id = block_of(block, self.core.num_total())?;
        let is_known = self.core.ref_count(id) > 0 || self.core.prefix_of(id).is_some();
        expect(is_known, || format!("block {block} is free and holds nothing; allocate one"))?;
        self.core.acquire_found(id);
        Ok(())
    }

    /// Register the contents of a used block.
    ///
    /// Args:
    ///     block: Block number.
    ///     before: Prefix up to its start.
    ///     token_ids: int32 ``[1..block_size]``.
    ///
    /// Returns:
    ///     Prefix up to the end of the block.
    ///
    /// Raises:
    ///     ``RequestError``: A free block, too many tokens, or a prefix that another block holds.
    fn register(
        &mut self,
        block: i64,
        before: &Prefix,
        token_ids: &Bound<'_, PyAny>,
    ) -> PyResult<Prefix> {
        let id = self.used(block)?;
        let token_ids = readonly::<TokenId>(token_ids, "token_ids")?;
        let token_ids = token_ids.as_slice()?;
        expect((1..=self.block_size).contains(&token_ids.len()), || {
            format!("{} tokens for a block of 1 to {}", token_ids.len(), self.block_size)
        })?;
        let known = self.core.find(before.0, token_ids);
        expect(known.is_none_or(|known| known == id), || {
            format!("block {} holds this prefix already", known.map_or(0, BlockId::index))
        })?;
        Ok(Prefix(self.core.register(id, before.0, token_ids)))
    }

    /// Return the prefix up to the end of a block, or None if it is not registered.
    ///
    /// Raises:
    ///     ``RequestError``: No such block.
    fn prefix_of(&self, block: i64) -> PyResult<Option<Prefix>> {
        Ok(self.core.prefix_of(block_of(block, self.core.num_total())?).map(Prefix))
    }

    /// Take one more reference to a used block.
    ///
    /// Raises:
    ///     ``RequestError``: No such block, or a free one.
    fn fork(&mut self, block: i64) -> PyResult<()> {
        let id = self.used(block)?;
        self.core.fork(id);
        Ok(())
    }

    /// Release one reference; the last one frees the block, which keeps its contents.
    ///
    /// Args:
    ///     block: Block number.
    ///     last_access: Time of its last use; the least recent is evicted first.
    ///
    /// Raises:
    ///     ``RequestError``: No such block, or a free one.
    #[pyo3(signature = (block, *, last_access = 0))]
    fn free(&mut self, block: i64, last_access: u64) -> PyResult<()> {
        let id = self.used(block)?;
        self.core.free(id, last_access);
        Ok(())
    }

    /// Mark the keys and values of a used block as computed.
    ///
    /// Raises:
    ///     ``RequestError``: No such block, or a free one.
    fn mark_computed(&mut self, block: i64) -> PyResult<()> {
        let id = self.used(block)?;
        self.core.mark_computed(id);
        Ok(())
    }

    /// Return whether the keys and values of a block are computed.
    ///
    /// Raises:
    ///     ``RequestError``: No such block.
    fn is_computed(&self, block: i64) -> PyResult<bool> {
        Ok(self.core.is_computed(block_of(block, self.core.num_total())?))
    }

    /// Return the number of references to a block, 0 for a free one.
    ///
    /// Raises:
    ///     ``RequestError``: No such block.
    fn ref_count(&self, block: i64) -> PyResult<u32> {
        Ok(self.core.ref_count(block_of(block, self.core.num_total())?))
    }

    /// Drop all cached contents.
    ///
    /// Returns:
    ///     True if dropped; False, without effect, while a block is used.
    fn reset(&mut self) -> bool {
        self.core.reset()
    }

    /// Number of blocks without references.
    #[getter]
    fn num_free(&self) -> usize {
        self.core.num_free()
    }

    /// Number of free blocks with cached contents.
    #[getter]
    fn num_cached(&self) -> usize {
        self.core.num_cached()
    }

    /// Number of all blocks.
    #[getter]
    fn num_total(&self) -> usize {
        self.core.num_total()
    }
}

impl CachedBlockAllocator {
    fn used(&self, block: i64) -> PyResult<BlockId> {
        let id = block_of(block, self.core.num_total())?;
        expect(self.core.ref_count(id) > 0, || format!("block {block} is free; it must be used"))?;
        Ok(id)
    }
}

/// Least-recently-used eviction order of free cached blocks.
#[pyclass(module = "pagedserve._core")]
pub(crate) struct LRUEvictor(core::LRUEvictor);

#[pymethods]
impl LRUEvictor {
    #[new]
    fn new() -> Self {
        Self(core::LRUEvictor::default())
    }

    /// Add a block to the eviction order.
    ///
    /// Args:
    ///     block: Block number, not yet added.
    ///     last_access: Time of its last use; the least recent is evicted first.
    ///     num_hashed_tokens: Tokens up to its end; of equally old blocks the longest goes first.
    ///
    /// Raises:
    ///     ``RequestError``: A block that was already added.
    fn add(&mut self, block: i64, last_access: u64, num_hashed_tokens: usize) -> PyResult<()> {
        let is_new = self.0.add(block_of(block, MAX_BLOCKS)?, last_access, num_hashed_tokens);
        expect(is_new, || format!("block {block} was already added"))
    }

    /// Remove a block that is used again.
    ///
    /// Raises:
    ///     ``RequestError``: A block that was not added.
    fn remove(&mut self, block: i64) -> PyResult<()> {
        let was_here = self.0.remove(block_of(block, MAX_BLOCKS)?);
        expect(was_here, || format!("block {block} was not added"))
    }

    /// Remove and return the next block to evict.
    ///
    /// Returns:
    ///     Block number, or None if empty.
    fn evict(&mut self) -> Option<usize> {
        self.0.evict().map(BlockId::index)
    }

    fn __contains__(&self, block: i64) -> bool {
        block_of(block, MAX_BLOCKS).is_ok_and(|block| self.0.contains(block))
    }

    fn __len__(&self) -> usize {
        self.0.len()
    }
}

const MAX_BLOCKS: usize = i32::MAX as usize;

fn num_of_blocks(num_blocks: i64) -> PyResult<usize> {
    let num_blocks = count("num_blocks", num_blocks)?;
    expect(num_blocks <= MAX_BLOCKS, || {
        format!("num_blocks is {num_blocks}; it must be at most {MAX_BLOCKS}")
    })?;
    Ok(num_blocks)
}

/// Checks a block number from Python.
fn block_of(block: i64, num_total: usize) -> PyResult<BlockId> {
    let index = u32::try_from(block).ok().filter(|index| (*index as usize) < num_total);
    let refusal = || Error::Request(format!("there is no block {block} among {num_total}"));
    index.map(BlockId::new).ok_or_else(refusal).or_raise()
}

fn expect(holds: bool, refusal: impl FnOnce() -> String) -> PyResult<()> {
    if holds { Ok(()) } else { Err(Error::Request(refusal())).or_raise() }
}
