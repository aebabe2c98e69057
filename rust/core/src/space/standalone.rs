//! Block manager for other schedulers.
//!
//! Owns a [`BlockSpaceManager`] and the sequences whose tables it keeps, and checks what the
//! scheduler of this crate guarantees by construction: a call out of order is an error and changes
//! nothing.
//!
//! Invariants and costs are those of the manager.

use crate::arena::Handle;
use crate::config::CacheConfig;
use crate::error::{Error, Result};
use crate::ids::{BlockPair, TokenId};
use crate::outputs::Moves;
use crate::sequence::{
    GroupHandle, Request, SeqHandle, Sequence, SequenceGroup, SequenceStatus, SequenceStore,
};
use crate::space::{AllocStatus, BlockSpaceManager};

/// Block tables of groups that the caller schedules.
#[derive(Clone, Debug)]
pub struct StandaloneSpace {
    space: BlockSpaceManager,
    store: SequenceStore,
    num_lookahead_slots: usize,
    step_id: u64,
    moves: Vec<Moves>,
}

impl StandaloneSpace {
    /// Creates both tiers with all blocks free.
    ///
    /// # Errors
    /// [`Error::Config`] from the validation of `config`.
    pub fn new(config: &CacheConfig, num_lookahead_slots: usize) -> Result<Self> {
        config.validate()?;
        let space = BlockSpaceManager::new(config, num_lookahead_slots, usize::MAX)?;
        Ok(Self {
            moves: vec![Moves::default(); space.num_groups()],
            space,
            store: SequenceStore::new(config.block_size, config.groups.len()),
            num_lookahead_slots,
            step_id: 0,
        })
    }

    /// The manager, for its queries and counts.
    pub fn space(&self) -> &BlockSpaceManager {
        &self.space
    }

    /// The moves of the last call that made any, in the pool of each KV group; those of the first
    /// are what that call returned.
    pub fn moves(&self) -> &[Moves] {
        &self.moves
    }

    /// The sequences and groups.
    pub fn store(&self) -> &SequenceStore {
        &self.store
    }

    /// Begins a step, in which sequences may share what one of them computes.
    pub fn begin_step(&mut self) {
        self.step_id += 1;
        self.space.begin_step(self.step_id);
    }

    /// Adds a group without blocks.
    ///
    /// # Errors
    /// [`Error::Request`] for an empty prompt, a negative token, or more encoder tokens than can
    /// be counted.
    pub fn add_group(&mut self, request: &Request<'_>) -> Result<(GroupHandle, SeqHandle)> {
        request.check(self.space.config())?;
        Ok(self.store.add_group(request))
    }

    /// Whether blocks for the tokens of a waiting group can be allocated.
    ///
    /// # Errors
    /// [`Error::StaleHandle`]; [`Error::Step`] when the group has blocks already.
    pub fn can_allocate(&self, group: GroupHandle) -> Result<AllocStatus> {
        self.expect_status(group, SequenceStatus::Waiting)?;
        Ok(self.space.can_allocate(&self.store, group, || self.num_uncomputed(group)))
    }

    /// Allocates the blocks of a waiting group; cached tokens count as computed.
    ///
    /// # Errors
    /// As [`can_allocate`](Self::can_allocate), and [`Error::Step`] unless it returns ok.
    pub fn allocate(&mut self, group: GroupHandle) -> Result<()> {
        let status = self.can_allocate(group)?;
        permit(status == AllocStatus::Ok, || format!("can_allocate answers {status:?}"))?;
        self.space.allocate(&mut self.store, group);
        self.store.group_mut(group).status = SequenceStatus::Running;
        self.begin_rows(group);
        Ok(())
    }

    fn num_uncomputed(&self, group: GroupHandle) -> usize {
        self.store.seqs_of(group).map(Sequence::num_uncomputed_tokens).sum()
    }

    /// Gives the KV groups beside the first blocks for all uncomputed tokens.
    fn begin_rows(&mut self, group: GroupHandle) {
        let Self { space, store, moves, .. } = self;
        moves.iter_mut().for_each(Moves::clear);
        store.for_each_seq(group, |_, seq| {
            space.map(seq, seq.num_uncomputed_tokens(), moves);
        });
    }

    /// Appends a token to a running sequence, whose tokens before it are computed now.
    ///
    /// # Errors
    /// [`Error::StaleHandle`], [`Error::Request`] for a negative token, [`Error::Step`] when the
    /// sequence has no device blocks, or none for its newest token.
    pub fn append_token(&mut self, seq: SeqHandle, token: TokenId) -> Result<()> {
        let entry = self.store.find_seq(seq)?;
        let (group, num_tokens) = (entry.group(), entry.len());
        let num_slots = entry.table.len() * self.space.block_size();
        self.expect_status(group, SequenceStatus::Running)?;
        permit(num_tokens <= num_slots, || {
            format!(
                "the sequence has {num_tokens} tokens and slots for {num_slots}; call append_slots"
            )
        })?;
        if token < 0 {
            return Err(Error::Request(format!("the token id is {token}; ids are at least 0")));
        }
        self.set_computed(seq, self.store.seq(seq).len());
        self.store.seq_mut(seq).append(token);
        self.store.group_mut(group).is_prefill = false;
        Ok(())
    }

    /// Marks the first `num_tokens` tokens of a running sequence as computed.
    ///
    /// # Errors
    /// [`Error::StaleHandle`]; [`Error::Step`] when the sequence has no device blocks, or for
    /// fewer tokens than before, or more than all but the last.
    pub fn mark_computed(&mut self, seq: SeqHandle, num_tokens: usize) -> Result<()> {
        let entry = self.store.find_seq(seq)?;
        self.expect_status(entry.group(), SequenceStatus::Running)?;
        let accepted = entry.num_computed_tokens..entry.len();
        permit(accepted.contains(&num_tokens), || {
            format!("{num_tokens} computed tokens; {accepted:?} are accepted")
        })?;
        self.set_computed(seq, num_tokens);
        Ok(())
    }

    fn set_computed(&mut self, seq: SeqHandle, num_tokens: usize) {
        let entry = self.store.seq_mut(seq);
        let first = entry.num_computed_tokens;
        entry.num_computed_tokens = num_tokens;
        entry.last_step = self.step_id;
        self.space.mark_computed(&mut self.store, seq, first);
    }

    /// Whether every sequence of a running group can be given slots for its next token.
    ///
    /// # Errors
    /// [`Error::StaleHandle`]; [`Error::Step`] when the group has no device blocks.
    pub fn can_append_slots(&self, group: GroupHandle) -> Result<bool> {
        self.expect_status(group, SequenceStatus::Running)?;
        Ok(self.space.can_append_first(&self.store, group)
            && self.space.can_map(&self.store, group, self.num_uncomputed(group)))
    }

    /// Allocates slots for the next tokens of all sequences of a running group; returns the
    /// copies to make, (source, destination).
    ///
    /// # Errors
    /// As [`can_append_slots`](Self::can_append_slots), and [`Error::Step`] unless it returns
    /// true.
    pub fn append_slots(&mut self, group: GroupHandle) -> Result<Vec<BlockPair>> {
        let can_append = self.can_append_slots(group)?;
        permit(can_append, || {
            format!(
                "the group may need {} blocks with {} lookahead slots; {} are free",
                self.space.append_demand(&self.store, group),
                self.num_lookahead_slots,
                self.space.gpu().num_free()
            )
        })?;
        self.begin_rows(group);
        for index in 0..self.store.group(group).seqs.len() {
            let seq = self.store.group(group).seqs[index];
            self.space.append_seq(&mut self.store, seq, &mut self.moves[0].copy);
        }
        Ok(self.moves[0].copy.clone())
    }

    /// Forks a running sequence: the child shares its blocks and is the last of its group.
    ///
    /// # Errors
    /// [`Error::StaleHandle`]; [`Error::Step`] when the sequence has no device blocks.
    pub fn fork(&mut self, seq: SeqHandle) -> Result<SeqHandle> {
        self.expect_status(self.store.find_seq(seq)?.group(), SequenceStatus::Running)?;
        let child = self.store.fork(seq);
        self.space.fork(self.store.seq(child));
        Ok(child)
    }

    /// Whether the host has enough free blocks for a running group.
    ///
    /// # Errors
    /// [`Error::StaleHandle`]; [`Error::Step`] when the group has no device blocks.
    pub fn can_swap_out(&self, group: GroupHandle) -> Result<bool> {
        self.expect_status(group, SequenceStatus::Running)?;
        Ok(self.space.can_swap_out(&self.store, group))
    }

    /// Moves a running group to the host; returns the moves, (device, host).
    ///
    /// # Errors
    /// As [`can_swap_out`](Self::can_swap_out), and [`Error::Step`] unless it returns true.
    pub fn swap_out(&mut self, group: GroupHandle) -> Result<Vec<BlockPair>> {
        permit(self.can_swap_out(group)?, || "can_swap_out answers no".to_owned())?;
        self.moves.iter_mut().for_each(Moves::clear);
        self.space.swap_out(&mut self.store, group, &mut self.moves);
        self.store.group_mut(group).status = SequenceStatus::Swapped;
        Ok(self.moves[0].swap_out.clone())
    }

    /// Whether a swapped group can be swapped in.
    ///
    /// # Errors
    /// [`Error::StaleHandle`]; [`Error::Step`] when the group is not swapped out.
    pub fn can_swap_in(&self, group: GroupHandle) -> Result<AllocStatus> {
        self.expect_status(group, SequenceStatus::Swapped)?;
        Ok(self.space.can_swap_in(&self.store, group))
    }

    /// Moves a swapped group to the device; returns the moves, (host, device).
    ///
    /// # Errors
    /// As [`can_swap_in`](Self::can_swap_in), and [`Error::Step`] unless it returns ok.
    pub fn swap_in(&mut self, group: GroupHandle) -> Result<Vec<BlockPair>> {
        let status = self.can_swap_in(group)?;
        permit(status == AllocStatus::Ok, || format!("can_swap_in answers {status:?}"))?;
        self.moves.iter_mut().for_each(Moves::clear);
        self.space.swap_in(&mut self.store, group, &mut self.moves);
        self.store.group_mut(group).status = SequenceStatus::Running;
        Ok(self.moves[0].swap_in.clone())
    }

    /// Ends one sequence; its group ends with the last.
    ///
    /// # Errors
    /// [`Error::StaleHandle`].
    pub fn free(&mut self, seq: SeqHandle) -> Result<()> {
        let group = self.store.find_seq(seq)?.group();
        self.space.free(&mut self.store, seq);
        self.store.group_mut(group).leave(seq);
        self.store.remove_seq(seq);
        if self.store.group(group).seqs.is_empty() {
            self.store.remove_group(group);
        }
        Ok(())
    }

    /// Looks up a sequence.
    ///
    /// # Errors
    /// [`Error::StaleHandle`].
    pub fn sequence(&self, seq: SeqHandle) -> Result<&Sequence> {
        self.store.find_seq(seq)
    }

    /// Looks up a group.
    ///
    /// # Errors
    /// [`Error::StaleHandle`].
    pub fn group(&self, group: GroupHandle) -> Result<&SequenceGroup> {
        self.store.find_group(group)
    }

    /// Drops every cached prefix.  Returns false, without effect, while a block is used.
    pub fn reset_prefix_cache(&mut self) -> bool {
        self.space.reset_prefix_cache()
    }

    fn expect_status(&self, group: GroupHandle, wanted: SequenceStatus) -> Result<()> {
        let found = self.store.find_group(group)?.status;
        let bits = Handle::to_bits(group);
        permit(found == wanted, || format!("group {bits} is {found:?}; it must be {wanted:?}"))
    }
}

fn permit(holds: bool, refusal: impl FnOnce() -> String) -> Result<()> {
    if holds { Ok(()) } else { Err(Error::Step(refusal())) }
}
