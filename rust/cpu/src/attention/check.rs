//! Checks of a call's arguments, before any memory is touched.

use crate::attention::shape::{Memory, Options, Rows, Shape, Tokens};
use crate::error::{Error, Result};
use crate::number::PANEL;

fn refuse<T>(text: String) -> Result<T> {
    Err(Error(text))
}

/// Checks all arguments of a call.
pub(crate) fn check(
    shape: &Shape,
    memory: &Memory,
    rows: &Rows<'_>,
    options: &Options<'_>,
) -> Result<()> {
    check_shape(shape)?;
    check_options(shape, options)?;
    let num_tokens = rows.slot_mapping.len();
    check_memory(shape, memory, num_tokens)?;
    check_rows(rows)?;
    check_slots(shape, rows)?;
    check_tables(shape, rows, options)
}

fn check_shape(shape: &Shape) -> Result<()> {
    let sizes = [
        ("num_heads", shape.num_heads),
        ("num_kv_heads", shape.num_kv_heads),
        ("key_size", shape.key_size),
        ("value_size", shape.value_size),
        ("num_blocks", shape.num_blocks),
        ("block_size", shape.block_size),
    ];
    for (name, size) in sizes {
        if size == 0 {
            return refuse(format!("{name} must be at least 1; got 0"));
        }
    }
    let Shape { num_heads, num_kv_heads, .. } = *shape;
    if !num_heads.is_multiple_of(num_kv_heads) {
        return refuse(format!(
            "num_heads must be a multiple of num_kv_heads; got {num_heads} and {num_kv_heads}"
        ));
    }
    if shape.cache_dtype.has_scales() && !shape.has_panels() {
        return refuse(format!(
            "block_size and value_size must be multiples of {PANEL} for keys and values in bytes; \
             got {} and {}",
            shape.block_size, shape.value_size
        ));
    }
    let bytes = [num_kv_heads, shape.block_size, shape.num_blocks, shape.dtype.size()]
        .into_iter()
        .try_fold(shape.key_size.saturating_add(shape.value_size), usize::checked_mul);
    if bytes.is_none_or(|bytes| isize::try_from(bytes).is_err()) {
        return refuse(format!("the pool of {shape:?} takes more bytes than there are addresses"));
    }
    Ok(())
}

fn check_options(shape: &Shape, options: &Options<'_>) -> Result<()> {
    if !options.scale.is_finite() {
        return refuse(format!("scale must be finite; got {}", options.scale));
    }
    if options.window == Some(0) {
        return refuse("window must be at least 1 or None; got 0".into());
    }
    if let Some(softcap) = options.softcap
        && !(softcap.is_finite() && softcap > 0.0)
    {
        return refuse(format!("softcap must be positive and finite, or None; got {softcap}"));
    }
    if let Some(sinks) = options.sinks
        && sinks.len() != shape.num_heads
    {
        return refuse(format!(
            "sinks must hold one score for each of {} heads; got {}",
            shape.num_heads,
            sinks.len()
        ));
    }
    if let Some(alibi) = options.alibi {
        if alibi.len() != shape.num_heads {
            return refuse(format!(
                "alibi must hold one slope for each of {} heads; got {}",
                shape.num_heads,
                alibi.len()
            ));
        }
        if let Some(slope) = alibi.iter().find(|slope| !slope.is_finite()) {
            return refuse(format!("alibi must hold finite slopes; got {slope}"));
        }
    }
    if let Some(bias) = options.position_bias {
        if bias.is_empty() || bias.len() % shape.num_heads != 0 {
            return refuse(format!(
                "position_bias must hold as many biases for each of {} heads; got {}",
                shape.num_heads,
                bias.len()
            ));
        }
        if !options.causal {
            return refuse("position_bias is of keys before a query; causal must be true".into());
        }
        if let Some(bias) = bias.iter().find(|bias| !bias.is_finite()) {
            return refuse(format!("position_bias must hold finite biases; got {bias}"));
        }
    }
    Ok(())
}

fn check_memory(shape: &Shape, memory: &Memory, num_tokens: usize) -> Result<()> {
    let check_pointer = |name: &str, pointer| shape.dtype.check_address(name, pointer);
    check_pointer("pool", memory.pool)?;
    if num_tokens == 0 {
        return Ok(()); // An empty tensor has no address.
    }
    check_pointer("output", memory.output)?;
    let check_tokens = |name: &str, tokens: &Tokens, heads: usize| {
        check_pointer(name, tokens.pointer)?;
        let last = [(num_tokens, tokens.token_stride), (heads, tokens.head_stride)]
            .into_iter()
            .try_fold(0_usize, |sum, (count, stride)| sum.checked_add(count.checked_mul(stride)?));
        let bytes = last.and_then(|last| last.checked_mul(shape.dtype.size()));
        if bytes.is_none_or(|bytes| isize::try_from(bytes).is_err()) {
            return refuse(format!(
                "the strides of {name} reach beyond all addresses: {} a token, {} a head",
                tokens.token_stride, tokens.head_stride
            ));
        }
        Ok(())
    };
    check_tokens("query", &memory.query, shape.num_heads)?;
    check_tokens("key", &memory.key, shape.num_kv_heads)?;
    check_tokens("value", &memory.value, shape.num_kv_heads)
}

fn check_rows(rows: &Rows<'_>) -> Result<()> {
    let Rows { block_tables, query_start, seq_lens, slot_mapping } = *rows;
    let (num_rows, num_tokens) = (seq_lens.len(), slot_mapping.len());
    if query_start.len() != num_rows + 1 {
        return refuse(format!(
            "query_start must have one entry more than seq_lens, {}; got {}",
            num_rows + 1,
            query_start.len()
        ));
    }
    let ends = (query_start[0], usize::try_from(query_start[num_rows]));
    if ends != (0, Ok(num_tokens)) {
        return refuse(format!(
            "query_start must go from 0 to {num_tokens}, the length of slot_mapping; got {} to {}",
            query_start[0], query_start[num_rows]
        ));
    }
    for (row, &seq_len) in seq_lens.iter().enumerate() {
        let (start, end) = (query_start[row], query_start[row + 1]);
        if start > end {
            return refuse(format!("query_start must not fall; row {row} is {start} to {end}"));
        }
        if seq_len < end - start {
            return refuse(format!(
                "row {row} has {} queries and only {seq_len} keys in seq_lens",
                end - start
            ));
        }
    }
    if !block_tables.len().is_multiple_of(num_rows.max(1)) {
        return refuse(format!(
            "block_tables must hold equally many blocks for each of {num_rows} rows; got {}",
            block_tables.len()
        ));
    }
    Ok(())
}

fn check_slots(shape: &Shape, rows: &Rows<'_>) -> Result<()> {
    let num_slots = shape.num_blocks * shape.block_size;
    for (token, &slot) in rows.slot_mapping.iter().enumerate() {
        if slot != -1 && usize::try_from(slot).map_or(true, |slot| slot >= num_slots) {
            return refuse(format!(
                "slot_mapping[{token}] must be -1 or one of the pool's {num_slots} slots; got {slot}"
            ));
        }
    }
    Ok(())
}

/// Checks the table entries that a row reads: the blocks from its first visible key to its last.
fn check_tables(shape: &Shape, rows: &Rows<'_>, options: &Options<'_>) -> Result<()> {
    let width = rows.width();
    for row in 0..rows.len() {
        let (num_queries, seq_len) = (rows.queries(row).len(), rows.seq_len(row));
        if num_queries == 0 {
            continue;
        }
        let num_blocks = seq_len.div_ceil(shape.block_size);
        if num_blocks > width {
            return refuse(format!(
                "row {row} of block_tables has {width} blocks of {} tokens; seq_lens needs {seq_len}",
                shape.block_size
            ));
        }
        let first_key = options.first_key(seq_len - num_queries);
        for index in first_key / shape.block_size..num_blocks {
            let block = rows.block_tables[row * width + index];
            if usize::try_from(block).map_or(true, |block| block >= shape.num_blocks) {
                return refuse(format!(
                    "block_tables[{row}, {index}] must be one of the pool's {} blocks; got {block}",
                    shape.num_blocks
                ));
            }
        }
    }
    Ok(())
}
