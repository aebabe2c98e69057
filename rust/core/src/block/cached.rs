//! Allocator with prefix caching: a free block keeps its contents until it is evicted, and a
//! request with the same prefix reuses it.
//!
//! Owns the blocks of one tier and what is in them.  A block with contents is registered
//! under its prefix: its own tokens, the contents before it, and the key (adapter, salt) of
//! the first.  Invariants:
//! 1. A block is used, or in the evictor, or in the stack of blocks without contents, or was
//!    never allocated: exactly one of these.
//! 2. Two blocks are never registered under the same prefix.
//! 3. A hit agrees with the requested prefix in every token and in its key.  Each block in
//!    turn is compared with its own tokens and with the identity of the contents before it;
//!    identities are never used twice, so equal identities mean equal prefixes by induction.
//!    The hash only names candidates.
//! 4. A block is computed once it was marked so, until that step is abandoned, and never
//!    after it was allocated for other contents.
//!
//! Costs: lookup O(tokens of a block); allocate and free O(log n) through the evictor;
//! 4 bytes a token and about 100 bytes a block.

use std::num::NonZeroUsize;

use hashbrown::HashTable;

use crate::block::{BlockPool, LRUEvictor};
use crate::hash::{PrefixHash, PrefixKey};
use crate::ids::{BlockId, TokenId};

/// A prefix of whole blocks: its hash, and the identity of the contents of its last block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Prefix {
    hash: PrefixHash,
    last: Contents,
    /// Where the prompt of the block that follows ends, if only such requests may share it.
    boundary: Option<NonZeroUsize>,
}

/// Identity of registered contents; never used twice.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Contents {
    Root(PrefixKey),
    Registered(u64),
}

impl Prefix {
    /// The empty prefix.
    pub fn root(key: PrefixKey) -> Self {
        Self { hash: PrefixHash::root(key), last: Contents::Root(key), boundary: None }
    }

    /// This prefix, for a following block shared only by requests with a prompt of this many
    /// tokens.
    #[must_use]
    pub fn bounded(self, num_prompt_tokens: usize) -> Self {
        Self { boundary: NonZeroUsize::new(num_prompt_tokens), ..self }
    }
}

/// State of a block.
#[derive(Clone, Copy, Debug, Default)]
struct Meta {
    /// Prefix under which the block is registered, and the identity of the contents before it.
    registered: Option<Registered>,
    /// Tokens of the prefix that ends with this block, whether registered or not.
    num_prefix_tokens: usize,
    num_tokens: usize,
    last_access: u64,
    /// Which allocation of the block this is; a later one has other contents.
    stamp: u64,
    /// The block of the other tier whose contents were moved here, and its stamp then.
    origin: Option<(BlockId, u64)>,
    is_computed: bool,
    /// The step that computes the block, or did.
    pending_step: Option<u64>,
}

#[derive(Clone, Copy, Debug)]
struct Registered {
    hash: PrefixHash,
    before: Contents,
    boundary: Option<NonZeroUsize>,
    identity: u64,
}

/// Allocator of reference-counted blocks with prefix caching.
#[derive(Clone, Debug)]
pub struct CachedBlockAllocator {
    block_size: usize,
    pool: BlockPool,
    metas: Vec<Meta>,
    tokens: Vec<TokenId>,
    index: HashTable<BlockId>,
    evictor: LRUEvictor,
    /// Free blocks without contents, unless the evictor holds them.
    blank: Vec<BlockId>,
    num_ever_used: usize,
    next_identity: u64,
    next_stamp: u64,
    is_classic: bool,
}

impl CachedBlockAllocator {
    /// An allocator over `num_blocks` blocks of `block_size` tokens, all free and blank.
    ///
    /// A block freed without contents is allocated first.  With `is_classic` it queues
    /// for eviction among the others, as in vLLM 0.6.2.
    pub fn new(num_blocks: usize, block_size: usize, is_classic: bool) -> Self {
        Self {
            block_size,
            pool: BlockPool::new(num_blocks),
            metas: vec![Meta::default(); num_blocks],
            tokens: vec![0; num_blocks * block_size],
            index: HashTable::with_capacity(num_blocks),
            evictor: LRUEvictor::default(),
            blank: Vec::new(),
            num_ever_used: 0,
            next_identity: 0,
            next_stamp: 0,
            is_classic,
        }
    }

    /// Allocates a block at the end of a prefix of `num_prefix_tokens`; `None` when all are used.
    ///
    /// # Panics
    /// If there are 2^32 blocks or more.
    pub fn allocate(&mut self, num_prefix_tokens: usize) -> Option<BlockId> {
        let block = self.take_free()?;
        self.pool.acquire(block);
        let stamp = self.next_stamp;
        self.next_stamp += 1;
        self.metas[block.index()] = Meta { num_prefix_tokens, stamp, ..Meta::default() };
        Some(block)
    }

    fn take_free(&mut self) -> Option<BlockId> {
        if let Some(block) = self.blank.pop() {
            return Some(block);
        }
        if self.num_ever_used < self.pool.num_total() {
            let index = u32::try_from(self.num_ever_used).expect("under 2^32 blocks");
            self.num_ever_used += 1;
            return Some(BlockId::new(index));
        }
        let block = self.evictor.evict()?;
        self.unregister(block);
        Some(block)
    }

    /// Unregisters the contents of `block`, if any.
    pub(crate) fn unregister(&mut self, block: BlockId) {
        if let Some(registered) = self.metas[block.index()].registered.take() {
            let entry = self.index.find_entry(registered.hash.bits(), |other| *other == block);
            entry.expect("a registered block is in the index").remove();
        }
    }

    /// The block registered under `before` followed by `tokens`, used or free.
    pub fn find(&self, before: Prefix, tokens: &[TokenId]) -> Option<BlockId> {
        let hash = before.hash.extend(tokens);
        let holds = |block: &BlockId| {
            let registered = self.metas[block.index()].registered;
            registered.is_some_and(|r| {
                r.hash == hash && r.before == before.last && r.boundary == before.boundary
            }) && self.tokens_of(*block) == tokens
        };
        self.index.find(hash.bits(), holds).copied()
    }

    fn tokens_of(&self, block: BlockId) -> &[TokenId] {
        let start = block.index() * self.block_size;
        &self.tokens[start..start + self.metas[block.index()].num_tokens]
    }

    /// Takes one more reference to a block that [`find`](Self::find) returned.
    pub fn acquire_found(&mut self, block: BlockId) {
        if self.pool.ref_count(block) > 0 {
            self.pool.share(block);
        } else {
            self.evictor.remove(block);
            self.pool.acquire(block);
        }
    }

    /// The block as it is now, to be recognised by [`retake`](Self::retake).
    pub(crate) fn stamped(&self, block: BlockId) -> (BlockId, u64) {
        (block, self.metas[block.index()].stamp)
    }

    /// Records which block of the other tier was moved to `block`.
    pub(crate) fn set_origin(&mut self, block: BlockId, origin: (BlockId, u64)) {
        self.metas[block.index()].origin = Some(origin);
    }

    /// The origin set by [`set_origin`](Self::set_origin) since the block was allocated.
    pub(crate) fn origin(&self, block: BlockId) -> Option<(BlockId, u64)> {
        self.metas[block.index()].origin
    }

    /// Reacquires a freed block whose contents are still those of `stamped`.  A block that was
    /// computed since is left out: moving contents there would undo that.
    pub(crate) fn retake(&mut self, stamped: (BlockId, u64)) -> Option<BlockId> {
        let (block, stamp) = stamped;
        let meta = &self.metas[block.index()];
        let is_unchanged = meta.stamp == stamp && !meta.is_computed;
        (is_unchanged && self.evictor.contains(block)).then(|| {
            self.acquire_found(block);
            block
        })
    }

    /// Registers a used block under `before` followed by `tokens`, at most a block of them,
    /// and returns the prefix that it ends.  An earlier registration (the same block, less full) is
    /// dropped.
    ///
    /// # Panics
    /// If the block is free, or there are too many tokens.
    pub fn register(&mut self, block: BlockId, before: Prefix, tokens: &[TokenId]) -> Prefix {
        assert!(self.pool.ref_count(block) > 0, "block {block:?} was registered while free");
        debug_assert!(self.find(before, tokens).is_none(), "invariant 2");
        self.unregister(block);
        let start = block.index() * self.block_size;
        self.tokens[start..start + self.block_size][..tokens.len()].copy_from_slice(tokens);
        let hash = before.hash.extend(tokens);
        let identity = self.next_identity;
        self.next_identity += 1;
        let meta = &mut self.metas[block.index()];
        meta.num_tokens = tokens.len();
        meta.registered =
            Some(Registered { hash, before: before.last, boundary: before.boundary, identity });
        let metas = &self.metas;
        let hash_of = |other: &BlockId| {
            metas[other.index()].registered.map_or(0, |registered| registered.hash.bits())
        };
        self.index.insert_unique(hash.bits(), block, hash_of);
        Prefix { hash, last: Contents::Registered(identity), boundary: None }
    }

    /// Prepares `block` for a write by its only holder: a registration of tokens that would be
    /// overwritten is dropped.
    pub(crate) fn overwrite(&mut self, block: BlockId) {
        let meta = &mut self.metas[block.index()];
        meta.is_computed = false;
        if meta.num_tokens == self.block_size {
            self.unregister(block);
        }
    }

    /// The prefix that a registered block ends.
    pub fn prefix_of(&self, block: BlockId) -> Option<Prefix> {
        let Registered { hash, identity, .. } = self.metas[block.index()].registered?;
        Some(Prefix { hash, last: Contents::Registered(identity), boundary: None })
    }

    /// Takes one more reference to a used block.
    ///
    /// # Panics
    /// If the block is free.
    pub fn fork(&mut self, block: BlockId) {
        self.pool.share(block);
    }

    /// Releases one reference; its holder last used the block at `last_access`.  The last one frees
    /// the block, which keeps its contents until it is evicted.
    ///
    /// # Panics
    /// If the block is free already.
    pub fn free(&mut self, block: BlockId, last_access: u64) {
        let meta = &mut self.metas[block.index()];
        meta.last_access = meta.last_access.max(last_access);
        if !self.pool.release(block) {
            return;
        }
        if meta.registered.is_some() || self.is_classic {
            self.evictor.add(block, meta.last_access, meta.num_prefix_tokens);
        } else {
            self.blank.push(block);
        }
    }

    /// Marks the contents of `block` as computed in step `step_id`, if they are not yet: later rows
    /// of that step may use them.
    pub fn mark_pending(&mut self, block: BlockId, step_id: u64) {
        let meta = &mut self.metas[block.index()];
        if !meta.is_computed {
            meta.pending_step = Some(step_id);
        }
    }

    /// Marks the contents of the abandoned steps from `step_id` on as not computed.
    pub(crate) fn abandon_since(&mut self, step_id: u64) {
        for meta in &mut self.metas {
            meta.is_computed &= meta.pending_step.is_none_or(|pending| pending < step_id);
        }
    }

    /// Marks the contents of `block` as computed.
    pub fn mark_computed(&mut self, block: BlockId) {
        self.metas[block.index()].is_computed = true;
    }

    /// Whether the contents of `block` have been computed.
    pub fn is_computed(&self, block: BlockId) -> bool {
        self.metas[block.index()].is_computed
    }

    /// Whether a row of step `step_id` can use the contents of `block`.
    pub fn is_usable(&self, block: BlockId, step_id: u64) -> bool {
        let meta = &self.metas[block.index()];
        meta.is_computed || meta.pending_step == Some(step_id)
    }

    /// Blocks with several references.
    pub fn num_shared(&self) -> usize {
        self.pool.num_shared()
    }

    /// References to `block`.
    pub fn ref_count(&self, block: BlockId) -> u32 {
        self.pool.ref_count(block)
    }

    /// Blocks that can be allocated now, those with contents included.
    pub fn num_free(&self) -> usize {
        self.pool.num_total() - self.pool.num_used()
    }

    /// Free blocks whose contents can still be found.
    pub fn num_cached(&self) -> usize {
        self.evictor.len()
    }

    /// Blocks of the tier.
    pub fn num_total(&self) -> usize {
        self.pool.num_total()
    }

    /// Used blocks.
    pub fn num_used(&self) -> usize {
        self.pool.num_used()
    }

    /// Drops the contents of all free blocks.  Returns false, without effect, while any is used.
    pub fn reset(&mut self) -> bool {
        if self.pool.num_used() > 0 {
            return false;
        }
        *self = Self::new(self.pool.num_total(), self.block_size, self.is_classic);
        true
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn root() -> Prefix {
        Prefix::root(PrefixKey::default())
    }

    /// No two inputs of equal hash are known, so the test changes the contents and keeps the hash:
    /// the hash agrees, and there is no hit.
    #[test]
    fn f15_a_hit_agrees_in_every_token_and_not_only_in_the_hash() {
        let mut allocator = CachedBlockAllocator::new(4, 2, false);
        let block = allocator.allocate(2).unwrap();
        let prefix = allocator.register(block, root(), &[5, 6]);
        assert_eq!(allocator.find(root(), &[5, 6]), Some(block));
        allocator.tokens[block.index() * 2] = 7;
        assert_eq!(allocator.find(root(), &[5, 6]), None);
        // The same for the contents before the block: equal hashes, another identity.
        let child = allocator.allocate(4).unwrap();
        allocator.register(child, prefix, &[1, 2]);
        let impostor = Prefix { last: Contents::Registered(99), ..prefix };
        assert_eq!(allocator.find(prefix, &[1, 2]), Some(child));
        assert_eq!(allocator.find(impostor, &[1, 2]), None);
    }

    #[test]
    fn a_block_that_was_computed_since_is_not_taken_back_to_be_overwritten() {
        let mut allocator = CachedBlockAllocator::new(4, 2, true);
        let block = allocator.allocate(2).unwrap();
        let stamped = allocator.stamped(block);
        allocator.free(block, 1);
        assert_eq!(allocator.retake(stamped), Some(block));
        allocator.mark_computed(block);
        allocator.free(block, 2);
        assert_eq!(allocator.retake(stamped), None);
    }

    #[test]
    fn adapters_and_salts_keep_prefixes_apart() {
        let mut allocator = CachedBlockAllocator::new(4, 2, false);
        let block = allocator.allocate(2).unwrap();
        allocator.register(block, root(), &[5, 6]);
        for key in [PrefixKey { adapter: 1, salt: 0 }, PrefixKey { adapter: 0, salt: 1 }] {
            assert_eq!(allocator.find(Prefix::root(key), &[5, 6]), None);
        }
    }

    /// The naive model of the blocks: the number of holders of each, and the prefix that finds it.
    type Model = Vec<(usize, Option<Vec<TokenId>>)>;

    proptest! {
        /// Random use against a model that stores whole prefixes and compares them as lists.
        #[test]
        fn hits_are_those_of_whole_prefixes_compared_as_lists(
            ops in prop::collection::vec((0..4u8, any::<prop::sample::Index>(), 0..2i32), 1..300),
            is_classic in any::<bool>(),
        ) {
            const NUM_BLOCKS: usize = 6;
            let mut allocator = CachedBlockAllocator::new(NUM_BLOCKS, 2, is_classic);
            let mut model: Model = vec![(0, None); NUM_BLOCKS];
            let mut now = 0;
            for (op, pick, token) in ops {
                now += 1;
                let used: Vec<usize> = (0..NUM_BLOCKS).filter(|b| model[*b].0 > 0).collect();
                match op {
                    0 => {
                        let block = allocator.allocate(0);
                        prop_assert_eq!(block.is_none(), used.len() == NUM_BLOCKS);
                        if let Some(block) = block {
                            prop_assert_eq!(model[block.index()].0, 0, "a used block");
                            model[block.index()] = (1, None);
                        }
                    }
                    1 if !used.is_empty() => {
                        let block = used[pick.index(used.len())];
                        allocator.free(BlockId::new(u32::try_from(block).unwrap()), now);
                        model[block].0 -= 1;
                    }
                    _ => {
                        // Walk the prefix [t, t, t, t, ...]; take the known blocks, register more.
                        let (mut prefix, mut whole) = (root(), Vec::new());
                        for _ in 0..=usize::from(op) {
                            whole.extend([token, token]);
                            let found = allocator.find(prefix, &[token, token]);
                            let known = (0..NUM_BLOCKS).find(|b| model[*b].1.as_ref() == Some(&whole));
                            if let Some(found) = found {
                                prop_assert_eq!(Some(found.index()), known);
                                allocator.acquire_found(found);
                                model[found.index()].0 += 1;
                                prefix = allocator.prefix_of(found).unwrap();
                            } else if let Some(block) = allocator.allocate(whole.len()) {
                                prop_assert_eq!(model[block.index()].0, 0);
                                prefix = allocator.register(block, prefix, &[token, token]);
                                // Contents known under an evicted parent can no longer be found.
                                for (_, prefix) in &mut model {
                                    if prefix.as_ref() == Some(&whole) {
                                        *prefix = None;
                                    }
                                }
                                model[block.index()] = (1, Some(whole.clone()));
                            } else {
                                break;
                            }
                        }
                    }
                }
                for (index, (holders, _)) in (0u32..).zip(&model) {
                    prop_assert_eq!(allocator.ref_count(BlockId::new(index)) as usize, *holders);
                }
                let num_used = model.iter().filter(|(holders, _)| *holders > 0).count();
                prop_assert_eq!(allocator.num_free() + num_used, NUM_BLOCKS);
            }
        }
    }
}
