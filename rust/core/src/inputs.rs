//! Model inputs of one step, written into arrays that the caller owns.
//!
//! With T tokens, R rows, S samples and B blocks in the longest table:
//!
//! | array | shape | meaning |
//! |---|---|---|
//! | `token_ids` | T | inputs, rows packed one after another |
//! | `positions` | T | position of each token in its sequence |
//! | `slot_mapping` | T | slot of its keys and values: block * block size + offset, or -1 if they are already in the cache |
//! | `query_start` | R + 1 | row boundaries in T |
//! | `seq_lens` | R | keys visible to the last token of the row, drafts included |
//! | `block_tables` | R x B | physical blocks, row-major, padded with 0 |
//! | `sample_index` | S | positions in T whose logits are sampled from, ascending |
//! | `sample_rows` | S | the row of each |
//! | `row_handles` | R | [`crate::arena::Handle::to_bits`] of the sequence |
//! | `adapter_slots` | R, or none without `max_loras` | adapter slot of the row, -1 for the base model |
//! | `group_tables` | of each KV group beside the first, R x [its width](SchedulerOutputs::table_widths) | its blocks, as `block_tables`, 0 for blocks that no query sees; one state each, or the blocks of the encoder |
//! | `group_slots` | of each KV group beside the first, T or nothing | slots of keys and values in a group with a window, as `slot_mapping` |
//! | `cross_lens` | R, or none without encoders | tokens of the encoder's output |
//!
//! A row with D draft tokens has D more tokens and samples, after its last.
//!
//! Costs: O(T + R x B) a KV group, no allocation.

use crate::error::{Error, Result};
use crate::ids::{BlockId, TokenId};
use crate::outputs::SchedulerOutputs;
use crate::sequence::{Sequence, SequenceStore};
use crate::space::BlockSpaceManager;
use crate::table::{SpanTable, num_blocks_for};

/// Arrays of the caller; each may be longer than the step needs.
///
/// Start from the default, which has empty arrays, and assign those that the scheduler needs.
#[derive(Debug, Default)]
#[expect(missing_docs, reason = "the fields are described in the module's table")]
#[non_exhaustive]
pub struct InputBuffers<'a> {
    pub token_ids: &'a mut [i32],
    pub positions: &'a mut [i64],
    pub slot_mapping: &'a mut [i64],
    pub query_start: &'a mut [i32],
    pub seq_lens: &'a mut [i32],
    pub block_tables: &'a mut [i32],
    pub sample_index: &'a mut [i32],
    pub sample_rows: &'a mut [i32],
    pub row_handles: &'a mut [i64],
    pub adapter_slots: Option<&'a mut [i32]>,
    pub cross_lens: Option<&'a mut [i32]>,
    pub group_tables: Vec<&'a mut [i32]>,
    pub group_slots: Vec<&'a mut [i64]>,
}

impl InputBuffers<'_> {
    fn check(&self, outputs: &SchedulerOutputs, space: &BlockSpaceManager) -> Result<()> {
        let num_rows = outputs.rows.len();
        let (num_tokens, num_samples) = (outputs.num_batched_tokens, outputs.num_samples);
        let num_blocks = num_rows * outputs.max_num_blocks;
        let room = |name, given: usize, needed| {
            if given < needed {
                Err(too_short(name, given, needed, outputs.step_id))
            } else {
                Ok(())
            }
        };
        let room_if_any =
            |name, given: Option<usize>, needed| room(name, given.unwrap_or(needed), needed);
        room("token_ids", self.token_ids.len(), num_tokens)?;
        room("positions", self.positions.len(), num_tokens)?;
        room("slot_mapping", self.slot_mapping.len(), num_tokens)?;
        room("query_start", self.query_start.len(), num_rows + 1)?;
        room("seq_lens", self.seq_lens.len(), num_rows)?;
        room("block_tables", self.block_tables.len(), num_blocks)?;
        room("sample_index", self.sample_index.len(), num_samples)?;
        room("sample_rows", self.sample_rows.len(), num_samples)?;
        room("row_handles", self.row_handles.len(), num_rows)?;
        room_if_any("adapter_slots", self.adapter_slots.as_ref().map(|a| a.len()), num_rows)?;
        room_if_any("cross_lens", self.cross_lens.as_ref().map(|l| l.len()), num_rows)?;
        self.check_groups(outputs, space)
    }

    fn check_groups(&self, outputs: &SchedulerOutputs, space: &BlockSpaceManager) -> Result<()> {
        let num_groups = space.num_groups() - 1;
        for (name, given) in
            [("group_tables", self.group_tables.len()), ("group_slots", self.group_slots.len())]
        {
            if given < num_groups {
                return Err(Error::Arrays(format!(
                    "{name} has {given} arrays; the cache has {num_groups} KV groups beside the \
                     first"
                )));
            }
        }
        let needed = space.kinds().zip(&outputs.table_widths).enumerate();
        for (index, (kind, width)) in needed {
            let (tables, slots) = (self.group_tables[index].len(), self.group_slots[index].len());
            let num_slots = if kind.has_slots() { outputs.num_batched_tokens } else { 0 };
            let num_entries = outputs.rows.len() * width;
            if tables < num_entries {
                let name = format!("group_tables[{index}]");
                return Err(too_short(&name, tables, num_entries, outputs.step_id));
            }
            if slots < num_slots {
                let name = format!("group_slots[{index}]");
                return Err(too_short(&name, slots, num_slots, outputs.step_id));
            }
        }
        Ok(())
    }
}

#[cold]
fn too_short(name: &str, given: usize, needed: usize, step_id: u64) -> Error {
    Error::Arrays(format!("{name} has {given} elements; step {step_id} needs {needed}"))
}

/// Writes the inputs of `outputs` into `buffers`.
///
/// # Errors
/// [`Error::Arrays`] when an array is too short; then nothing was written.
pub(crate) fn fill(
    buffers: &mut InputBuffers<'_>,
    outputs: &SchedulerOutputs,
    store: &SequenceStore,
    space: &BlockSpaceManager,
) -> Result<()> {
    buffers.check(outputs, space)?;
    let block_size = space.block_size();
    if let Some(slots) = &mut buffers.adapter_slots {
        for (slot, row) in slots.iter_mut().zip(&outputs.rows) {
            *slot = row.adapter_slot;
        }
    }
    if let Some(lens) = &mut buffers.cross_lens {
        for (len, row) in lens.iter_mut().zip(&outputs.rows) {
            *len = int32(store.group(store.seq(row.seq).group()).num_encoder_tokens);
        }
    }
    let (mut token, mut sample, mut draft) = (0, 0, 0);
    buffers.query_start[0] = 0;
    // Zipped, so that the bounds are checked once and not for each row.
    let width = outputs.max_num_blocks.max(1); // 0 where there are only moves
    let starts = buffers.query_start[1..].iter_mut().zip(buffers.seq_lens.iter_mut());
    let tables = buffers.block_tables.chunks_exact_mut(width).zip(buffers.row_handles.iter_mut());
    for (index, ((row, (start, len)), (table, handle))) in
        outputs.rows.iter().zip(starts).zip(tables).enumerate()
    {
        let seq = store.seq(row.seq);
        let end = token + row.num_tokens + row.num_drafts;
        let drafts = &outputs.drafts[draft..draft + row.num_drafts];
        draft += row.num_drafts;
        let last_block = fill_tokens(
            &mut buffers.token_ids[token..end],
            &mut buffers.positions[token..end],
            &mut buffers.slot_mapping[token..end],
            seq,
            drafts,
            block_size,
        );
        token = end;
        let num_keys = seq.num_computed_tokens + row.num_tokens;
        let num_blocks = match outputs.num_lookahead_slots {
            0 => last_block + 1,
            num_slots => num_blocks_for(num_keys + num_slots, block_size).min(seq.table.len()),
        };
        fill_table(table, seq, num_blocks);
        *start = int32(token);
        *len = int32(num_keys + row.num_drafts);
        *handle = row.seq.to_bits();
        if row.is_sampled {
            for place in token - 1 - row.num_drafts..token {
                buffers.sample_index[sample] = int32(place);
                buffers.sample_rows[sample] = int32(index);
                sample += 1;
            }
        }
    }
    fill_groups(buffers, outputs, store, space);
    Ok(())
}

/// Writes the tables and slots of the KV groups beside the first.
#[inline(never)] // few models need it: kept out of the common path
fn fill_groups(
    buffers: &mut InputBuffers<'_>,
    outputs: &SchedulerOutputs,
    store: &SequenceStore,
    space: &BlockSpaceManager,
) {
    for (index, (kind, width)) in space.kinds().zip(&outputs.table_widths).enumerate() {
        let entries = &mut buffers.group_tables[index][..outputs.rows.len() * width];
        entries.fill(0);
        let mut slots = &mut *buffers.group_slots[index];
        for (row, entries) in outputs.rows.iter().zip(entries.chunks_exact_mut((*width).max(1))) {
            let seq = store.seq(row.seq);
            let table = &seq.tables[index];
            fill_span(entries, table);
            if kind.has_slots() {
                let block = |index| table.block(index);
                let mut next = Slots::after(seq.num_computed_tokens, space.block_size(), block);
                let num_tokens = row.num_tokens + row.num_drafts;
                for slot in slots.split_off_mut(..num_tokens).unwrap_or_default() {
                    *slot = next.take();
                }
            }
        }
    }
}

/// Writes the blocks of a table between zeros, which stand for those that no query sees.
fn fill_span(entries: &mut [i32], table: &SpanTable) {
    for (first, blocks) in table.runs() {
        let first = first.min(entries.len());
        for (entry, block) in entries[first..].iter_mut().zip(blocks) {
            *entry = int32(block.index());
        }
    }
}

/// Slots of consecutive tokens; `block` finds logical blocks.
struct Slots<F> {
    block: F,
    block_size: usize,
    index: usize,
    offset: usize,
    first: usize,
}

impl<F: Fn(usize) -> BlockId> Slots<F> {
    /// The slots after `num_tokens` tokens, whose block is mapped.
    fn after(num_tokens: usize, block_size: usize, block: F) -> Self {
        let (index, offset) = (num_tokens / block_size, num_tokens % block_size);
        let first = block(index).index() * block_size;
        Self { block, block_size, index, offset, first }
    }

    /// The slot of the next token.
    fn take(&mut self) -> i64 {
        if self.offset == self.block_size {
            (self.index, self.offset) = (self.index + 1, 0);
            self.first = (self.block)(self.index).index() * self.block_size;
        }
        self.offset += 1;
        int64(self.first + self.offset - 1)
    }
}

/// Writes the tokens of a row, at least one, and its drafts; returns the logical block of the last.
fn fill_tokens(
    token_ids: &mut [i32],
    positions: &mut [i64],
    slot_mapping: &mut [i64],
    seq: &Sequence,
    drafts: &[TokenId],
    block_size: usize,
) -> usize {
    let computed = seq.num_computed_tokens;
    let mut next = Slots::after(computed, block_size, |index| seq.table.block(index));
    let slots = slot_mapping.iter_mut().zip(positions.iter_mut()).zip(token_ids);
    for (place, ((slot, position), token_id)) in (computed..).zip(slots) {
        *token_id = if place < seq.len() { seq.token_id(place) } else { drafts[place - seq.len()] };
        *position = int64(place);
        let written = next.take();
        *slot = if place < seq.num_cached_tokens { -1 } else { written };
    }
    next.index
}

/// Writes the first `num_blocks` blocks of a table.
fn fill_table(target: &mut [i32], seq: &Sequence, num_blocks: usize) {
    let (used, padding) = target.split_at_mut(num_blocks);
    if let Some(blocks) = seq.table.blocks().get(..num_blocks) {
        for (entry, block) in used.iter_mut().zip(blocks) {
            *entry = int32(block.index());
        }
    } else {
        for (index, entry) in used.iter_mut().enumerate() {
            *entry = int32(seq.table.block(index).index());
        }
    }
    if !padding.is_empty() {
        padding.fill(0);
    }
}

// Configurations are validated so that every count fits; `as` keeps the loops branch-free.
#[expect(clippy::cast_possible_truncation, clippy::cast_possible_wrap, reason = "validated")]
fn int32(value: usize) -> i32 {
    value as i32
}

#[expect(clippy::cast_possible_wrap, reason = "validated")]
fn int64(value: usize) -> i64 {
    value as i64
}
