//! Bounded spinning, for events that other threads mostly cause within microseconds.
//!
//! # Costs
//!
//! The clock is read every `LOOKS` looks, which take about half a microsecond.
#![expect(clippy::disallowed_methods, reason = "the time spent waiting decides no result")]

use std::time::{Duration, Instant};

/// Looks between two readings of the clock.
const LOOKS: u32 = 32;
/// How long a thread spins before it naps.
const SPIN: Duration = Duration::from_micros(20);
/// Length of a nap; the kernel's timer adds some 50 us.
const NAP: Duration = Duration::from_micros(10);

/// Looks until `is_over`, for about `limit`; returns whether it is.
pub(crate) fn spin_until(limit: Duration, is_over: impl Fn() -> bool) -> bool {
    let mut begun = None;
    loop {
        for _ in 0..LOOKS {
            if is_over() {
                return true;
            }
            std::hint::spin_loop();
        }
        if begun.get_or_insert_with(Instant::now).elapsed() >= limit {
            return is_over();
        }
    }
}

/// Waits until `is_over`, leaving the core to others after a short spin: the thread that is waited
/// for may be one of them.
pub(crate) fn nap_until(is_over: impl Fn() -> bool) {
    while !spin_until(SPIN, &is_over) {
        std::thread::sleep(NAP);
    }
}
