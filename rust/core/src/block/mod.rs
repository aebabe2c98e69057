//! Physical KV blocks of one tier: their references and the order of allocation.
//!
//! Called by [`crate::space`] alone; independent of sequences.

mod cached;
mod evictor;
mod pool;
mod uncached;

pub use cached::{CachedBlockAllocator, Prefix};
pub use evictor::LRUEvictor;
pub use pool::BlockPool;
pub use uncached::UncachedBlockAllocator;

use std::hint::black_box;

use crate::error::{Error, Result};
use crate::ids::{BlockId, BlockPair, TokenId};

/// Bytes of a block without its tokens, at most.
const BLOCK_BYTES: usize = 128;

/// Refuses a pool for whose bookkeeping this machine cannot reserve the memory.  A block keeps
/// `num_tokens` tokens, 0 without prefix caching.
///
/// # Errors
/// [`Error::Config`] with both sizes.
pub fn check_memory(num_blocks: usize, num_tokens: usize) -> Result<()> {
    let num_bytes = (num_tokens.checked_mul(size_of::<TokenId>()))
        .and_then(|bytes| bytes.checked_add(BLOCK_BYTES)?.checked_mul(num_blocks));
    let mut memory = Vec::<u8>::new();
    let is_held = num_bytes.is_some_and(|bytes| memory.try_reserve_exact(bytes).is_ok());
    black_box(&memory); // or the compiler leaves the allocation out
    if is_held {
        return Ok(());
    }
    Err(Error::Config(format!(
        "there is no memory for {num_blocks} blocks with {num_tokens} tokens each; both must be \
         smaller"
    )))
}

/// Blocks of the device, with or without prefix caching.
#[derive(Clone, Debug)]
pub enum Allocator {
    /// Without prefix caching: a free block is blank.
    Uncached(UncachedBlockAllocator),
    /// With prefix caching: a free block keeps its contents for later requests.
    Cached(CachedBlockAllocator),
}

/// Calls a method of either allocator.
macro_rules! either {
    ($self:ident, $allocator:ident => $answer:expr) => {
        match $self {
            Self::Uncached($allocator) => $answer,
            Self::Cached($allocator) => $answer,
        }
    };
}

impl Allocator {
    /// Allocates a block for a prefix of `num_prefix_tokens`; `None` when all are used.
    pub fn allocate(&mut self, num_prefix_tokens: usize) -> Option<BlockId> {
        match self {
            Self::Uncached(allocator) => allocator.allocate(),
            Self::Cached(allocator) => allocator.allocate(num_prefix_tokens),
        }
    }

    /// Releases one reference; its holder last used the block in step `last_access`.
    ///
    /// # Panics
    /// If the block is free already.
    pub fn free(&mut self, block: BlockId, last_access: u64) {
        match self {
            Self::Uncached(allocator) => allocator.free(block),
            Self::Cached(allocator) => allocator.free(block, last_access),
        }
    }

    /// Takes one more reference to a used block.
    ///
    /// # Panics
    /// If the block is free.
    pub fn fork(&mut self, block: BlockId) {
        either!(self, allocator => allocator.fork(block));
    }

    /// Moves one reference to `block`, last used in step `last_access`, to its twin in `other`.
    /// The first holder that moves creates the twin and adds the pair to `pairs`, whose entries
    /// from `first` on belong to one group.  `None`, without effect, when all blocks of `other` are
    /// used.
    pub(crate) fn hand_over(
        &mut self,
        block: BlockId,
        last_access: u64,
        other: &mut Self,
        pairs: &mut Vec<BlockPair>,
        first: usize,
    ) -> Option<BlockId> {
        let known = pairs[first..].iter().find(|(from, _)| *from == block).map(|(_, to)| *to);
        let twin = if let Some(twin) = known {
            other.fork(twin);
            twin
        } else {
            let twin = other.allocate(0)?;
            pairs.push((block, twin));
            twin
        };
        self.free(block, last_access);
        Some(twin)
    }

    /// Whether the block has several references.
    pub fn is_shared(&self, block: BlockId) -> bool {
        self.ref_count(block) > 1
    }

    /// Blocks with several references.
    pub fn num_shared(&self) -> usize {
        either!(self, allocator => allocator.num_shared())
    }

    /// References to `block`.
    pub fn ref_count(&self, block: BlockId) -> u32 {
        either!(self, allocator => allocator.ref_count(block))
    }

    /// Blocks that can be allocated now.
    pub fn num_free(&self) -> usize {
        either!(self, allocator => allocator.num_free())
    }

    /// Blocks of the tier.
    pub fn num_total(&self) -> usize {
        either!(self, allocator => allocator.num_total())
    }

    /// Used blocks.
    pub fn num_used(&self) -> usize {
        either!(self, allocator => allocator.num_used())
    }

    /// Fraction of the tier's blocks that are used; 0 for an empty tier.
    #[expect(clippy::cast_precision_loss, reason = "validated: under 2^31 blocks")]
    pub fn usage(&self) -> f64 {
        self.num_used() as f64 / (self.num_total() as f64).max(1.0)
    }

    /// The allocator with prefix caching, if this is one.
    pub fn cached(&self) -> Option<&CachedBlockAllocator> {
        match self {
            Self::Uncached(_) => None,
            Self::Cached(allocator) => Some(allocator),
        }
    }

    pub(crate) fn cached_mut(&mut self) -> Option<&mut CachedBlockAllocator> {
        match self {
            Self::Uncached(_) => None,
            Self::Cached(allocator) => Some(allocator),
        }
    }
}
