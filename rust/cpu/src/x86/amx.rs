//! Products of bfloat16 and of bytes by AMX, whose registers hold tiles of 16 rows.
//!
//! An instruction multiplies a tile of rows, 16 units each, with a tile of weights, 16 units of 16
//! columns, and adds to a tile of sums.  The units of a panel lie as it takes them.
//!
//! # Invariants
//!
//! 1. The units of a step are those of fixed places, whatever the number of rows: the firsts of its
//!    pairs are summed in order, then the seconds, then both are added to the sum.
//! 2. The compiler makes no tile instructions, so tiles keep their numbers between those of a call.
//!    After a thread's last product of a call they are released: interrupted elsewhere, it has none
//!    to save.
//!
//! # Costs
//!
//! A step takes 16 cycles for each tile of sums, 9 where it has up to 8 rows.  32 rows and 32 columns
//! are four of these, for which two tiles of either are read, in 9 cycles each if they are aligned to
//! 64 bytes and in the first cache; a row across two cache lines takes some six times as long.  Sizes
//! of tiles are set in 160 cycles, once for all products of as many rows.  A thread waits for at most
//! 16 lines that its first cache lacks, whether they are in the second or in memory: products with
//! 64 rows take a sixth less time when the panel that comes next is read evenly meanwhile.
#![expect(unsafe_code, reason = "instructions that read through pointers")]
#![expect(clippy::inline_always, reason = "numbers of tiles are constants")]

use std::arch::asm;
use std::arch::x86_64::{__cpuid, __cpuid_count, _MM_HINT_T0, _MM_HINT_T1, _mm_prefetch};
use std::sync::OnceLock;

use crate::kernel::Rows;
use crate::linear::PANEL_FEATURES;
use crate::number::PANEL;

/// Rows of a tile.
pub(crate) const TILE_ROWS: usize = 16;
/// Rows of two tiles, which share the weights that are read.
pub(crate) const ROWS: usize = 2 * TILE_ROWS;
/// Bytes of a row of a tile.
const ROW_BYTES: u16 = 64;
/// The most units of a step.
pub(crate) const STEP: usize = 16;
/// Bytes of a line of the caches.
const LINE: usize = 64;

/// Whether this CPU has AMX with bfloat16 and bytes, and the system lets this process use it.
pub(crate) fn is_available() -> bool {
    static IS_AVAILABLE: OnceLock<bool> = OnceLock::new();
    *IS_AVAILABLE.get_or_init(|| {
        const PARTS: u32 = 1 << 22 | 1 << 24 | 1 << 25; // bfloat16, tiles, bytes
        let has_leaf = __cpuid(0).eax >= 7;
        has_leaf && __cpuid_count(7, 0).edx & PARTS == PARTS && request_tiles()
    })
}

/// Requests that the system save the tiles of this process when it interrupts a thread.
fn request_tiles() -> bool {
    #[cfg(target_os = "linux")]
    {
        const ARCH_REQ_XCOMP_PERM: libc::c_int = 0x1023;
        const XFEATURE_XTILEDATA: libc::c_ulong = 18;
        // SAFETY: the request changes what the system saves, and no memory.
        unsafe { libc::syscall(libc::SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0 }
    }
    #[cfg(not(target_os = "linux"))]
    {
        false
    }
}

/// What the units of a product are.
pub(crate) trait Units {
    /// Adds the products of a tile of rows with one of weights to a tile of sums.
    ///
    /// # Safety
    /// The tiles fit each other.
    unsafe fn add_products<const SUMS: usize, const ROWS: usize, const WEIGHTS: usize>();
}

/// Pairs of bfloat16; sums are float32.
pub(crate) struct OfBFloat16;

impl Units for OfBFloat16 {
    #[inline(always)]
    unsafe fn add_products<const SUMS: usize, const ROWS: usize, const WEIGHTS: usize>() {
        // SAFETY: the caller's promise.
        unsafe {
            asm!("tdpbf16ps tmm{}, tmm{}, tmm{}", const SUMS, const ROWS, const WEIGHTS,
                options(nostack, nomem));
        }
    }
}

/// Four signed bytes; sums are whole numbers of 32 bits, in the place of float32.
pub(crate) struct OfBytes;

impl Units for OfBytes {
    #[inline(always)]
    unsafe fn add_products<const SUMS: usize, const ROWS: usize, const WEIGHTS: usize>() {
        // SAFETY: the caller's promise.
        unsafe {
            asm!("tdpbssd tmm{}, tmm{}, tmm{}", const SUMS, const ROWS, const WEIGHTS,
                options(nostack, nomem));
        }
    }
}

/// The parts of a row that is not divided.
pub(crate) const WHOLE: (usize, usize) = (1, 0);

/// Units of some columns, in steps.
#[derive(Clone, Copy)]
pub(crate) struct Steps {
    /// Units of a row, or of each of its parts.
    pub(crate) depth: usize,
    /// Parts of a row, which are multiplied with the same columns and added up, and units from a
    /// part to the next.
    pub(crate) parts: (usize, usize),
    /// Units of a step, up to 16.
    pub(crate) len: usize,
    /// Units from one of a column to the next.
    pub(crate) stride: usize,
}

/// What a product prefetches, which is read after it.
pub(crate) trait Ahead {
    /// Prefetches some lines while a step of units is multiplied, those at `columns` of some vectors.
    ///
    /// # Safety
    /// The CPU has the instructions.
    unsafe fn prefetch<const VECTORS: usize>(&mut self, columns: [*const u32; VECTORS]);
}

/// Nothing.
impl Ahead for () {
    #[inline(always)]
    unsafe fn prefetch<const VECTORS: usize>(&mut self, _columns: [*const u32; VECTORS]) {}
}

/// As many lines as a step of whole tiles has, this many units after it; 0 for none.
pub(crate) struct Beside(pub(crate) usize);

impl Ahead for Beside {
    #[inline(always)]
    unsafe fn prefetch<const VECTORS: usize>(&mut self, columns: [*const u32; VECTORS]) {
        if self.0 > 0 {
            for line in columns {
                for unit in 0..STEP {
                    let at = line.wrapping_add(self.0 + unit * PANEL);
                    // SAFETY: any address may be prefetched.
                    unsafe { _mm_prefetch::<_MM_HINT_T0>(at.cast()) };
                }
            }
        }
    }
}

/// Adjacent lines, some at each step.
pub(crate) struct Lines {
    /// The next line.
    next: *const u8,
    /// Lines of a step.
    num: usize,
}

impl Lines {
    /// The panel after one of `depth` units of 64 columns, with which a call multiplies `num_rows`:
    /// the rows from `first` on prefetch their share.
    pub(crate) fn after(panel: *const u32, depth: usize, first: usize, num_rows: usize) -> Self {
        let step_lines = STEP * PANEL_FEATURES / PANEL;
        let num = step_lines.div_ceil(num_rows.div_ceil(TILE_ROWS));
        let before = first / TILE_ROWS * (depth / STEP) * num * LINE;
        let size = depth * PANEL_FEATURES * size_of::<u32>();
        let next = panel.cast::<u8>().wrapping_add(size + before);
        Self { next, num: if before < size { num } else { 0 } }
    }
}

impl Ahead for Lines {
    #[inline(always)]
    unsafe fn prefetch<const VECTORS: usize>(&mut self, _columns: [*const u32; VECTORS]) {
        for _ in 0..self.num {
            // To the second cache: lines on their way to the first would delay those that it lacks
            // of this step.
            // SAFETY: any address may be prefetched.
            unsafe { _mm_prefetch::<_MM_HINT_T1>(self.next.cast()) };
            self.next = self.next.wrapping_add(LINE);
        }
    }
}

/// The tiles of this thread, released at the end.
#[derive(Default)]
pub(crate) struct Tiles {
    /// Rows and units of a step that they are set to; zeros before the first product.
    sizes: (usize, usize),
}

impl Drop for Tiles {
    #[inline(always)]
    fn drop(&mut self) {
        if self.sizes != (0, 0) {
            // SAFETY: there are tiles.
            unsafe { asm!("tilerelease", options(nostack, nomem)) };
        }
    }
}

impl Tiles {
    /// Writes the products of rows with vectors of 16 columns; `at` returns the address of a vector's
    /// first unit of a step, by the step and the vector.
    ///
    /// # Safety
    /// [`is_available`]; rows and columns have the units, results 16 numbers a vector, to which rows
    /// do not add.
    #[inline(always)]
    pub(crate) unsafe fn product<U: Units>(
        &mut self,
        (rows, num_rows): (Rows, usize),
        num_vectors: usize,
        steps: Steps,
        at: impl Fn(usize, usize) -> *const u32,
        ahead: &mut impl Ahead,
    ) {
        for first in (0..num_rows).step_by(ROWS) {
            let num_rows = ROWS.min(num_rows - first);
            // SAFETY: the caller's promise.
            unsafe {
                let part = Part { rows: rows.skip(first), num_rows, steps };
                self.set(num_rows, steps.len);
                let mut vector = 0;
                while vector < num_vectors {
                    let from = |step: usize, index: usize| at(step, vector + index);
                    let left = num_vectors - vector;
                    vector += match (num_rows > TILE_ROWS, left) {
                        (true, 2..) => part.multiply::<U, 2, 2>(vector, from, ahead),
                        (true, _) => part.multiply::<U, 2, 1>(vector, from, ahead),
                        (false, 4..) => part.multiply::<U, 1, 4>(vector, from, ahead),
                        (false, 2 | 3) => part.multiply::<U, 1, 2>(vector, from, ahead),
                        (false, _) => part.multiply::<U, 1, 1>(vector, from, ahead),
                    };
                }
            }
        }
    }

    /// Sets the sizes of all tiles, if they have others.
    #[inline(always)]
    unsafe fn set(&mut self, num_rows: usize, step: usize) {
        if self.sizes != (num_rows, step) {
            // SAFETY: there are tiles.
            unsafe { configure(num_rows, step) };
            self.sizes = (num_rows, step);
        }
    }
}

/// Sizes of tiles: 0 to 3 are sums, 4 and 5 rows, 6 and 7 weights.
#[repr(C, align(64))]
struct Configuration {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    row_bytes: [u16; 16],
    rows: [u8; 16],
}

/// Sets the sizes of all tiles for some rows, up to 32, and units of a step.
unsafe fn configure(num_rows: usize, step: usize) {
    let upper = num_rows.min(TILE_ROWS);
    // One tile of rows has up to four of sums.
    let lower = if num_rows > upper { num_rows - upper } else { upper };
    #[expect(clippy::cast_possible_truncation, reason = "up to 16")]
    let [step, upper, lower] = [step, upper, lower].map(|size| size as u8);
    let mut to = Configuration {
        palette: 1,
        start_row: 0,
        reserved: [0; 14],
        row_bytes: [0; 16],
        rows: [0; 16],
    };
    to.row_bytes[..8].fill(ROW_BYTES);
    to.row_bytes[4..6].fill(4 * u16::from(step));
    to.rows[..2].fill(upper);
    to.rows[2..4].fill(lower);
    (to.rows[4], to.rows[5]) = (upper, lower);
    to.rows[6..8].fill(step);
    // SAFETY: the sizes are those of palette 1.
    unsafe { asm!("ldtilecfg [{}]", in(reg) &raw const to, options(nostack, readonly)) };
}

#[inline(always)]
unsafe fn zero<const TILE: usize>() {
    // SAFETY: the tile is configured.
    unsafe { asm!("tilezero tmm{}", const TILE, options(nostack, nomem)) };
}

/// Reads a tile; `stride` are the units from a row to the next.
#[inline(always)]
unsafe fn load<const TILE: usize>(from: *const u32, stride: usize) {
    // SAFETY: the caller's promise.
    unsafe {
        asm!("tileloadd tmm{}, [{} + {} * 4]", const TILE, in(reg) from, in(reg) stride,
            options(nostack, readonly));
    }
}

/// Writes a tile; `stride` are the numbers from a row to the next.
#[inline(always)]
unsafe fn store<const TILE: usize>(to: *mut f32, stride: usize) {
    // SAFETY: the caller's promise.
    unsafe {
        asm!("tilestored [{} + {} * 4], tmm{}", in(reg) to, in(reg) stride, const TILE,
            options(nostack));
    }
}

/// Up to 32 rows.
#[derive(Clone, Copy)]
struct Part {
    rows: Rows,
    num_rows: usize,
    steps: Steps,
}

impl Part {
    /// Writes the products with `VECTORS` vectors from one on; returns their number.  `T` are the
    /// tiles of rows.
    #[inline(always)]
    unsafe fn multiply<U: Units, const T: usize, const VECTORS: usize>(
        self,
        vector: usize,
        from: impl Fn(usize, usize) -> *const u32,
        ahead: &mut impl Ahead,
    ) -> usize {
        let Self { rows, steps, .. } = self;
        // SAFETY: the promise of `product`.
        unsafe {
            zero::<0>();
            zero::<1>();
            zero::<2>();
            zero::<3>();
            let whole = steps.depth / steps.len;
            for step in 0..whole {
                let units = rows.units.add(step * steps.len);
                let weights = |index: usize| from(step, index);
                ahead.prefetch::<VECTORS>(std::array::from_fn(weights));
                let units = (units, rows.unit_stride, steps.parts);
                add_step::<U, T, VECTORS>(units, weights, steps.stride);
            }
            if whole * steps.len < steps.depth {
                self.add_rest::<U, T, VECTORS>(whole, from);
            }
            let to = rows.result.add(vector * PANEL);
            let below = to.wrapping_add(TILE_ROWS * rows.result_stride);
            store::<0>(to, rows.result_stride);
            if VECTORS > 1 {
                store::<1>(to.add(PANEL), rows.result_stride);
            }
            if T == 2 {
                store::<2>(below, rows.result_stride);
                if VECTORS > 1 {
                    store::<3>(below.add(PANEL), rows.result_stride);
                }
            } else if VECTORS == 4 {
                store::<2>(to.add(2 * PANEL), rows.result_stride);
                store::<3>(to.add(3 * PANEL), rows.result_stride);
            }
        }
        VECTORS
    }

    /// Adds the units after the last whole step, with zeros for those that are lacking.
    #[inline(never)]
    unsafe fn add_rest<U: Units, const T: usize, const VECTORS: usize>(
        self,
        step: usize,
        from: impl Fn(usize, usize) -> *const u32,
    ) {
        let Self { rows, num_rows, steps } = self;
        let first = step * steps.len;
        let num = steps.depth - first;
        let mut weights = [[[0_u32; PANEL]; STEP]; VECTORS];
        // SAFETY: the promise of `product`; tiles read what lives here.
        unsafe {
            for (vector, weights) in weights.iter_mut().enumerate() {
                for (unit, weights) in weights.iter_mut().enumerate().take(num) {
                    let from = from(step, vector).add(unit * steps.stride);
                    weights.as_mut_ptr().copy_from_nonoverlapping(from, PANEL);
                }
            }
            let (parts, part_stride) = steps.parts;
            for part in (0..parts).rev() {
                let mut units = [[0_u32; STEP]; ROWS];
                for (row, units) in units.iter_mut().enumerate().take(num_rows) {
                    let from = rows.units.add(row * rows.unit_stride + part * part_stride + first);
                    units.as_mut_ptr().copy_from_nonoverlapping(from, num);
                }
                let units = (units.as_ptr().cast(), STEP, WHOLE);
                let weights = |index: usize| weights[index].as_ptr().cast::<u32>();
                add_step::<U, T, VECTORS>(units, weights, PANEL);
            }
        }
    }
}

/// Adds the products of the units of a step, those of the last part first.
#[inline(always)]
unsafe fn add_step<U: Units, const T: usize, const VECTORS: usize>(
    (units, unit_stride, (parts, part_stride)): (*const u32, usize, (usize, usize)),
    weights: impl Fn(usize) -> *const u32,
    stride: usize,
) {
    // SAFETY: the promise of `product`.
    unsafe {
        // Four vectors leave no tiles for weights of all of them.
        if VECTORS < 4 {
            load_weights::<VECTORS>(&weights, 0, stride);
        }
        for part in (0..parts).rev() {
            let units = units.wrapping_add(part * part_stride);
            load::<4>(units, unit_stride);
            if T == 2 {
                load::<5>(units.wrapping_add(TILE_ROWS * unit_stride), unit_stride);
            }
            if VECTORS == 4 {
                load_weights::<2>(&weights, 0, stride);
            }
            U::add_products::<0, 4, 6>();
            if VECTORS > 1 {
                U::add_products::<1, 4, 7>();
            }
            if T == 2 {
                U::add_products::<2, 5, 6>();
                if VECTORS > 1 {
                    U::add_products::<3, 5, 7>();
                }
            }
            if VECTORS == 4 {
                load_weights::<2>(&weights, 2, stride);
                U::add_products::<2, 4, 6>();
                U::add_products::<3, 4, 7>();
            }
        }
    }
}

/// Reads tiles of the weights of one or two vectors.
#[inline(always)]
unsafe fn load_weights<const VECTORS: usize>(
    weights: &impl Fn(usize) -> *const u32,
    first: usize,
    stride: usize,
) {
    // SAFETY: the promise of `product`.
    unsafe {
        load::<6>(weights(first), stride);
        if VECTORS > 1 {
            load::<7>(weights(first + 1), stride);
        }
    }
}
