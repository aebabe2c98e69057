//! Who runs the work: threads that exist already.

use crate::error::{Error, Result};
use crate::isa::InstructionSet;

/// A group of threads that can run one function at once.
///
/// This crate starts no threads: a second pool beside the one of torch, whose idle threads
/// spin, halves the speed of everything.
pub trait Team: Sync {
    /// Calls `work` on at most `num_threads` threads, on the caller's among them, and returns
    /// when all calls have.  A team may use fewer threads than it is asked for.
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
    /// How many of them.
    pub num_threads: usize,
}

impl Execution<'_> {
    /// Refuses instructions that the CPU lacks.
    pub(crate) fn check(&self) -> Result<()> {
        if self.instructions.is_available() {
            return Ok(());
        }
        let instructions = self.instructions;
        Err(Error(format!("this CPU does not have the instructions {instructions:?}")))
    }
}
