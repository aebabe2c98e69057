//! The only place that creates and removes sequences and groups.
//!
//! Owns both arenas.  Invariants:
//! 1. Every living sequence is listed by the living group that it names, once.
//! 2. Sequences and groups are removed with empty block tables, after their blocks were freed.

use crate::arena::Arena;
use crate::error::{Error, Result};
use crate::ids::TokenId;
use crate::sequence::{GroupHandle, Request, SeqHandle, Sequence, SequenceGroup};
use crate::table::SpanTable;

/// All live sequences and groups.
#[derive(Clone, Debug)]
pub struct SequenceStore {
    block_size: usize,
    /// KV groups beside the first.
    num_tables: usize,
    seqs: Arena<Sequence>,
    groups: Arena<SequenceGroup>,
}

const LIVES: &str = "a handle kept in a queue or group lives, store invariant 1";

impl SequenceStore {
    /// Creates a store of sequences with blocks of `block_size` tokens and `num_tables` tables
    /// beside the first.
    pub(crate) fn new(block_size: usize, num_tables: usize) -> Self {
        Self { block_size, num_tables, seqs: Arena::default(), groups: Arena::default() }
    }

    /// Creates a group with a sequence for each branch of its prompt; returns its first one.
    pub(crate) fn add_group(&mut self, request: &Request<'_>) -> (GroupHandle, SeqHandle) {
        let group = self.groups.insert(SequenceGroup::new(request));
        let Some((first, others)) = request.branches.split_first() else {
            return (group, self.add_seq(group, request.prompt));
        };
        let seq = self.add_seq(group, &[request.prompt, first].concat());
        for branch in others {
            self.add_seq(group, &[request.prompt, branch].concat());
        }
        (group, seq)
    }

    fn add_seq(&mut self, group: GroupHandle, prompt: &[TokenId]) -> SeqHandle {
        let seq = Sequence::new(group, prompt, self.block_size, self.num_tables);
        let seq = self.seqs.insert(seq);
        self.group_mut(group).join(seq);
        seq
    }

    /// Creates a child of `parent` with its history and tables, in the same group, last in order.
    pub(crate) fn fork(&mut self, parent: SeqHandle) -> SeqHandle {
        self.seq_mut(parent).tables_fit_until = 0;
        let child = self.seq(parent).clone();
        let group = child.group();
        let child = self.seqs.insert(child);
        self.group_mut(group).join(child);
        child
    }

    /// Removes a sequence that its group no longer lists.
    pub(crate) fn remove_seq(&mut self, seq: SeqHandle) {
        let removed = self.seqs.remove(seq).expect(LIVES);
        let is_empty = removed.table.is_empty() && removed.tables.iter().all(SpanTable::is_empty);
        debug_assert!(is_empty, "store invariant 2");
    }

    /// Removes a group with the sequences that it still lists.
    pub(crate) fn remove_group(&mut self, group: GroupHandle) {
        let removed = self.groups.remove(group).expect(LIVES);
        for seq in removed.seqs {
            self.remove_seq(seq);
        }
    }

    /// A group known to live.
    pub(crate) fn group(&self, group: GroupHandle) -> &SequenceGroup {
        self.groups.get(group).expect(LIVES)
    }

    pub(crate) fn group_mut(&mut self, group: GroupHandle) -> &mut SequenceGroup {
        self.groups.get_mut(group).expect(LIVES)
    }

    /// A sequence known to live.
    pub(crate) fn seq(&self, seq: SeqHandle) -> &Sequence {
        self.seqs.get(seq).expect(LIVES)
    }

    pub(crate) fn seq_mut(&mut self, seq: SeqHandle) -> &mut Sequence {
        self.seqs.get_mut(seq).expect(LIVES)
    }

    /// The sequences of a group known to live, in group order.
    pub(crate) fn seqs_of(&self, group: GroupHandle) -> impl Iterator<Item = &Sequence> {
        self.group(group).seqs.iter().map(|seq| self.seq(*seq))
    }

    /// The first sequence of a group known to live.
    pub(crate) fn first_seq_of(&self, group: GroupHandle) -> &Sequence {
        self.seq(self.group(group).seqs[0])
    }

    /// Applies `change` to each sequence of a group known to live, in group order.
    pub(crate) fn for_each_seq(
        &mut self,
        group: GroupHandle,
        mut change: impl FnMut(SeqHandle, &mut Sequence),
    ) {
        for seq in &self.groups.get(group).expect(LIVES).seqs {
            change(*seq, self.seqs.get_mut(*seq).expect(LIVES));
        }
    }

    /// Looks up a sequence by handle.
    ///
    /// # Errors
    /// [`Error::StaleHandle`].
    pub fn find_seq(&self, seq: SeqHandle) -> Result<&Sequence> {
        self.seqs.get(seq).ok_or(Error::StaleHandle { kind: "sequence", bits: seq.to_bits() })
    }

    /// Looks up a group by handle.
    ///
    /// # Errors
    /// [`Error::StaleHandle`].
    pub fn find_group(&self, group: GroupHandle) -> Result<&SequenceGroup> {
        let stale = Error::StaleHandle { kind: "sequence group", bits: group.to_bits() };
        self.groups.get(group).ok_or(stale)
    }

    /// All live sequences, in slot order.
    pub fn seqs(&self) -> impl Iterator<Item = (SeqHandle, &Sequence)> {
        self.seqs.iter()
    }

    /// All live groups, in slot order.
    pub fn groups(&self) -> impl Iterator<Item = (GroupHandle, &SequenceGroup)> {
        self.groups.iter()
    }
}
