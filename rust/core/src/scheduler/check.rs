//! The whole-state checker: every invariant that spans modules, in one place.
//!
//! Costs: O(everything), and it allocates; for tests, fuzzing and idle moments.

use std::collections::BTreeSet;

use crate::error::{Result, ensure};
use crate::ids::{BlockId, BlockPair};
use crate::outputs::Moves;
use crate::scheduler::Scheduler;
use crate::sequence::{GroupHandle, SequenceStatus};
use crate::table::num_blocks_for;

impl Scheduler {
    /// Checks the whole state; allowed at any moment between two calls.
    ///
    /// # Errors
    /// [`crate::Error::Invariant`] with the first broken invariant.
    pub fn check(&self) -> Result<()> {
        self.check_membership()?;
        self.check_sequences()?;
        self.space.check(&self.store)?;
        self.check_budget()?;
        self.check_adapters()?;
        self.check_moves()
    }

    /// Checks that a group is in the queue of its status once, and a sequence in its group once.
    fn check_membership(&self) -> Result<()> {
        let queues = [
            (&self.queues.waiting, SequenceStatus::Waiting),
            (&self.queues.running, SequenceStatus::Running),
            (&self.queues.swapped, SequenceStatus::Swapped),
        ];
        let mut num_queued = 0;
        for (queue, status) in queues {
            num_queued += queue.len();
            for group in queue {
                let found = self.store.find_group(*group)?.status;
                ensure!(found == status, "group {group:?}, {found:?}, is in the {status:?} queue");
            }
        }
        let num_groups = self.store.groups().count();
        ensure!(num_queued == num_groups, "{num_groups} groups live, {num_queued} are queued");
        let mut num_seqs = 0;
        for (handle, group) in self.store.groups() {
            ensure!(!group.seqs.is_empty(), "group {handle:?} lives without sequences");
            ensure!(
                group.seqs.len() <= group.max_num_running_seqs(),
                "group {handle:?} has {} sequences, more than it may have",
                group.seqs.len()
            );
            num_seqs += group.seqs.len();
            for seq in &group.seqs {
                ensure!(
                    self.store.find_seq(*seq)?.group() == handle,
                    "sequence {seq:?} is listed by a group that is not its own"
                );
            }
        }
        let num_alive = self.store.seqs().count();
        ensure!(num_alive == num_seqs, "{num_alive} sequences live, groups list {num_seqs}");
        Ok(())
    }

    /// Checks that computed tokens are backed by blocks, and that no block is held without need.
    fn check_sequences(&self) -> Result<()> {
        let block_size = self.space.block_size();
        for (handle, seq) in self.store.seqs() {
            let status = self.store.group(seq.group()).status;
            let (computed, len) = (seq.num_computed_tokens, seq.len());
            ensure!(computed < len, "sequence {handle:?}: {computed} of {len} tokens computed");
            let tokens = seq.token_ids();
            let (newest, known) = tokens.split_last().expect("never empty");
            ensure!(
                known.iter().all(|token| *token >= 0)
                    && (*newest >= 0 || self.unresolved.holds(handle)),
                "sequence {handle:?} holds a placeholder that no step resolves"
            );
            let num_slots = len + self.config.num_lookahead_slots;
            let (least, most) = if status == SequenceStatus::Waiting {
                (0, 0)
            } else {
                (num_blocks_for(computed, block_size), num_blocks_for(num_slots, block_size))
            };
            let num_blocks = seq.table.len();
            ensure!(
                (least..=most).contains(&num_blocks),
                "sequence {handle:?}, {status:?}: {num_blocks} blocks for {computed}/{len} tokens"
            );
            ensure!(
                status != SequenceStatus::Waiting || computed == 0,
                "sequence {handle:?} waits with {computed} tokens computed"
            );
        }
        Ok(())
    }

    fn check_budget(&self) -> Result<()> {
        let of_group = |group: &GroupHandle| self.store.group(*group).num_budgeted_seqs();
        let num_seqs: usize = self.queues.running.iter().map(of_group).sum();
        ensure!(num_seqs <= self.config.max_num_seqs, "{num_seqs} sequences run");
        let num_tokens = self.outputs.num_batched_tokens;
        ensure!(num_tokens <= self.config.max_num_batched_tokens, "{num_tokens} tokens scheduled");
        Ok(())
    }

    /// Checks that the adapter of every running group has a slot, and that none has two.
    fn check_adapters(&self) -> Result<()> {
        let adapters: BTreeSet<u32> = self.adapters.adapters().collect();
        let num_slots = self.adapters.adapters().count();
        ensure!(adapters.len() == num_slots, "an adapter has two slots");
        ensure!(num_slots <= self.config.max_loras.unwrap_or(0), "{num_slots} adapter slots");
        for group in &self.queues.running {
            let adapter = self.store.group(*group).key.adapter;
            ensure!(
                adapter == 0 || adapters.contains(&adapter),
                "group {group:?} runs while its adapter, {adapter}, has no slot"
            );
        }
        Ok(())
    }

    /// Checks that no block is the destination of two moves of a step, or copied onto itself.  If
    /// all blocks are swapped in, two groups may move the same contents to one cached block.
    fn check_moves(&self) -> Result<()> {
        let moves_all = self.space.config().choices.swap_in_cached_blocks;
        for Moves { swap_out, swap_in, copy } in &self.outputs.moves {
            let device = swap_in.iter().chain(copy);
            for pairs in [device.collect::<Vec<&BlockPair>>(), swap_out.iter().collect()] {
                let destinations: BTreeSet<BlockId> = pairs.iter().map(|(_, to)| *to).collect();
                ensure!(
                    moves_all || destinations.len() == pairs.len(),
                    "two moves have one destination"
                );
            }
            let is_idle = |(from, to): &BlockPair| from == to;
            ensure!(!copy.iter().any(is_idle), "a block is copied onto itself");
        }
        Ok(())
    }
}
