//! The KV groups beside the first, each as a model that knows only the moves.

use pagedserve_core::config::{CacheConfig, KvGroup, KvKind};
use pagedserve_core::outputs::{Moves, SchedulerOutputs};

use crate::common::arrays::Arrays;
use crate::common::slots::{Slots, at, copy_block, write};

/// Contents of the slots of both tiers of a group's pool.
pub struct GroupModel {
    group: KvGroup,
    /// Index of the group among those beside the first.
    index: usize,
    block_size: usize,
    device: Slots,
    host: Slots,
}

impl GroupModel {
    /// Creates an empty model for each group with a separate pool.
    pub fn all(cache: &CacheConfig) -> Vec<Self> {
        let groups = cache.groups.iter().enumerate();
        let with_pool = groups.filter(|(_, group)| group.kind != KvKind::Cross);
        with_pool
            .map(|(index, group)| Self {
                group: *group,
                index,
                // A state is the one slot of its block.
                block_size: if group.kind == KvKind::State { 1 } else { cache.block_size },
                device: Slots::new(),
                host: Slots::new(),
            })
            .collect()
    }

    /// Does the moves of a step, in order.
    pub fn move_blocks(&mut self, outputs: &SchedulerOutputs) {
        let moves = &outputs.moves[self.index + 1];
        move_blocks(moves, self.block_size, &mut self.device, &mut self.host);
    }

    /// Writes every token of a row, and keys of drafts into the lookahead after them.
    pub fn write(&mut self, outputs: &SchedulerOutputs, arrays: &Arrays, row: usize, keys: &[u64]) {
        if self.group.kind == KvKind::State {
            return;
        }
        for index in at(arrays.query_start[row])..at(arrays.query_start[row + 1]) {
            let position = usize::try_from(arrays.positions[index]).unwrap();
            let slot = usize::try_from(arrays.group_slots[self.index][index]).unwrap();
            assert_eq!(slot, self.slot(outputs, arrays, row, position));
            self.device.insert(slot, keys[position]);
        }
        let num_keys = at(arrays.seq_lens[row]);
        if row >= outputs.num_prefill_rows {
            let num_free = outputs.num_lookahead_slots - outputs.rows[row].num_drafts;
            for position in num_keys..num_keys + num_free {
                self.device.insert(self.slot(outputs, arrays, row, position), u64::MAX);
            }
        }
    }

    /// Asserts that each query of a row finds the keys that it sees, once all rows have written; a
    /// state is that of all tokens before the row, and becomes that of the last.
    pub fn attend(
        &mut self,
        outputs: &SchedulerOutputs,
        arrays: &Arrays,
        row: usize,
        keys: &[u64],
    ) {
        let num_keys = at(arrays.seq_lens[row]);
        let first_query = usize::try_from(arrays.positions[at(arrays.query_start[row])]).unwrap();
        let (first_seen, num_sinks) = match self.group.kind {
            KvKind::Window { window, num_sink_tokens } => {
                ((first_query + 1).saturating_sub(window), num_sink_tokens)
            }
            KvKind::Chunked(chunk) => (first_query / chunk * chunk, 0),
            _ => return self.advance_state(arrays, row, first_query, &keys[..num_keys]),
        };
        let is_seen = |position: usize| position < num_sinks || first_seen <= position;
        let seen =
            keys.iter().enumerate().take(num_keys).filter(|(position, _)| is_seen(*position));
        for (position, key) in seen {
            let found = self.device.get(&self.slot(outputs, arrays, row, position));
            assert_eq!(found, Some(key), "row {row} sees a foreign key at {position}");
        }
    }

    fn advance_state(&mut self, arrays: &Arrays, row: usize, first_query: usize, keys: &[u64]) {
        let slot = at(arrays.group_tables[self.index][row]);
        if first_query > 0 {
            let found = self.device.get(&slot);
            assert_eq!(found, Some(&keys[first_query - 1]), "row {row} continues a foreign state");
        }
        self.device.insert(slot, keys[keys.len() - 1]);
    }

    fn slot(
        &self,
        outputs: &SchedulerOutputs,
        arrays: &Arrays,
        row: usize,
        position: usize,
    ) -> usize {
        let table = &arrays.group_tables[self.index][row * outputs.table_widths[self.index]..];
        at(table[position / self.block_size]) * self.block_size + position % self.block_size
    }
}

/// Does the moves of a pool's blocks, in order.
pub fn move_blocks(moves: &Moves, block_size: usize, device: &mut Slots, host: &mut Slots) {
    for pair in &moves.swap_out {
        let values = copy_block(device, *pair, block_size);
        write(host, values);
    }
    for pair in &moves.swap_in {
        let values = copy_block(host, *pair, block_size);
        write(device, values);
    }
    for pair in &moves.copy {
        let values = copy_block(device, *pair, block_size);
        write(device, values);
    }
}
