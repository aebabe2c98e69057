//! The whole-state checker: every invariant that spans modules, in one place.
//!
//! Costs: O(everything), and it allocates; for tests, fuzzing and idle moments.

use std::collections::BTreeSet;

use crate::block::Allocator;
use crate::error::{Error, Result};
use crate::ids::{BlockId, BlockPair};
use crate::scheduler::Scheduler;
use crate::sequence::{GroupHandle, Sequence, SequenceStatus};
use crate::table::{BlockTable, num_blocks_for};

macro_rules! ensure {
    ($holds:expr, $($text:tt)*) => {
        if !$holds {
            return Err(Error::Invariant(format!($($text)*)));
        }
    };
}

/// One tier as the checker sees it.
struct Tier {
    name: &'static str,
    status: SequenceStatus,
    num_free: usize,
    num_used: usize,
    num_total: usize,
}

impl Scheduler {
    /// Checks the whole state, at any moment between two calls.
    ///
    /// # Errors
    /// [`Error::Invariant`] with the first broken one.
    pub fn check(&self) -> Result<()> {
        self.check_membership()?;
        self.check_sequences()?;
        let (gpu, cpu) = (self.space.gpu(), self.space.cpu());
        let of_gpu = Tier {
            name: "device",
            status: SequenceStatus::Running,
            num_free: gpu.num_free(),
            num_used: gpu.num_used(),
            num_total: gpu.num_total(),
        };
        let of_cpu = Tier {
            name: "host",
            status: SequenceStatus::Swapped,
            num_free: cpu.num_free(),
            num_used: cpu.num_used(),
            num_total: cpu.num_total(),
        };
        self.check_tier(&of_gpu, |block| gpu.ref_count(block))?;
        self.check_tier(&of_cpu, |block| cpu.ref_count(block))?;
        self.check_budget()?;
        self.check_adapters()?;
        self.check_states()?;
        self.check_windows()?;
        self.check_moves()
    }

    /// Every group is in the queue of its status, once; every sequence in its group, once.
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

    /// Computed tokens are backed by blocks, and there are no blocks without need.
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

    /// Reference counts are what the tables say, and every block is free or used.
    fn check_tier(&self, tier: &Tier, ref_count: impl Fn(BlockId) -> u32) -> Result<()> {
        let &Tier { name, status, num_free, num_used, num_total } = tier;
        let mut counts = vec![0u32; num_total];
        let of_tier = |group: GroupHandle| self.store.group(group).status == status;
        let seqs = self.store.seqs().filter(|(_, seq)| of_tier(seq.group()));
        let groups = self.store.groups().filter(|(group, _)| of_tier(*group));
        let tables = seqs.map(|(_, seq)| &seq.table).chain(groups.map(|(_, g)| &g.cross_table));
        for block in tables.flat_map(BlockTable::blocks) {
            counts[block.index()] += 1;
        }
        for (block, counted) in (0u32..).map(BlockId::new).zip(&counts) {
            let kept = ref_count(block);
            ensure!(
                kept == *counted,
                "{name} block {block:?}: {kept} references, {counted} holders"
            );
        }
        let num_held = counts.iter().filter(|count| **count > 0).count();
        ensure!(
            num_used == num_held && num_free + num_held == num_total,
            "{name}: {num_free} free, {num_used} used, {num_held} held of {num_total}"
        );
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

    /// The adapter of every running group has a slot, and none has two.
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

    /// Every sequence that does not wait has a state slot where there are any, counted as often as
    /// it is had; and those that run share none.
    fn check_states(&self) -> Result<()> {
        for status in [SequenceStatus::Running, SequenceStatus::Swapped] {
            let Some(tier) = self.states.tier(status) else { continue };
            let mut counts = vec![0u32; tier.num_total()];
            for (handle, seq) in self.store.seqs() {
                if self.store.group(seq.group()).status == status && self.states.is_on() {
                    let Some(slot) = seq.state_slot else {
                        return Err(Error::Invariant(format!("{handle:?} has no state slot")));
                    };
                    counts[slot.index()] += 1;
                }
            }
            for (slot, counted) in (0u32..).map(BlockId::new).zip(&counts) {
                let kept = tier.ref_count(slot);
                ensure!(
                    kept == *counted,
                    "{status:?} state slot {slot:?}: {kept} references, {counted} holders"
                );
            }
            let num_held = counts.iter().filter(|count| **count > 0).count();
            ensure!(tier.num_used() == num_held, "{} used, {num_held} held", tier.num_used());
        }
        let waits =
            |seq: &Sequence| self.store.group(seq.group()).status == SequenceStatus::Waiting;
        ensure!(
            self.store.seqs().all(|(_, seq)| !waits(seq) || seq.state_slot.is_none()),
            "a sequence waits with a state slot"
        );
        Ok(())
    }

    /// Window blocks are counted as often as they are had, and a table holds what later queries see
    /// and nothing before it.
    fn check_windows(&self) -> Result<()> {
        for status in [SequenceStatus::Waiting, SequenceStatus::Running, SequenceStatus::Swapped] {
            let tier = self.windows.tier(status);
            let mut counts = vec![0u32; tier.map_or(0, Allocator::num_total)];
            let has_status = |seq: &Sequence| self.store.group(seq.group()).status == status;
            for (handle, seq) in self.store.seqs().filter(|(_, seq)| has_status(seq)) {
                let (table, computed) = (&seq.window_table, seq.num_computed_tokens);
                let first = self.windows.first_seen(computed);
                let end = num_blocks_for(computed, self.space.block_size());
                ensure!(
                    table.blocks().is_empty()
                        && (tier.is_none() || !self.windows.is_on() || computed == 0)
                        || table.first() == first && table.end() >= end,
                    "sequence {handle:?}, {status:?}: window blocks {}..{} for {computed} tokens",
                    table.first(),
                    table.end()
                );
                table.blocks().iter().for_each(|block| counts[block.index()] += 1);
            }
            for (block, counted) in (0u32..).map(BlockId::new).zip(&counts) {
                let kept = tier.map_or(0, |tier| tier.ref_count(block));
                ensure!(
                    kept == *counted,
                    "{status:?} window block {block:?}: {kept} references, {counted} holders"
                );
            }
        }
        Ok(())
    }

    /// No block is the destination of two moves of a step, nor copied onto itself.  Where all
    /// blocks are swapped in, two groups may bring the same contents to one cached block.
    fn check_moves(&self) -> Result<()> {
        let outputs = &self.outputs;
        let moves_all = self.space.config().choices.swap_in_cached_blocks;
        let device = outputs.blocks_to_swap_in.iter().chain(&outputs.blocks_to_copy);
        let host = outputs.blocks_to_swap_out.iter();
        for pairs in [device.collect::<Vec<&BlockPair>>(), host.collect()] {
            let destinations: BTreeSet<BlockId> = pairs.iter().map(|(_, to)| *to).collect();
            ensure!(
                moves_all || destinations.len() == pairs.len(),
                "two moves have one destination"
            );
        }
        let is_idle = |(from, to): &BlockPair| from == to;
        ensure!(!outputs.blocks_to_copy.iter().any(is_idle), "a block is copied onto itself");
        Ok(())
    }
}
