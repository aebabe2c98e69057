//! Words in memory that processes share: one process increments, others sleep until it does.
//!
//! # Invariants
//!
//! 1. Writes before a bump are visible to a process that sees the bump.
//! 2. A bump between a check and the sleep is not lost: the kernel checks again.
//!
//! # Costs
//!
//! A bump is one system call, with or without waiters; a wake-up is some 5 us on the other side.  A
//! process that sleeps takes no processor time.
#![expect(unsafe_code, reason = "words are addresses in memory that other processes map")]

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

/// Increments a word and wakes every process that waits for it.
///
/// # Safety
/// `word` is aligned and mapped, and every process uses it through this module alone.
pub unsafe fn bump(word: *mut u32) {
    // SAFETY: the caller's promise.
    let atomic = unsafe { AtomicU32::from_ptr(word) };
    atomic.fetch_add(1, Ordering::Release);
    // SAFETY: a wake reads no memory; a wake without waiters is no error.
    unsafe { libc::syscall(libc::SYS_futex, word, libc::FUTEX_WAKE, i32::MAX) };
}

/// Sleeps until a word is no longer `seen`, and returns its value; that may still be `seen`, after
/// `timeout`, a signal, or the wake-up of a bump that was seen before its system call.
///
/// # Safety
/// As of [`bump`], for as long as the call lasts.
pub unsafe fn wait(word: *mut u32, seen: u32, timeout: Duration) -> u32 {
    // SAFETY: the caller's promise.
    let atomic = unsafe { AtomicU32::from_ptr(word) };
    if atomic.load(Ordering::Acquire) == seen {
        let timeout = libc::timespec {
            tv_sec: timeout.as_secs().try_into().unwrap_or(libc::time_t::MAX),
            tv_nsec: timeout.subsec_nanos().into(),
        };
        // SAFETY: the word is mapped and `timeout` lives.
        unsafe { libc::syscall(libc::SYS_futex, word, libc::FUTEX_WAIT, seen, &raw const timeout) };
    }
    atomic.load(Ordering::Acquire)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The value that a word changes to, within ten seconds.
    unsafe fn changed(word: *mut u32, seen: u32) -> u32 {
        for _ in 0..1000 {
            // SAFETY: the caller's promise.
            let now = unsafe { wait(word, seen, Duration::from_millis(10)) };
            if now != seen {
                return now;
            }
        }
        seen
    }

    #[test]
    fn every_bump_is_seen_by_a_thread_that_sleeps() {
        let mut words = Box::new([0_u32, 0]);
        let [there, back] = &mut *words;
        let (there, back) = (std::ptr::from_mut(there), std::ptr::from_mut(back));
        let addresses = (there.expose_provenance(), back.expose_provenance());
        let echo = std::thread::spawn(move || {
            let there = std::ptr::with_exposed_provenance_mut(addresses.0);
            let back = std::ptr::with_exposed_provenance_mut(addresses.1);
            for seen in 0..20_000 {
                // SAFETY: the words outlive the thread.
                let now = unsafe { changed(there, seen) };
                assert_eq!(now, seen + 1);
                // SAFETY: the same.
                unsafe { bump(back) };
            }
        });
        for seen in 0..20_000 {
            // SAFETY: the words live until the thread has ended.
            let now = unsafe {
                bump(there);
                changed(back, seen)
            };
            assert_eq!(now, seen + 1);
        }
        assert!(echo.join().is_ok());
    }

    #[test]
    fn a_word_that_stays_is_waited_for_no_longer_than_asked() {
        let mut word = 7;
        // SAFETY: the word is this thread's.
        let now = unsafe { wait(&raw mut word, 7, Duration::from_millis(20)) };
        assert_eq!(now, 7);
    }
}
