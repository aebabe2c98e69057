//! KV groups beside the first: layers that keep something else of a sequence than all its keys and
//! values, each group with its own rules of [`KvKind`] and its own pool.
//!
//! Owns the blocks of such a pool on both tiers; a group of cross attention has none, and takes
//! those of the first group.  Invariants:
//! 1. Waiting sequences have no blocks, running ones have them on the device, swapped ones on the
//!    host; a block's reference count is the number of tables that name it.
//! 2. Between steps a table has no passed block, that is one that no later query sees; a row maps
//!    the blocks that it writes, and its update frees the passed ones.
//! 3. No row writes a shared block: its sequence first gets a separate block and a copy, and the
//!    last of the sharers keeps the block.
//! 4. Each use is checked first: `can_map` for the tokens of rows, `can_return` for a group that is
//!    swapped in.  A sequence alone on the device always fits, and a pool of states has a block for
//!    every sequence that may run.
//! 5. With prefix caching a computed full block is registered under the contents of the block
//!    beside it in the first group.  At least the last token of a prompt is computed, so no block
//!    found in the cache is written.
//! 6. A row whose first position is 0 begins with a fresh state, whatever its block holds.
//!
//! Costs: O(blocks mapped and freed) a row, with prefix caching O(log n) each, and O(blocks of the
//! prompt) a prompt that is looked up.

use std::ops::Range;

use crate::block::{Allocator, CachedBlockAllocator, Prefix, UncachedBlockAllocator};
use crate::config::{CacheConfig, KvGroup, KvKind};
use crate::ids::{BlockId, BlockPair, TokenId};
use crate::outputs::Moves;
use crate::sequence::{Sequence, SequenceStatus};
use crate::space::PROMISED;
use crate::table::{SpanTable, num_blocks_for};

/// Lookup key of a block in a prefix cache: the prefix before it, and its tokens.
pub(super) type Contents<'a> = (Prefix, &'a [TokenId]);

/// Blocks of the device and of the host.
#[derive(Clone, Debug)]
pub(super) struct Tiers {
    pub(super) gpu: Allocator,
    pub(super) cpu: Allocator,
}

impl Tiers {
    /// Whether a block of either tier is used.
    pub(super) fn is_used(&self) -> bool {
        self.gpu.num_used() + self.cpu.num_used() > 0
    }

    /// The tier of groups of `status`; none for waiting ones.
    pub(super) fn of(&self, status: SequenceStatus) -> Option<&Allocator> {
        match status {
            SequenceStatus::Waiting => None,
            SequenceStatus::Running => Some(&self.gpu),
            SequenceStatus::Swapped => Some(&self.cpu),
        }
    }

    /// Frees a block of a group of `status`, last used in step `last_step`.
    pub(super) fn free(&mut self, block: BlockId, status: SequenceStatus, last_step: u64) {
        match status {
            SequenceStatus::Swapped => self.cpu.free(block, last_step),
            _ => self.gpu.free(block, last_step),
        }
    }
}

impl KvKind {
    /// Logical blocks of the first `num_computed` tokens that no later query sees.
    fn passed(self, num_computed: usize, block_size: usize) -> Range<usize> {
        match self {
            Self::Window { window, num_sink_tokens } => {
                let num_kept = num_blocks_for(num_sink_tokens, block_size);
                let first_seen = (num_computed + 1).saturating_sub(window) / block_size;
                if num_kept < first_seen { num_kept..first_seen } else { 0..0 }
            }
            Self::Chunked(chunk) => 0..num_computed / chunk * chunk / block_size,
            Self::State | Self::Cross => 0..0,
        }
    }

    /// Number of computed tokens below which [`passed`](Self::passed) does not reach beyond logical
    /// block `end`.
    fn passes_at(self, end: usize, block_size: usize) -> usize {
        let num_tokens = (end + 1) * block_size;
        match self {
            Self::Window { window, .. } => window + num_tokens - 1,
            Self::Chunked(_) => num_tokens,
            Self::State | Self::Cross => usize::MAX,
        }
    }

    /// The first logical block that a row after `num_computed` tokens writes.
    fn first_written(self, num_computed: usize, block_size: usize) -> usize {
        match self {
            Self::Window { .. } | Self::Chunked(_) => num_computed / block_size,
            Self::State => 0,
            Self::Cross => usize::MAX,
        }
    }

    /// Logical blocks in which the first `num_slots` tokens lie.
    fn end(self, num_slots: usize, block_size: usize) -> usize {
        match self {
            Self::Window { .. } | Self::Chunked(_) => num_blocks_for(num_slots, block_size),
            Self::State => 1,
            Self::Cross => 0,
        }
    }

    /// Whether each token has a separate slot, which the model's inputs name.
    pub(crate) fn has_slots(self) -> bool {
        matches!(self, Self::Window { .. } | Self::Chunked(_))
    }

    /// Whether a sequence may begin after any prefix computed in the first group, such as a
    /// sibling's; otherwise it computes every token that is not cached in this group too.
    pub(super) fn follows_first(self) -> bool {
        self == Self::Cross
    }
}

/// The blocks of one group.
#[derive(Clone, Debug)]
pub(super) struct GroupBlocks {
    pub(super) kind: KvKind,
    block_size: usize,
    num_lookahead_slots: usize,
    tiers: Option<Tiers>,
}

impl GroupBlocks {
    /// Creates the blocks of a group, all free.
    pub(super) fn new(group: KvGroup, cache: &CacheConfig, num_lookahead_slots: usize) -> Self {
        let KvGroup { kind, num_gpu_blocks, num_cpu_blocks } = group;
        let block_size = cache.block_size;
        let tiers = Tiers {
            gpu: if cache.enable_prefix_caching {
                Allocator::Cached(CachedBlockAllocator::new(num_gpu_blocks, block_size, false))
            } else {
                Allocator::Uncached(UncachedBlockAllocator::new(num_gpu_blocks))
            },
            cpu: Allocator::Uncached(UncachedBlockAllocator::new(num_cpu_blocks)),
        };
        let tiers = (kind != KvKind::Cross).then_some(tiers);
        Self { kind, block_size, num_lookahead_slots, tiers }
    }

    /// The group's pool, or that of the first group if it has none.
    pub(super) fn tiers<'a>(&'a self, first: &'a Tiers) -> &'a Tiers {
        self.tiers.as_ref().unwrap_or(first)
    }

    /// As [`tiers`](Self::tiers).
    pub(super) fn tiers_mut<'a>(&'a mut self, first: &'a mut Tiers) -> &'a mut Tiers {
        self.tiers.as_mut().unwrap_or(first)
    }

    /// The group's separate pool, if it has one.
    pub(super) fn own_tiers(&self) -> Option<&Tiers> {
        self.tiers.as_ref()
    }

    fn cache(&self) -> Option<&CachedBlockAllocator> {
        self.tiers.as_ref()?.gpu.cached()
    }

    pub(super) fn cache_mut(&mut self) -> Option<&mut CachedBlockAllocator> {
        self.tiers.as_mut()?.gpu.cached_mut()
    }

    fn passed(&self, num_computed: usize) -> Range<usize> {
        self.kind.passed(num_computed, self.block_size)
    }

    /// Number of blocks, at most `most`, of the longest prefix whose blocks that the next query
    /// sees are cached here; `contents` are the keys of the blocks.
    pub(super) fn longest_hit(&self, contents: &[Contents<'_>], most: usize) -> usize {
        if self.kind.follows_first() {
            return most;
        }
        let Some(cache) = self.cache() else { return 0 };
        // The blocks before the first uncached one, and those after the last.
        let (mut num_leading, mut first_known, mut longest) = (usize::MAX, 0, 0);
        for (index, (before, tokens)) in contents[..most].iter().enumerate() {
            if !cache.find(*before, tokens).is_some_and(|block| cache.is_computed(block)) {
                (num_leading, first_known) = (num_leading.min(index), index + 1);
            }
            let passed = self.passed((index + 1) * self.block_size);
            if passed.start <= num_leading && first_known <= passed.end {
                longest = index + 1;
            }
        }
        longest
    }

    /// Creates the table of a sequence that begins after a prefix of blocks with `contents`, as
    /// [`longest_hit`](Self::longest_hit) found it.
    pub(super) fn begin(&mut self, contents: &[Contents<'_>]) -> SpanTable {
        let passed = self.passed(contents.len() * self.block_size);
        let Some(cache) = self.cache_mut() else { return SpanTable::default() };
        let seen = contents[..passed.start].iter().chain(&contents[passed.end..]);
        let blocks: Vec<BlockId> =
            seen.map(|(before, tokens)| cache.find(*before, tokens).expect(PROMISED)).collect();
        for block in &blocks {
            cache.acquire_found(*block);
        }
        SpanTable::new(passed, blocks)
    }

    /// Blocks that a row of `num_tokens` tokens takes, of a sequence without a table that begins
    /// after `num_cached` tokens.  Cached blocks are counted too, since most of them are free until
    /// then.
    pub(super) fn num_to_begin(
        &self,
        seq: &Sequence,
        num_tokens: usize,
        num_cached: usize,
    ) -> usize {
        if self.has_room_for_all() {
            return 0;
        }
        let num_new = num_tokens.min(seq.len() - num_cached) + self.num_lookahead_slots;
        self.kind.end(num_cached + num_new, self.block_size) - self.passed(num_cached).len()
    }

    /// Blocks that a row of `num_tokens` tokens takes, of a running sequence with `table`: new ones
    /// and copies of shared ones.  One too many may be counted for each set of sharers.
    pub(super) fn num_to_map(&self, seq: &Sequence, table: &SpanTable, num_tokens: usize) -> usize {
        let Some(tiers) = self.tiers.as_ref().filter(|_| !self.has_room_for_all()) else {
            return 0;
        };
        let computed = seq.num_computed_tokens;
        let num_slots = computed + num_tokens.min(seq.len() - computed) + self.num_lookahead_slots;
        let num_new = self.num_lacking(table, num_slots);
        if tiers.gpu.num_shared() == 0 {
            return num_new;
        }
        num_new + self.num_shared(table, computed, &tiers.gpu)
    }

    /// Blocks of `tier` in `table` that a row after `num_computed` tokens writes, and that are
    /// shared.
    fn num_shared(&self, table: &SpanTable, num_computed: usize, tier: &Allocator) -> usize {
        let written = table.place(self.kind.first_written(num_computed, self.block_size));
        table.blocks().iter().skip(written).filter(|block| tier.is_shared(**block)).count()
    }

    /// Blocks that a table lacks for the first `num_slots` tokens; no division if it lacks none.
    fn num_lacking(&self, table: &SpanTable, num_slots: usize) -> usize {
        let end = table.end();
        if end * self.block_size >= num_slots {
            return 0;
        }
        self.kind.end(num_slots, self.block_size).saturating_sub(end)
    }

    /// Whether the pool certainly has blocks for rows of `num_tokens` tokens of each of `num_seqs`
    /// sequences: as many as the rows have slots, whatever their tables hold.
    pub(super) fn has_ample_room(&self, num_seqs: usize, num_tokens: usize) -> bool {
        self.tiers.as_ref().is_none_or(|Tiers { gpu, .. }| {
            let most = num_seqs * (num_tokens + self.num_lookahead_slots);
            gpu.num_shared() == 0 && most <= gpu.num_free()
        })
    }

    /// Whether the pool has a block for every sequence that may run, invariant 4.
    pub(super) fn has_room_for_all(&self) -> bool {
        self.kind == KvKind::State
    }

    /// Maps unshared blocks in `table` for a row of `num_tokens` tokens and the lookahead; adds the
    /// necessary copies to `copies`.
    pub(super) fn map(
        &mut self,
        table: &mut SpanTable,
        num_computed: usize,
        num_tokens: usize,
        last_step: u64,
        copies: &mut Vec<BlockPair>,
    ) {
        let num_slots = num_computed + num_tokens + self.num_lookahead_slots;
        let num_new = self.num_lacking(table, num_slots);
        let Some(Tiers { gpu, .. }) = &mut self.tiers else { return };
        if gpu.num_shared() > 0 {
            let written = table.place(self.kind.first_written(num_computed, self.block_size));
            for block in table.blocks_mut().iter_mut().skip(written) {
                if gpu.is_shared(*block) {
                    let own = gpu.allocate(0).expect(PROMISED);
                    gpu.free(*block, last_step);
                    copies.push((*block, own));
                    *block = own;
                }
            }
        }
        for _ in 0..num_new {
            let num_prefix_tokens = (table.end() + 1) * self.block_size;
            table.push(gpu.allocate(num_prefix_tokens).expect(PROMISED));
        }
    }

    /// Number of computed tokens below which a row maps no block in `table`, and its update frees
    /// none, unless a block that it writes is shared.
    pub(super) fn fits_until(&self, table: &SpanTable) -> usize {
        if self.kind.has_slots() {
            let mapped =
                (table.end() * self.block_size + 1).saturating_sub(self.num_lookahead_slots);
            mapped.min(self.kind.passes_at(table.passed().end, self.block_size))
        } else if self.kind == KvKind::State && table.is_empty() {
            0
        } else {
            usize::MAX
        }
    }

    /// Records that block `index` of a table was filled with `contents` in step `step_id`.
    pub(super) fn note(
        &mut self,
        table: &SpanTable,
        index: usize,
        contents: Contents<'_>,
        step_id: u64,
    ) {
        let Some(cache) = self.cache_mut() else { return };
        let (before, tokens) = contents;
        match cache.find(before, tokens) {
            Some(known) if cache.is_computed(known) => return,
            Some(known) => cache.unregister(known), // registered by an abandoned step
            None => {}
        }
        let block = table.block(index);
        cache.register(block, before, tokens);
        cache.mark_pending(block, step_id);
        cache.mark_computed(block);
    }

    /// Frees the blocks of a running sequence that no query after `num_computed` tokens sees.
    pub(super) fn pass(&mut self, table: &mut SpanTable, num_computed: usize, last_step: u64) {
        let known = table.passed().end;
        let passed = self.passed(num_computed);
        let Some(tiers) = &mut self.tiers else { return };
        if passed.end > known {
            for block in table.pass(passed) {
                tiers.gpu.free(block, last_step);
            }
        }
    }

    /// Blocks of this pool that a sequence group needs to be swapped in: the `num_held` that it
    /// has, and those that its next rows take, one for each of `nums_uncomputed` tokens.
    pub(super) fn num_to_return(
        &self,
        num_held: usize,
        nums_uncomputed: impl Iterator<Item = usize>,
    ) -> usize {
        if self.has_room_for_all() || self.tiers.is_none() {
            return 0;
        }
        let touched = |num_tokens: usize| {
            self.kind.end(num_tokens + self.num_lookahead_slots, self.block_size) + 1
        };
        num_held + nums_uncomputed.map(touched).sum::<usize>()
    }

    /// Width of the group's table in the model's inputs: that of the first group for windows and
    /// chunks, the longest of `tables` for encoders.
    pub(super) fn width<'a>(
        &self,
        max_num_blocks: usize,
        tables: impl Iterator<Item = &'a SpanTable>,
    ) -> usize {
        match self.kind {
            KvKind::Window { .. } | KvKind::Chunked(_) => max_num_blocks,
            KvKind::State => 1,
            KvKind::Cross => tables.map(SpanTable::end).max().unwrap_or(0),
        }
    }

    /// Whether a row of a sequence of `status` must copy blocks of `table`.
    pub(super) fn has_copies(
        &self,
        table: &SpanTable,
        num_computed: usize,
        status: SequenceStatus,
    ) -> bool {
        let tier = self.tiers.as_ref().and_then(|tiers| tiers.of(status));
        tier.is_some_and(|tier| self.num_shared(table, num_computed, tier) > 0)
    }

    /// Whether `table` is valid between steps, for a running or swapped sequence.
    pub(super) fn is_sound(&self, table: &SpanTable, computed: usize, num_encoder: usize) -> bool {
        match self.kind {
            KvKind::Cross => table.end() == num_blocks_for(num_encoder, self.block_size),
            _ if computed == 0 && table.is_empty() => true,
            KvKind::State => table.end() == 1,
            KvKind::Window { .. } | KvKind::Chunked(_) => {
                table.passed() == self.passed(computed)
                    && table.end() >= num_blocks_for(computed, self.block_size)
            }
        }
    }
}

/// The moves of the pool that a KV group uses: its separate one, or that of the first group.
pub(super) fn moves_of<'a>(
    moves: &'a mut [Moves],
    index: usize,
    group: &GroupBlocks,
) -> &'a mut Moves {
    &mut moves[if group.own_tiers().is_some() { index + 1 } else { 0 }]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hash::PrefixKey;

    const BLOCK_SIZE: usize = 3;
    const NUM_BLOCKS: usize = 7;

    /// The rule of the attention that a kind serves: whether a query attends to a key.
    fn sees(kind: KvKind, query: usize, key: usize) -> bool {
        match kind {
            KvKind::Window { window, num_sink_tokens } => {
                key < num_sink_tokens || query < key + window
            }
            KvKind::Chunked(chunk) => key / chunk >= query / chunk,
            KvKind::State | KvKind::Cross => false,
        }
    }

    /// Whether a query after `num_computed` tokens attends to a token in block `index`.
    fn sees_block(kind: KvKind, num_computed: usize, index: usize) -> bool {
        let keys = index * BLOCK_SIZE..(index + 1) * BLOCK_SIZE;
        keys.into_iter().any(|key| sees(kind, num_computed, key))
    }

    fn kinds() -> impl Iterator<Item = KvKind> {
        let windows = [(1, 0), (4, 0), (9, 0), (1, 2), (5, 4), (8, 3), (2, 20)];
        windows
            .into_iter()
            .map(|(window, num_sink_tokens)| KvKind::Window { window, num_sink_tokens })
            .chain([1, 3, 5, 6, 12, 40].map(KvKind::Chunked))
    }

    #[test]
    fn what_has_passed_is_seen_by_no_later_query_and_nothing_else_is() {
        for kind in kinds() {
            for num_computed in 0..NUM_BLOCKS * BLOCK_SIZE {
                let passed = kind.passed(num_computed, BLOCK_SIZE);
                for index in 0..=num_computed / BLOCK_SIZE {
                    let is_seen = sees_block(kind, num_computed, index);
                    assert_eq!(is_seen, !passed.contains(&index), "{kind:?}, {num_computed}");
                }
            }
        }
    }

    #[test]
    fn the_longest_hit_has_every_block_that_its_next_query_sees() {
        let tokens: Vec<TokenId> = (0..).take(NUM_BLOCKS * BLOCK_SIZE).collect();
        let mut first = CachedBlockAllocator::new(NUM_BLOCKS, BLOCK_SIZE, false);
        let mut before = Prefix::root(PrefixKey::default());
        let mut contents = Vec::new();
        for tokens in tokens.chunks(BLOCK_SIZE) {
            contents.push((before, tokens));
            let block = first.allocate(0).unwrap();
            before = first.register(block, before, tokens);
        }
        let config = CacheConfig::new(BLOCK_SIZE, 1).with(|cache| {
            cache.enable_prefix_caching = true;
        });
        for (kind, known) in kinds().flat_map(|kind| (0..1 << NUM_BLOCKS).map(move |k| (kind, k))) {
            let group = KvGroup { kind, num_gpu_blocks: NUM_BLOCKS, num_cpu_blocks: 0 };
            let mut blocks = GroupBlocks::new(group, &config, 0);
            let is_known = |index: &usize| known >> index & 1 == 1;
            for index in (0..NUM_BLOCKS).filter(is_known) {
                let cache = blocks.cache_mut().unwrap();
                let block = cache.allocate(0).unwrap();
                cache.register(block, contents[index].0, contents[index].1);
                cache.mark_computed(block);
            }
            let is_hit = |num_blocks: &usize| {
                let seen = |index: &usize| sees_block(kind, num_blocks * BLOCK_SIZE, *index);
                (0..*num_blocks).filter(seen).all(|index| is_known(&index))
            };
            let wanted = (0..=NUM_BLOCKS).filter(is_hit).max();
            let found = blocks.longest_hit(&contents, NUM_BLOCKS);
            assert_eq!(Some(found), wanted, "{kind:?} of {known:b}");
            let table = blocks.begin(&contents[..found]);
            let seen = (0..found).filter(|index| sees_block(kind, found * BLOCK_SIZE, *index));
            let mapped = table.runs().map(|(first, blocks)| first..first + blocks.len());
            assert!(mapped.into_iter().flatten().eq(seen), "{kind:?} of {known:b}: {table:?}");
        }
    }
}
