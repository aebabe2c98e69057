//! Threads that run a function together.

use std::sync::atomic::{AtomicUsize, Ordering};

use crate::error::{Error, Result};
use crate::isa::InstructionSet;

/// A group of threads that can run one function at once.
///
/// The kernels use no other threads, so a caller may supply its thread pool.
pub trait Team: Sync {
    /// Calls `work` on at most `num_threads` threads, on the caller's among them, and returns
    /// when all calls have.  A team may use fewer threads than requested.
    fn run(&self, num_threads: usize, work: &(dyn Fn() + Sync));
}

/// The caller's thread alone.
#[derive(Clone, Copy, Debug, Default)]
pub struct Sequential;

impl Team for Sequential {
    fn run(&self, _num_threads: usize, work: &(dyn Fn() + Sync)) {
        work();
    }
}

/// Where and how a call is computed.
#[derive(Clone, Copy)]
pub struct Execution<'a> {
    /// Instructions to use.
    pub instructions: InstructionSet,
    /// Threads to use.
    pub team: &'a dyn Team,
    /// Number of threads to use.
    pub num_threads: usize,
}

impl Execution<'_> {
    /// Calls `work` with each number below `num_items`, once.
    ///
    /// A thread takes its share in order, then what is left of others': neighbours share cached
    /// memory, and a delayed thread delays no other.
    pub(crate) fn for_each(&self, num_items: usize, work: &(dyn Fn(usize) + Sync)) {
        self.share(num_items, &|items| items.for_each(work));
    }

    /// As [`Execution::for_each`], but calls `work` once on a thread, with all items that it takes.
    pub(crate) fn share(
        &self,
        num_items: usize,
        work: &(dyn Fn(&mut dyn Iterator<Item = usize>) + Sync),
    ) {
        let num_shares = self.num_threads.clamp(1, num_items.max(1));
        if num_shares == 1 {
            return work(&mut (0..num_items));
        }
        let start_of = |share: usize| share * num_items / num_shares;
        let next: Vec<AtomicUsize> =
            (0..num_shares).map(|share| AtomicUsize::new(start_of(share))).collect();
        let num_begun = AtomicUsize::new(0);
        self.team.run(num_shares, &|| {
            let own = num_begun.fetch_add(1, Ordering::Relaxed);
            let shares = (own..num_shares).chain(0..own.min(num_shares));
            work(&mut shares.flat_map(|share| {
                let (next, end) = (&next[share], start_of(share + 1));
                let take = || next.fetch_add(1, Ordering::Relaxed);
                std::iter::repeat_with(take).take_while(move |&item| item < end)
            }));
        });
    }

    /// Refuses instructions that the CPU lacks.
    pub(crate) fn check(&self) -> Result<()> {
        if self.instructions.is_available() {
            return Ok(());
        }
        let instructions = self.instructions;
        Err(Error(format!("this CPU does not have the instructions {instructions:?}")))
    }
}
