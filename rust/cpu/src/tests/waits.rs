//! Counts of the time that calls lose to waiting, in a process without other calls.
#![cfg(target_os = "linux")]
#![allow(clippy::disallowed_methods, reason = "a wait takes time")]

use std::env::current_exe;
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::{current, sleep, yield_now};
use std::time::Duration;

use crate::{Team, Threads, Waits};

const LATE: Duration = Duration::from_millis(30);

#[test]
fn waits_and_absent_threads_are_counted() {
    let program = current_exe().expect("this test's own");
    let name = concat!(module_path!(), "::in_a_separate_process");
    let (_, name) = name.split_once("::").expect("a crate and what is in it");
    let done =
        Command::new(program).args(["--ignored", "--exact", name]).output().expect("it runs");
    let said = String::from_utf8_lossy(&done.stdout);
    assert!(done.status.success() && said.contains("1 passed"), "{said}");
}

#[test]
#[ignore = "run by the test above"]
fn in_a_separate_process() {
    assert_eq!(Threads.waits(), Waits::default());

    // Both threads take part.  A call is counted when the caller's own work is done, right before it
    // waits: the other thread is late from then on.
    let caller = current().id();
    let num_begun = AtomicUsize::new(0);
    Threads.run(2, &|| {
        num_begun.fetch_add(1, Ordering::SeqCst);
        while num_begun.load(Ordering::SeqCst) < 2 {
            yield_now();
        }
        if current().id() != caller {
            while Threads.waits().num_calls == 0 {
                yield_now();
            }
            sleep(LATE);
        }
    });
    let late = Threads.waits();
    assert_eq!((late.num_calls, late.num_absent), (1, 0));
    assert!(late.waited >= LATE / 2, "{late:?}");

    // A call within a call has no thread but its caller's.
    Threads.run(2, &|| {
        if current().id() == caller {
            Threads.run(3, &|| ());
        }
    });
    let nested = Threads.waits();
    assert_eq!(nested.num_calls, 3);
    assert!((2..=3).contains(&nested.num_absent), "{nested:?}");

    // A call of one thread does not wait.
    Threads.run(1, &|| ());
    assert_eq!(Threads.waits().num_calls, 3);
}
