//! Prefix caching: which full blocks are registered, shared and computed.

use std::ops::Range;

use crate::block::{Allocator, Prefix};
use crate::config::KvKind;
use crate::ids::{BlockId, TokenId};
use crate::sequence::{Chain, GroupHandle, SeqHandle, Sequence, SequenceStatus, SequenceStore};
use crate::space::BlockSpaceManager;
use crate::space::group::GroupBlocks;

impl BlockSpaceManager {
    /// The prefix of the first `num_blocks` blocks of `seq`, all in its table.
    pub(super) fn chain_at(
        &self,
        store: &SequenceStore,
        seq: &Sequence,
        num_blocks: usize,
    ) -> Chain {
        let root = || Prefix::root(store.group(seq.group()).key);
        let prefix = self.tiers.gpu.cached().and_then(|cache| match num_blocks {
            0 => Some(root()),
            _ => cache.prefix_of(seq.table.block(num_blocks - 1)),
        });
        Chain { num_blocks, prefix }
    }

    /// Lookup key of logical block `index` of a sequence after `before`: its tokens, a
    /// full block of them, or in the classic way also the last tokens of a prompt.
    #[inline] // called for each block of every prompt
    pub(super) fn lookup<'a>(
        &self,
        seq: &'a Sequence,
        index: usize,
        before: Prefix,
    ) -> Option<(Prefix, &'a [TokenId])> {
        let start = index * self.config.block_size;
        let end = start + self.config.block_size;
        let tokens = seq.listed_tokens();
        let tokens = if end <= tokens.len() {
            &tokens[start..end]
        } else if self.config.choices.share_partial_blocks && start < tokens.len() {
            &tokens[start..]
        } else {
            return None;
        };
        if tokens[tokens.len() - 1] < 0 {
            return None; // a placeholder: the block's contents are not known yet
        }
        let is_prompt = start + tokens.len() <= seq.num_prompt_tokens();
        if is_prompt || self.config.choices.share_generated_blocks {
            Some((before, tokens))
        } else {
            Some((before.bounded(seq.num_prompt_tokens()), tokens))
        }
    }

    /// Maps the cached blocks of a sequence whose table holds `num_blocks` blocks, and counts the
    /// computed part as computed, except the last token, whose output is needed.
    pub(super) fn fill_from_cache(
        &mut self,
        store: &mut SequenceStore,
        seq: SeqHandle,
        num_blocks: usize,
    ) {
        let block_size = self.config.block_size;
        let mut chain = self.chain_at(store, store.seq(seq), num_blocks);
        let mut num_usable = num_blocks;
        while let Some((prefix, tokens)) =
            chain.prefix.and_then(|before| self.lookup(store.seq(seq), chain.num_blocks, before))
        {
            let Some(cache) = self.tiers.gpu.cached_mut() else { break };
            let Some(block) = cache.find(prefix, tokens) else { break };
            let is_full = tokens.len() == block_size;
            let leads = num_usable == chain.num_blocks;
            num_usable += usize::from(leads && is_full && cache.is_usable(block, self.step_id));
            cache.acquire_found(block);
            chain = Chain { num_blocks: chain.num_blocks + 1, prefix: cache.prefix_of(block) };
            store.seq_mut(seq).table.push(block);
            if !is_full {
                chain = self.chain_at(store, store.seq(seq), chain.num_blocks - 1);
                break;
            }
        }
        let entry = store.seq_mut(seq);
        let num_cached = num_usable * block_size;
        let num_counted = if self.config.choices.charge_cached_tokens {
            num_blocks * block_size
        } else {
            num_cached.min(entry.len() - 1)
        };
        (entry.chain, entry.num_cached_tokens) = (chain, num_cached);
        entry.num_computed_tokens = num_counted;
    }

    /// Registers the blocks of a sequence that its tokens fill; contents that another block has
    /// already registered stay with that block.
    pub(super) fn register_full_blocks(&mut self, store: &mut SequenceStore, seq: SeqHandle) {
        let is_prefill = store.group(store.seq(seq).group()).is_prefill;
        let entry = store.seq(seq);
        let mut chain = entry.chain;
        while let Some((prefix, tokens)) =
            chain.prefix.and_then(|before| self.lookup(entry, chain.num_blocks, before))
        {
            let is_full = tokens.len() == self.config.block_size;
            if !is_full && !is_prefill {
                break; // only the last tokens of a prompt are shared in part
            }
            let Some(cache) = self.tiers.gpu.cached_mut() else { break };
            let block = entry.table.block(chain.num_blocks);
            let known = cache.find(prefix, tokens);
            if !is_full {
                if known.is_none() {
                    cache.register(block, prefix, tokens);
                }
                break;
            }
            let prefix = match known {
                Some(known) => cache.prefix_of(known),
                None => Some(cache.register(block, prefix, tokens)),
            };
            chain = Chain { num_blocks: chain.num_blocks + 1, prefix };
        }
        store.seq_mut(seq).chain = chain;
    }

    /// Exchanges the block that a decoding sequence is about to fill for a cached one that has the
    /// same contents, already computed.
    pub(super) fn exchange_last_full_block(&mut self, store: &mut SequenceStore, seq: SeqHandle) {
        let entry = store.seq(seq);
        let index = entry.chain.num_blocks;
        let end = (index + 1) * self.config.block_size;
        if entry.len() != end || entry.table.len() <= index {
            return;
        }
        let lookup = entry.chain.prefix.and_then(|before| self.lookup(entry, index, before));
        let (Some((prefix, tokens)), Some(cache)) = (lookup, self.tiers.gpu.cached_mut()) else {
            return;
        };
        let Some(known) = cache.find(prefix, tokens) else { return };
        let own = entry.table.block(index);
        if known != own && cache.is_usable(known, self.step_id) {
            cache.acquire_found(known);
            cache.free(own, entry.last_step);
            let entry = store.seq_mut(seq);
            entry.table.replace(index, known);
            entry.num_cached_tokens = end;
        }
    }

    /// The leading blocks of a sequence that are cached, each with its lookup key.
    fn known_blocks<'s, 'a>(
        &'s self,
        store: &SequenceStore,
        seq: &'a Sequence,
    ) -> impl Iterator<Item = (BlockId, Prefix, &'a [TokenId])> + use<'s, 'a> {
        let mut chain =
            Chain { num_blocks: 0, prefix: Some(Prefix::root(store.group(seq.group()).key)) };
        std::iter::from_fn(move || {
            let cache = self.tiers.gpu.cached()?;
            let (before, tokens) = self.lookup(seq, chain.num_blocks, chain.prefix?)?;
            let block = cache.find(before, tokens)?;
            chain = Chain { num_blocks: chain.num_blocks + 1, prefix: cache.prefix_of(block) };
            Some((block, before, tokens))
        })
    }

    /// Lookup keys of the leading full blocks of a sequence that are computed in the cache, or by a
    /// row of this step.
    pub(super) fn usable_blocks<'s, 'a>(
        &'s self,
        store: &SequenceStore,
        seq: &'a Sequence,
    ) -> impl Iterator<Item = (Prefix, &'a [TokenId])> + use<'s, 'a> {
        let is_usable = |block: BlockId| {
            self.tiers.gpu.cached().is_some_and(|cache| cache.is_usable(block, self.step_id))
        };
        self.known_blocks(store, seq)
            .take_while(move |(block, _, tokens)| {
                tokens.len() == self.config.block_size && is_usable(*block)
            })
            .map(|(_, before, tokens)| (before, tokens))
    }

    /// Lookup key of the full block `index` of a sequence on the device, if the prefix before it is
    /// cached.
    fn contents<'a>(
        &self,
        store: &SequenceStore,
        seq: &'a Sequence,
        index: usize,
    ) -> Option<(Prefix, &'a [TokenId])> {
        let before = self.chain_at(store, seq, index).prefix?;
        self.lookup(seq, index, before)
    }

    /// Blocks that a waiting group would share with running ones.
    pub(super) fn num_held_by_others(&self, store: &SequenceStore, group: GroupHandle) -> usize {
        let seq = store.first_seq_of(group);
        let known = self.known_blocks(store, seq);
        known.filter(|(block, ..)| self.tiers.gpu.ref_count(*block) > 0).count()
    }

    /// Tokens of a waiting sequence that are computed already in all KV groups, or in this step:
    /// admission does not charge them.
    pub(crate) fn num_cached_tokens(&self, store: &SequenceStore, seq: &Sequence) -> usize {
        if self.config.choices.charge_cached_tokens {
            return 0;
        }
        let block_size = self.config.block_size;
        if self.follow_first() {
            let num_blocks = self.usable_blocks(store, seq).count();
            return (num_blocks * block_size).min(seq.len() - 1);
        }
        let most = (seq.len() - 1) / block_size;
        let contents: Vec<_> = self.usable_blocks(store, seq).take(most).collect();
        let mut num_blocks = contents.len();
        // A shorter prefix cached in one group may not be cached in another.
        loop {
            let longest = (self.groups.iter())
                .fold(num_blocks, |most, group| group.longest_hit(&contents, most));
            if longest == num_blocks {
                return num_blocks * block_size;
            }
            num_blocks = longest;
        }
    }

    /// Whether a sequence may begin in every KV group after the prefix computed in the first.
    pub(super) fn follow_first(&self) -> bool {
        self.groups.iter().all(|group| group.kind.follows_first())
    }

    /// Marks the tokens of `seq` up to `num_tokens` as computed by its row of this step.
    pub(super) fn mark_pending(&mut self, seq: &Sequence, num_tokens: usize) {
        // Checked first: a needless division would cost as much as the rest of a decode row.
        let Some(cache) = self.tiers.gpu.cached_mut() else { return };
        let block_size = self.config.block_size;
        for index in seq.num_computed_tokens / block_size..num_tokens / block_size {
            cache.mark_pending(seq.table.block(index), self.step_id);
        }
    }

    /// Marks the tokens of a sequence from `first` to its computed count as computed, in this step
    /// or in the lookahead slots, and frees the blocks that no later query sees.
    #[inline]
    pub(crate) fn mark_computed(
        &mut self,
        store: &mut SequenceStore,
        seq: SeqHandle,
        first: usize,
    ) {
        let mut full = 0..0;
        if let Some(cache) = self.tiers.gpu.cached_mut() {
            let (entry, block_size) = (store.seq(seq), self.config.block_size);
            full = first / block_size..entry.num_computed_tokens / block_size;
            for index in full.clone() {
                cache.mark_computed(entry.table.block(index));
            }
        }
        if !self.groups.is_empty() {
            let entry = store.seq(seq);
            if !full.is_empty() || entry.num_computed_tokens >= entry.tables_fit_until {
                self.pass(store, seq, full);
            }
        }
    }

    /// Records the blocks of `full` in the KV groups beside the first, and frees those there that
    /// no later query sees.
    #[inline(never)] // few models need it: kept out of the common path
    fn pass(&mut self, store: &mut SequenceStore, seq: SeqHandle, full: Range<usize>) {
        let entry = store.seq(seq);
        for index in full {
            let Some(contents) = self.contents(store, entry, index) else { continue };
            for (group, table) in self.groups.iter_mut().zip(&entry.tables) {
                group.note(table, index, contents, self.step_id);
            }
        }
        let entry = store.seq_mut(seq);
        for (group, table) in self.groups.iter_mut().zip(&mut entry.tables) {
            group.pass(table, entry.num_computed_tokens, entry.last_step);
        }
        entry.tables_fit_until = self.fit_until(entry);
    }

    /// Marks the blocks that the step moved to the tier of `seq` as computed, since their sources
    /// were.  Not all blocks that the sequence counts are usable: it may count those of a sibling
    /// that has still to compute them.
    pub(crate) fn mark_moved(&mut self, seq: &Sequence, is_on_device: bool) {
        let tier = if is_on_device { &mut self.tiers.gpu } else { &mut self.tiers.cpu };
        if let Some(cache) = tier.cached_mut() {
            for index in 0..seq.num_computed_tokens / self.config.block_size {
                let block = seq.table.block(index);
                if cache.is_usable(block, self.step_id) {
                    cache.mark_computed(block);
                }
            }
        }
    }

    /// Drops the contents that the abandoned steps from `step_id` on computed or moved.
    pub(crate) fn abandon_since(&mut self, step_id: u64) {
        for cache in
            [&mut self.tiers.gpu, &mut self.tiers.cpu].into_iter().filter_map(Allocator::cached_mut)
        {
            cache.abandon_since(step_id);
        }
        for cache in self.groups.iter_mut().filter_map(GroupBlocks::cache_mut) {
            cache.abandon_since(step_id);
        }
    }

    /// Blocks of a group's encoder; empty without one.
    pub fn cross_blocks<'a>(&self, store: &'a SequenceStore, group: GroupHandle) -> &'a [BlockId] {
        let index = self.kinds().position(|kind| kind == KvKind::Cross);
        index.map_or(&[], |index| store.first_seq_of(group).tables[index].blocks())
    }

    /// Leading blocks of a running group, its last excluded, that are computed and common to
    /// all its sequences; none of a group that is not running.
    pub fn common_computed_blocks<'a>(
        &self,
        store: &'a SequenceStore,
        group: GroupHandle,
    ) -> &'a [BlockId] {
        let Some(cache) = self.tiers.gpu.cached() else { return &[] };
        if store.group(group).status != SequenceStatus::Running {
            return &[];
        }
        let mut tables = store.seqs_of(group).map(|seq| seq.table.blocks());
        let Some(first) = tables.next() else { return &[] };
        let without_last = first.len().saturating_sub(1);
        let num_computed =
            first[..without_last].iter().take_while(|block| cache.is_computed(**block)).count();
        let num_common = tables.fold(num_computed, |common, table| {
            first[..common].iter().zip(table).take_while(|(a, b)| a == b).count()
        });
        &first[..num_common]
    }
}
