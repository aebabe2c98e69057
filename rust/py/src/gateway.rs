//! The gateway: all work of the binding that may take long goes through here.
//!
//! Owns the decision whether to hold the GIL, the lock of state that several threads share, and the
//! mapping of errors.  Invariants:
//! 1. What computes for more than some 20 us runs without the GIL, so other Python threads
//!    continue.
//! 2. No thread waits for a lock while holding the GIL.
//! 3. No Python code runs between a lock and its release: arguments are read before, results made
//!    into objects after.  So a thread never waits for itself.
//!
//! Costs: a lock some 20 ns; a release of the GIL some 0.1 us, plus the time for which others then
//! hold it.
#![expect(clippy::disallowed_types, reason = "Python's threads share what one of them made")]

use std::sync::{Mutex, PoisonError};

use pyo3::prelude::*;
use pyo3::sync::MutexExt;

use crate::error::OrRaise;

/// Cost of a call, in numbers that it reads, writes or multiplies.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Work(usize);

impl Work {
    /// At most some 20 us on one thread: not worth releasing the GIL.
    const SHORT: usize = 1 << 16;
    /// Numbers that cost as much as a row or a group in the scheduler, some 80 ns.
    const NUMBERS_PER_ROW: usize = 256;

    /// Unbounded cost, such as writing a file.
    pub(crate) const LONG: Self = Self(usize::MAX);

    /// Product of sizes: numbers touched.
    pub(crate) fn numbers(sizes: &[usize]) -> Self {
        Self(sizes.iter().fold(1, |product: usize, size| product.saturating_mul(*size)))
    }

    /// Rows or groups of the scheduler.
    pub(crate) fn rows(num_rows: usize) -> Self {
        Self::numbers(&[num_rows, Self::NUMBERS_PER_ROW])
    }

    /// Sum of both.
    pub(crate) fn and(self, other: Self) -> Self {
        Self(self.0.saturating_add(other.0))
    }

    fn is_long(self) -> bool {
        self.0 > Self::SHORT
    }
}

/// Computes, without the GIL where it takes long, and maps the error.
pub(crate) fn compute<T: Send, E: Send>(
    py: Python<'_>,
    work: Work,
    compute: impl FnOnce() -> Result<T, E> + Send,
) -> PyResult<T>
where
    Result<T, E>: OrRaise<T>,
{
    if work.is_long() { py.detach(compute) } else { compute() }.or_raise()
}

/// State with a lock: a thread that calls while another computes waits, without the GIL.
pub(crate) struct Locked<S>(Mutex<S>);

impl<S: Send> Locked<S> {
    pub(crate) fn new(state: S) -> Self {
        Self(Mutex::new(state))
    }

    /// Acts on the state, without the GIL where it takes long, and maps the error.
    pub(crate) fn act<T: Send, E: Send>(
        &self,
        py: Python<'_>,
        work: impl FnOnce(&S) -> Work,
        act: impl FnOnce(&mut S) -> Result<T, E> + Send,
    ) -> PyResult<T>
    where
        Result<T, E>: OrRaise<T>,
    {
        let result = {
            // A panic is raised in Python; the state that it left is used unchanged.
            let mut guard = self.0.lock_py_attached(py).unwrap_or_else(PoisonError::into_inner);
            let state = &mut *guard;
            if work(state).is_long() { py.detach(|| act(state)) } else { act(state) }
        };
        result.or_raise()
    }

    /// Looks up something of negligible cost.
    pub(crate) fn look<T>(&self, py: Python<'_>, look: impl FnOnce(&S) -> T) -> T {
        look(&self.0.lock_py_attached(py).unwrap_or_else(PoisonError::into_inner))
    }
}
