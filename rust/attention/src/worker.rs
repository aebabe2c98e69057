//! A call: checks, plan, and what each thread does.
#![expect(unsafe_code, reason = "the entry that takes pointers")]

use std::cell::Cell;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::check::check;
use crate::error::{Error, Result};
use crate::isa::InstructionSet;
use crate::layout::write_tokens;
use crate::number::BFloat16;
use crate::plan::Plan;
use crate::shape::{DType, Memory, Options, Rows, Shape};
use crate::team::Team;
use crate::tile::{Attend, Call, Scratch};

thread_local! {
    /// Taken while a thread works; a thread of the team outlives the call.
    static SCRATCH: Cell<Scratch> = Cell::default();
}

/// Where and how a call is computed.
#[derive(Clone, Copy)]
pub struct Execution<'a> {
    /// Instructions to use.
    pub instructions: InstructionSet,
    /// Threads to use.
    pub team: &'a dyn Team,
    /// How many of them.
    pub num_threads: usize,
}

/// Writes the step's keys and values into the pool, then answers every query.
///
/// Row r has the queries `query_start[r] .. query_start[r + 1]`; the last of them is at position
/// `seq_lens[r] - 1` and sees that many keys, its own included.  Every element of the output is
/// written.
///
/// # Errors
/// Arguments that do not fit each other, an id outside of the pool, an instruction set that the
/// CPU lacks.
///
/// # Safety
/// The memory is what [`Memory`] says for this shape and T = `slot_mapping.len()`; nobody else
/// writes any of it, or reads pool or output, while the call lasts.
pub unsafe fn paged_attention(
    shape: &Shape,
    memory: &Memory,
    rows: &Rows<'_>,
    options: &Options<'_>,
    execution: &Execution<'_>,
) -> Result<()> {
    check(shape, memory, rows, options)?;
    let Execution { instructions, team, num_threads } = *execution;
    if !instructions.is_available() {
        return Err(Error(format!("this CPU does not have the instructions {instructions:?}")));
    }
    if rows.slot_mapping.is_empty() {
        return Ok(());
    }
    let plan = Plan::new(shape, rows, options, num_threads);
    let mut partials = vec![0.0_f32; plan.num_partials];
    let call = Call { shape, memory, rows, options, plan: &plan, partials: partials.as_mut_ptr() };
    let work = Work {
        call,
        attend: instructions.kernel(shape.dtype),
        write_parts: if num_threads > 1 { 4 * num_threads } else { 1 },
        next_part: AtomicUsize::new(0),
        written_parts: AtomicUsize::new(0),
        next_item: AtomicUsize::new(0),
    };
    let num_threads = num_threads.min(plan.items.len());
    if num_threads > 1 {
        team.run(num_threads, &|| work.run());
    } else {
        work.run();
    }
    Ok(())
}

/// What the threads of a call share.
struct Work<'a> {
    call: Call<'a>,
    attend: Attend,
    write_parts: usize,
    next_part: AtomicUsize,
    written_parts: AtomicUsize,
    next_item: AtomicUsize,
}

// SAFETY: the pointers in `call` are used by invariant 4 of the crate: no two threads write the
// same bytes, and what one writes others read only after a counter has said so.
unsafe impl Sync for Work<'_> {}

impl Work<'_> {
    /// What each thread does until nothing is left.  Any number of threads will do.
    fn run(&self) {
        self.write();
        let mut scratch = SCRATCH.take();
        while let Some(item) =
            self.call.plan.items.get(self.next_item.fetch_add(1, Ordering::Relaxed))
        {
            // SAFETY: `paged_attention` has checked the call and the instructions; each item is
            // taken once, after all parts are written.
            unsafe { (self.attend)(&self.call, item, &mut scratch) };
        }
        SCRATCH.set(scratch);
    }

    /// Writes new tokens, and returns when all are written.
    fn write(&self) {
        let Call { shape, memory, rows, .. } = self.call;
        let write = match shape.dtype {
            DType::Float32 => write_tokens::<f32>,
            DType::BFloat16 => write_tokens::<BFloat16>,
        };
        loop {
            let part = self.next_part.fetch_add(1, Ordering::Relaxed);
            if part >= self.write_parts {
                break;
            }
            // SAFETY: the call is checked, each part is taken once, and nobody reads yet.
            unsafe { write(shape, memory, rows, part, self.write_parts) };
            self.written_parts.fetch_add(1, Ordering::Release);
        }
        // A part that is taken is being written by a running thread: this ends soon.
        let mut num_looks = 0_u32;
        while self.written_parts.load(Ordering::Acquire) < self.write_parts {
            num_looks += 1;
            if num_looks.is_multiple_of(1024) {
                std::thread::yield_now();
            }
            std::hint::spin_loop();
        }
    }
}
