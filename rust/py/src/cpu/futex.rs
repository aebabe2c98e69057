//! Words that processes share: the binding of [`pagedserve_cpu::futex`].
#![expect(unsafe_code, reason = "addresses from Python become pointers")]

use pagedserve_core::error::Error;
use pagedserve_cpu::futex;
use pyo3::prelude::*;

use crate::cpu::exchange::seconds;
use crate::error::to_py;
use crate::gateway::{Work, compute};

/// Increment a word of shared memory and wake every process that waits for it.
///
/// Earlier writes are visible to a process that sees the new value.
///
/// Args:
///     word: Address of a uint32, which processes change only by this function.
#[pyfunction]
pub(crate) fn bump(word: usize) -> PyResult<()> {
    let word = checked(word)?;
    // SAFETY: the caller promises, as the module says, that the address is that of mapped memory.
    unsafe { futex::bump(word) };
    Ok(())
}

/// Sleep without the GIL until a word of shared memory changes.
///
/// Args:
///     word: Address of a uint32.
///     seen: Last value that the caller saw.
///     timeout: Maximum wait in seconds.
///
/// Returns:
///     Current value; still ``seen`` after the timeout, a signal or an early wake-up.
#[pyfunction]
pub(crate) fn wait_for_bump(py: Python<'_>, word: usize, seen: u32, timeout: f64) -> PyResult<u32> {
    let address = checked(word)?.expose_provenance();
    let timeout = seconds(timeout)?;
    let wait = || {
        let word = std::ptr::with_exposed_provenance_mut(address);
        // SAFETY: as above, until the call returns.
        unsafe { futex::wait(word, seen, timeout) }
    };
    compute(py, Work::LONG, || Ok::<_, Error>(wait()))
}

fn checked(word: usize) -> PyResult<*mut u32> {
    if word == 0 || !word.is_multiple_of(size_of::<u32>()) {
        let text = format!("a word lies at a multiple of 4 bytes; got {word}");
        return Err(to_py(&Error::Arrays(text)));
    }
    Ok(std::ptr::with_exposed_provenance_mut(word))
}
