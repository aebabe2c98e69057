//! Paged attention on the CPU: one call computes one layer for a whole flat batch.
//!
//! A call first writes the step's new keys and values into the pool, then attends, decode rows
//! and ragged prefill rows alike.  The results are those of `kernels/reference.py`.
//!
//! # Layout of a pool
//!
//! A block takes [`Shape::block_bytes`] in any layout, so whole blocks can be copied and swapped
//! without knowing it.  If the shape allows it (see [`Shape::has_panels`]) a block holds
//! `[Hkv][block_size / 16]` *panels* of 16 tokens, each the keys transposed, `[D][16]`, then the
//! values, `[16][Dv]`.  So 16 scores are computed side by side without a horizontal sum, a weight
//! multiplies whole vectors of values, and a work item reads one contiguous range of a block.  In
//! bfloat16 and float16 the unit is an adjacent pair: two dimensions of a key, `[D / 2][16][2]`,
//! and two tokens of a value, `[8][Dv][2]`.  A dot-product instruction of bfloat16 takes such
//! pairs, and without one a shift and a mask make two float32 vectors of it; float16 is converted.
//! Any other shape is stored `[block_size][Hkv][D + Dv]`, and 16 tokens at a time are gathered into
//! panels when they are read.
//!
//! A pool of bytes ([`CacheDType::has_scales`]) has panels of bytes, without pairs, each followed
//! by bfloat16 scales of its keys, `[16]`, and of its values, `[16]`.  Queries and weights multiply
//! the bytes as float32; scores are multiplied by the scales of keys, weights by those of values.
//!
//! # Invariants
//!
//! 1. All arguments are checked before the first byte is read or written.
//! 2. A slot without a visible key is never read: it may hold NaN.
//! 3. The output of a query depends on its row alone, to the last bit: not on the batch, on how the
//!    prompt was cut, on the number of threads or their timing.  Keys are processed in chunks at
//!    fixed positions, each with a separate maximum, and chunks are merged in order.
//! 4. No two threads write the same byte: new tokens are split by block, outputs by work item.
//!
//! # Costs
//!
//! A KV head is read once for all query heads of its group.  A call allocates its list of work
//! items; each thread keeps its scratch memory, about 100 KiB, for the next call.
#![expect(unsafe_code, reason = "the entry that takes pointers")]

use std::cell::Cell;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::error::Result;
use crate::isa::InstructionSet;
use crate::number::{BFloat16, DType, Float16};
use crate::team::Execution;
use crate::wait::nap_until;

#[cfg(target_arch = "x86_64")]
mod amx;
mod check;
mod layout;
mod panels;
mod plan;
mod shape;
mod softmax;
mod tile;

use check::check;
use layout::write_tokens;
use plan::Plan;
use tile::{Attend, Call, Scratch};

pub use layout::Place;
pub use shape::{CacheDType, Memory, Options, Rows, Shape, Tokens};

// SAFETY: any thread may hold addresses; the caller of the kernel upholds the rest.
unsafe impl Send for Memory {}

thread_local! {
    /// Scratch memory, taken while a thread works; a thread of the team outlives the call.
    static SCRATCH: Cell<Scratch> = Cell::default();
}

/// Writes the step's keys and values into the pool, then computes attention for every query.
///
/// Row r has the queries `query_start[r] .. query_start[r + 1]`; the last of them is at position
/// `seq_lens[r] - 1` and sees that many keys, its own included; where attention is not causal, all
/// queries do.  Every element of the output is written.
///
/// # Errors
/// Arguments that do not fit each other, an id outside of the pool, an instruction set that the
/// CPU lacks.
///
/// # Safety
/// The memory is as [`Memory`] describes for this shape and T = `slot_mapping.len()`; no other code
/// writes any of it, or reads pool or output, while the call lasts.
pub unsafe fn paged_attention(
    shape: &Shape,
    memory: &Memory,
    rows: &Rows<'_>,
    options: &Options<'_>,
    execution: &Execution<'_>,
) -> Result<()> {
    check(shape, memory, rows, options)?;
    let plan = Plan::new(shape, rows, options, execution.num_threads);
    let num_threads = execution.num_threads.min(plan.items.len());
    let execution = Execution { num_threads, ..*execution };
    // SAFETY: the caller's promise; the arguments are checked.
    unsafe { run(shape, memory, rows, options, &plan, &execution) }
}

/// Writes the step's keys and values into the pool, and computes no attention.
///
/// # Errors
/// Those of [`paged_attention`].
///
/// # Safety
/// That of [`paged_attention`]; queries are not read, and the output is not written.
pub unsafe fn write_cache(
    shape: &Shape,
    memory: &Memory,
    rows: &Rows<'_>,
    options: &Options<'_>,
    execution: &Execution<'_>,
) -> Result<()> {
    check(shape, memory, rows, options)?;
    // SAFETY: the caller's promise; the arguments are checked.
    unsafe { run(shape, memory, rows, options, &Plan::default(), execution) }
}

/// Writes the step's keys and values, then computes the items of a plan.
///
/// # Safety
/// That of [`paged_attention`]; the arguments are checked, and the plan is made for them.
unsafe fn run(
    shape: &Shape,
    memory: &Memory,
    rows: &Rows<'_>,
    options: &Options<'_>,
    plan: &Plan,
    execution: &Execution<'_>,
) -> Result<()> {
    execution.check()?;
    let Execution { instructions, team, num_threads } = *execution;
    if rows.slot_mapping.is_empty() {
        return Ok(());
    }
    let mut partials = vec![0.0_f32; plan.num_partials];
    let call = Call {
        shape,
        memory,
        rows,
        options,
        plan,
        partials: partials.as_mut_ptr(),
        has_amx: instructions == InstructionSet::Amx
            && (shape.dtype, shape.cache_dtype) == (DType::BFloat16, CacheDType::Auto),
    };
    let work = Work {
        call,
        instructions,
        write_parts: if num_threads > 1 { 4 * num_threads } else { 1 },
        next_part: AtomicUsize::new(0),
        written_parts: AtomicUsize::new(0),
        next_item: AtomicUsize::new(0),
    };
    if num_threads > 1 {
        team.run(num_threads, &|| work.run());
    } else {
        work.run();
    }
    Ok(())
}

/// State shared by the threads of a call.
struct Work<'a> {
    call: Call<'a>,
    instructions: InstructionSet,
    write_parts: usize,
    next_part: AtomicUsize,
    written_parts: AtomicUsize,
    next_item: AtomicUsize,
}

// SAFETY: the pointers in `call` are used by invariant 4: no two threads write the same bytes, and
// a thread reads what another wrote only after a counter has reported it.
unsafe impl Sync for Work<'_> {}

impl Work<'_> {
    /// Runs items until none is left, on any number of threads.
    fn run(&self) {
        self.write();
        let mut scratch = SCRATCH.take();
        let items = &self.call.plan.items;
        while let Some(item) = items.get(self.next_item.fetch_add(1, Ordering::Relaxed)) {
            let upcoming = items.get(self.next_item.load(Ordering::Relaxed));
            // SAFETY: `paged_attention` has checked the call and the instructions; each item is
            // taken once, after all parts are written.
            unsafe {
                let kernel = Attend { call: &self.call, item, upcoming, scratch: &mut scratch };
                self.instructions.run(kernel);
            };
        }
        SCRATCH.set(scratch);
    }

    /// Writes new tokens, and returns when all are written.
    fn write(&self) {
        let Call { shape, memory, rows, .. } = self.call;
        let write = match shape.dtype {
            DType::Float32 => write_tokens::<f32>,
            DType::BFloat16 => write_tokens::<BFloat16>,
            DType::Float16 => write_tokens::<Float16>,
        };
        loop {
            let part = self.next_part.fetch_add(1, Ordering::Relaxed);
            if part >= self.write_parts {
                break;
            }
            // SAFETY: the call is checked, each part is taken once, and no thread reads yet.
            unsafe { write(shape, memory, rows, part, self.write_parts) };
            self.written_parts.fetch_add(1, Ordering::Release);
        }
        // A part that is taken is being written; its thread may have lost its core meanwhile.
        nap_until(|| self.written_parts.load(Ordering::Acquire) == self.write_parts);
    }
}
