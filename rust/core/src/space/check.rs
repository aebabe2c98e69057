//! The checker of the blocks: references, tables and tiers of every KV group.

use crate::block::Allocator;
use crate::error::{Result, ensure};
use crate::ids::BlockId;
use crate::sequence::{Sequence, SequenceStatus, SequenceStore};
use crate::space::BlockSpaceManager;

impl BlockSpaceManager {
    /// Checks that references are what the tables say, that every block is free or used, and that
    /// the tables of the KV groups beside the first hold what their kinds need and nothing else.
    ///
    /// # Errors
    /// [`crate::Error::Invariant`] with the first broken invariant.
    pub(crate) fn check(&self, store: &SequenceStore) -> Result<()> {
        for status in [SequenceStatus::Waiting, SequenceStatus::Running, SequenceStatus::Swapped] {
            let seqs = || {
                let seqs = store.seqs().map(|(_, seq)| seq);
                seqs.filter(|seq| store.group(seq.group()).status == status)
            };
            self.check_tables(store, seqs(), status)?;
            let of_group = |seq, index| Self::blocks_of(seq, index);
            let is_shared = |index: &usize| self.groups[*index].own_tiers().is_none();
            let with_first: Vec<usize> = (0..self.groups.len()).filter(is_shared).collect();
            let in_first = seqs().flat_map(|seq| {
                let others = with_first.iter().flat_map(move |index| of_group(seq, *index));
                seq.table.blocks().iter().chain(others)
            });
            check_tier("of the first KV group", status, self.tiers.of(status), in_first)?;
            for (index, other) in self.groups.iter().enumerate() {
                let Some(tiers) = other.own_tiers() else { continue };
                let blocks = seqs().flat_map(|seq| of_group(seq, index));
                let name = format!("of KV group {}", index + 1);
                check_tier(&name, status, tiers.of(status), blocks)?;
            }
        }
        Ok(())
    }

    fn blocks_of(seq: &Sequence, index: usize) -> &[BlockId] {
        seq.tables[index].blocks()
    }

    fn check_tables<'a>(
        &self,
        store: &SequenceStore,
        seqs: impl Iterator<Item = &'a Sequence>,
        status: SequenceStatus,
    ) -> Result<()> {
        for seq in seqs {
            let (computed, group) = (seq.num_computed_tokens, store.group(seq.group()));
            for (other, table) in self.groups.iter().zip(&seq.tables) {
                let is_sound = match status {
                    SequenceStatus::Waiting => table.is_empty(),
                    _ => other.is_sound(table, computed, group.num_encoder_tokens),
                };
                ensure!(
                    is_sound,
                    "{:?}, {status:?}: blocks 0..{} without {:?} for {computed} tokens",
                    other.kind,
                    table.end(),
                    table.passed()
                );
            }
            let has_copies = (self.groups.iter().zip(&seq.tables))
                .any(|(other, table)| other.has_copies(table, computed, status));
            let most = if has_copies { 0 } else { self.fit_until(seq) };
            ensure!(
                seq.tables_fit_until <= most,
                "{status:?}: tables noted to fit until {} tokens fit until {most}",
                seq.tables_fit_until
            );
        }
        Ok(())
    }
}

/// Checks a tier against the blocks that tables name, one entry per reference.
fn check_tier<'a>(
    name: &str,
    status: SequenceStatus,
    tier: Option<&Allocator>,
    blocks: impl Iterator<Item = &'a BlockId>,
) -> Result<()> {
    let Some(tier) = tier else {
        ensure!(blocks.count() == 0, "{status:?} sequences have blocks {name}");
        return Ok(());
    };
    let mut counts = vec![0u32; tier.num_total()];
    blocks.for_each(|block| counts[block.index()] += 1);
    for (block, counted) in (0u32..).map(BlockId::new).zip(&counts) {
        let kept = tier.ref_count(block);
        ensure!(
            kept == *counted,
            "{status:?} block {block:?} {name}: {kept} references, {counted} holders"
        );
    }
    let num_held = counts.iter().filter(|count| **count > 0).count();
    let (num_free, num_used) = (tier.num_free(), tier.num_used());
    ensure!(
        num_used == num_held && num_free + num_held == counts.len(),
        "{status:?} blocks {name}: {num_free} free, {num_used} used, {num_held} held of {}",
        counts.len()
    );
    Ok(())
}
