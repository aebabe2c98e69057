//! The layers with a window, as a model that knows nothing but the moves.

use pagedserve_core::config::{CacheConfig, WindowGroup};
use pagedserve_core::outputs::SchedulerOutputs;

use crate::common::arrays::Arrays;
use crate::common::slots::{Slots, at, copy_block, write};

/// What lies in the slots of both tiers.
pub struct WindowModel {
    group: WindowGroup,
    block_size: usize,
    device: Slots,
    host: Slots,
}

impl WindowModel {
    /// Empty; `None` where layers with a window have no blocks of their own.
    pub fn new(cache: &CacheConfig) -> Option<Self> {
        let model = |group| Self {
            group,
            block_size: cache.block_size,
            device: Slots::new(),
            host: Slots::new(),
        };
        cache.window_group.map(model)
    }

    /// Does the moves of a step, in order.
    pub fn move_blocks(&mut self, outputs: &SchedulerOutputs) {
        for pair in &outputs.window_blocks_to_swap_out {
            let values = copy_block(&self.device, *pair, self.block_size);
            write(&mut self.host, values);
        }
        for pair in &outputs.window_blocks_to_swap_in {
            let values = copy_block(&self.host, *pair, self.block_size);
            write(&mut self.device, values);
        }
        for pair in &outputs.window_blocks_to_copy {
            let values = copy_block(&self.device, *pair, self.block_size);
            write(&mut self.device, values);
        }
    }

    /// Writes every token of a row, and guesses of its own into the lookahead behind them.
    pub fn write(&mut self, outputs: &SchedulerOutputs, arrays: &Arrays, row: usize, keys: &[u64]) {
        for index in at(arrays.query_start[row])..at(arrays.query_start[row + 1]) {
            let position = usize::try_from(arrays.positions[index]).unwrap();
            let slot = usize::try_from(arrays.window_slots[index]).unwrap();
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

    /// Each query of a row finds the keys of its window, once all rows have written.
    pub fn attend(&self, outputs: &SchedulerOutputs, arrays: &Arrays, row: usize, keys: &[u64]) {
        let num_keys = at(arrays.seq_lens[row]);
        let first_query = usize::try_from(arrays.positions[at(arrays.query_start[row])]).unwrap();
        let hidden = (first_query + 1).saturating_sub(self.group.window);
        for (position, key) in keys.iter().enumerate().take(num_keys).skip(hidden) {
            let found = self.device.get(&self.slot(outputs, arrays, row, position));
            assert_eq!(found, Some(key), "row {row} sees a foreign window key at {position}");
        }
    }

    fn slot(
        &self,
        outputs: &SchedulerOutputs,
        arrays: &Arrays,
        row: usize,
        position: usize,
    ) -> usize {
        let table = &arrays.window_tables[row * outputs.max_num_blocks..];
        at(table[position / self.block_size]) * self.block_size + position % self.block_size
    }
}
