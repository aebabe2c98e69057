//! Places of tokens in a pool, and writes to them.
#![expect(unsafe_code, reason = "writes through the caller's pointers")]

use std::ops::Range;

use crate::attention::shape::{CacheDType, Memory, Rows, Shape, Tokens, count};
use crate::element::Element;
use crate::level::{Float8, Level};
use crate::number::{BFloat16, PANEL, Stored};

/// Place of one KV head of a slot, in numbers from the start of the pool.
#[derive(Clone, Copy, Debug)]
pub struct Place {
    /// The key's first element.
    key: usize,
    /// Distance from one unit of the key to the next.
    key_stride: usize,
    /// Elements of the key that lie side by side.
    key_unit: usize,
    /// The value's first element.
    value: usize,
    /// Distance from one element of the value to the next.
    value_stride: usize,
    /// The key's scale, in a pool of bytes; the value's is 16 scales after it.
    scale: usize,
}

impl Place {
    /// Returns the place of an existing slot and KV head.
    pub fn new(shape: &Shape, slot: usize, kv_head: usize) -> Self {
        let (key_size, value_size) = (shape.key_size, shape.value_size);
        let key_unit = shape.per_unit();
        if !shape.has_panels() {
            let key = (slot * shape.num_kv_heads + kv_head) * (key_size + value_size);
            let value = key + key_size;
            return Self { key, key_stride: key_unit, key_unit, value, value_stride: 1, scale: 0 };
        }
        let panel = panel_start(shape, slot, kv_head);
        let token = slot % PANEL;
        Self {
            key: panel + token * key_unit,
            key_stride: PANEL * key_unit,
            key_unit,
            value: panel
                + key_size * PANEL
                + token / key_unit * value_size * key_unit
                + token % key_unit,
            value_stride: key_unit,
            scale: panel + PANEL * (key_size + value_size) + token * size_of::<BFloat16>(),
        }
    }

    /// Offset of an element of the key.
    pub fn key(&self, index: usize) -> usize {
        self.key + index / self.key_unit * self.key_stride + index % self.key_unit
    }

    /// Offset of an element of the value.
    pub fn value(&self, index: usize) -> usize {
        self.value + index * self.value_stride
    }

    /// Offsets in bytes of the bfloat16 scales of key and value, in a pool of bytes.
    pub fn scales(&self) -> [usize; 2] {
        [self.scale, self.scale + PANEL * size_of::<BFloat16>()]
    }
}

/// Offset of the first number of a slot's panel, which has keys, then values, then scales.
#[inline]
fn panel_start(shape: &Shape, slot: usize, kv_head: usize) -> usize {
    let (block, offset) = (slot / shape.block_size, slot % shape.block_size);
    let panels = shape.block_size / PANEL;
    let panel = (block * shape.num_kv_heads + kv_head) * panels + offset / PANEL;
    panel * (PANEL * shape.token_bytes() / shape.cache_item_size())
}

/// Offsets of the first bytes of some of a row's panels, by the row's block ids.
#[inline]
pub(crate) fn panel_starts(
    shape: &Shape,
    blocks: &[i32],
    kv_head: usize,
    panels: Range<usize>,
) -> impl Iterator<Item = usize> {
    let per_block = shape.block_size / PANEL;
    let panel_bytes = PANEL * shape.token_bytes();
    // A division for each panel took a tenth of the time of decoding from cached blocks.
    let (mut index, mut within) = (panels.start / per_block, panels.start % per_block);
    panels.map(move |_| {
        let start = ((count(blocks[index]) * shape.num_kv_heads + kv_head) * per_block + within)
            * panel_bytes;
        within += 1;
        if within == per_block {
            (index, within) = (index + 1, 0);
        }
        start
    })
}

/// Writes the new tokens whose block is assigned to `part` of `parts`, in order.
///
/// # Safety
/// The arguments are checked; no other thread has this part or reads the pool meanwhile.
pub(crate) unsafe fn write_tokens<E: Element>(
    shape: &Shape,
    memory: &Memory,
    rows: &Rows<'_>,
    part: usize,
    parts: usize,
) {
    let write = match shape.cache_dtype {
        CacheDType::Auto => write_numbers::<E>,
        CacheDType::Int8 => write_levels::<E, i8>,
        CacheDType::Float8E4M3 => write_levels::<E, Float8<3>>,
        CacheDType::Float8E5M2 => write_levels::<E, Float8<2>>,
    };
    for (token, &slot) in rows.slot_mapping.iter().enumerate() {
        let Ok(slot) = usize::try_from(slot) else { continue };
        if slot / shape.block_size % parts != part {
            continue;
        }
        for kv_head in 0..shape.num_kv_heads {
            let place = Place::new(shape, slot, kv_head);
            // SAFETY: places of a checked slot lie in the pool, those of a token in the tensors.
            unsafe {
                let key = head_of::<E>(&memory.key, token, kv_head);
                let value = head_of::<E>(&memory.value, token, kv_head);
                write(shape, memory.pool, &place, key, value);
            }
        }
    }
}

/// Copies a key and a value to their place.
///
/// # Safety
/// The key, the value and their place exist.
unsafe fn write_numbers<E: Element>(
    shape: &Shape,
    pool: *mut u8,
    place: &Place,
    key: *const E,
    value: *const E,
) {
    let pool = pool.cast::<E>();
    // SAFETY: the caller's promise.
    unsafe {
        let mut to = pool.add(place.key);
        for unit in 0..shape.key_size / E::PER_UNIT {
            for index in 0..E::PER_UNIT {
                to.add(index).write(key.add(unit * E::PER_UNIT + index).read());
            }
            to = to.wrapping_add(place.key_stride);
        }
        for index in 0..shape.key_size % E::PER_UNIT {
            let last = shape.key_size / E::PER_UNIT * E::PER_UNIT + index;
            to.add(index).write(key.add(last).read());
        }
        let mut to = pool.add(place.value);
        for index in 0..shape.value_size {
            to.write(value.add(index).read());
            to = to.wrapping_add(place.value_stride);
        }
    }
}

/// Writes a key and a value as levels of their scales.
///
/// # Safety
/// The key, the value and their place exist.
unsafe fn write_levels<E: Element, L: Level>(
    shape: &Shape,
    pool: *mut u8,
    place: &Place,
    key: *const E,
    value: *const E,
) {
    let parts = [
        (key, shape.key_size, place.key, place.key_stride),
        (value, shape.value_size, place.value, place.value_stride),
    ];
    for ((from, len, at, stride), scale_at) in parts.into_iter().zip(place.scales()) {
        // SAFETY: the caller's promise.
        unsafe {
            let numbers = std::slice::from_raw_parts(from, len);
            let (scale, inverse) = scale_of::<E, L>(numbers);
            pool.add(scale_at).cast::<BFloat16>().write_unaligned(scale);
            let mut to = pool.add(at).cast::<L>();
            for number in numbers {
                to.write(L::nearest(number.to_f32() * inverse));
                to = to.wrapping_add(stride);
            }
        }
    }
}

/// The smallest scale with which no number exceeds the largest level, and its inverse.
///
/// Numbers that are not finite give a scale that makes the whole key or value NaN.
fn scale_of<E: Element, L: Level>(numbers: &[E]) -> (BFloat16, f32) {
    let peak = numbers.iter().fold(0.0_f32, |peak, number| {
        let magnitude = number.to_f32().abs();
        if magnitude > peak || magnitude.is_nan() { magnitude } else { peak }
    });
    let scale = BFloat16::at_least(peak / L::LARGEST);
    let number = scale.to_f32();
    // A smaller number may be flushed to zero, and has no finite inverse.
    if number < f32::MIN_POSITIVE { (BFloat16::ZERO, 0.0) } else { (scale, 1.0 / number) }
}

/// Address of the first element of a head of a token.
///
/// # Safety
/// Token and head exist.
#[inline]
pub(crate) unsafe fn head_of<E>(tokens: &Tokens, token: usize, head: usize) -> *const E {
    let offset = token * tokens.token_stride + head * tokens.head_stride;
    // SAFETY: the caller's promise.
    unsafe { tokens.pointer.cast::<E>().add(offset) }
}

/// Makes a panel of keys and values of tokens that are stored in another layout.
///
/// Tokens of the panel that are not among `slots` become zero.
///
/// # Safety
/// The slots exist; `panel` can hold `units` of keys, `[depth][16]`, then of values,
/// `[16 / PER_UNIT][columns]`, all zero up to `columns` and `depth`.
pub(crate) unsafe fn gather_token<E: Element>(
    shape: &Shape,
    pool: *const E,
    (slot, kv_head): (usize, usize),
    (keys, values): (*mut E, *mut E),
    (token, columns): (usize, usize),
) {
    let place = Place::new(shape, slot, kv_head);
    // SAFETY: the caller's promise.
    unsafe {
        for index in 0..shape.key_size {
            let (unit, half) = (index / E::PER_UNIT, index % E::PER_UNIT);
            keys.add((unit * PANEL + token) * E::PER_UNIT + half)
                .write(pool.add(place.key + index).read());
        }
        let (pair, half) = (token / E::PER_UNIT, token % E::PER_UNIT);
        for index in 0..shape.value_size {
            values
                .add((pair * columns + index) * E::PER_UNIT + half)
                .write(pool.add(place.value + index).read());
        }
    }
}
