//! The process's compute threads: between two calls they spin for a moment, then sleep.
//!
//! # Invariants
//!
//! 1. A thread takes part in a call only after it has taken a seat, and seats are open only while
//!    the caller itself works.  So the caller waits for threads that compute, never for one that
//!    still sleeps or that another process keeps from running.
//! 2. The work of a call is read only by threads with a seat, and the caller returns after each of
//!    them has ended.
//! 3. No thread spins without bound: after `SPIN` it sleeps on a futex, and at once while other
//!    processes need its core.
//! 4. One call at a time has the threads; a second caller computes alone meanwhile.
//! 5. The threads keep off the caller's core.  Where every core is busy the kernel wakes a thread
//!    on the core of the one that woke it, and the two then share it however long they compute.
//!
//! # Costs
//!
//! A call whose threads still spin costs about 1 us, one whose threads sleep some 5 us for the
//! caller and one wake-up of a core, during which the caller computes.  An idle thread takes `SPIN`
//! of processor time after each call.  [`Threads::waits`] counts what was lost to waiting.
#![expect(
    unsafe_code,
    reason = "a closure is lent to other threads, which sleep on a word of memory"
)]
#![expect(clippy::disallowed_types, reason = "callers of several threads take turns")]
#![expect(clippy::disallowed_methods, reason = "the time spent waiting decides no result")]

use std::any::Any;
use std::cell::UnsafeCell;
use std::ffi::c_int;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError, TryLockError};
use std::time::{Duration, Instant};

use crate::team::Team;
use crate::wait::spin_until;

/// How long a thread spins before it sleeps: longer than what lies between two calls of a step.
const SPIN: Duration = Duration::from_micros(100);
/// How long it spins in any case: most waits within a layer are shorter.
const BRIEF: Duration = Duration::from_micros(3);
/// How long a thread that was kept from running sleeps at once: spinning would only use up the
/// share of a core that others need as well.
const SHARED: Duration = Duration::from_millis(20);

/// How long threads stay placed while the caller moves to other cores.
const PLACED: Duration = Duration::from_millis(10);

/// Seats of a turn, in the lowest bits of the gate; the number of the turn is in the others.
const SEATS: u32 = 0xff;

type Work<'a> = dyn Fn() + Sync + 'a;
type Panic = Box<dyn Any + Send>;

/// The compute threads of this process, started by the first call that needs them.
#[derive(Clone, Copy, Debug, Default)]
pub struct Threads;

/// Calls of this process's threads, and the time they lost to waiting.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Waits {
    /// Calls of more than one thread.
    pub num_calls: u64,
    /// Seats of these calls that no thread took: it slept, or had no core, until the work was done.
    pub num_absent: u64,
    /// Time in which callers, their own work done, waited for threads that still computed.
    pub waited: Duration,
}

impl Threads {
    /// Waits of all calls so far.
    pub fn waits(self) -> Waits {
        Waits {
            num_calls: BOARD.num_calls.load(Ordering::Relaxed),
            num_absent: BOARD.num_absent.load(Ordering::Relaxed),
            waited: Duration::from_nanos(BOARD.waited_ns.load(Ordering::Relaxed)),
        }
    }
}

static BOARD: Board = Board {
    caller: Mutex::new(Started { process: 0, threads: 0, core: -1, placed: None }),
    names: Mutex::new(Vec::new()),
    gate: AtomicU32::new(0),
    sleepers: AtomicUsize::new(0),
    work: Lent(UnsafeCell::new(None)),
    ended: AtomicU32::new(0),
    caller_sleeps: AtomicBool::new(false),
    panic: Mutex::new(None),
    num_calls: AtomicU64::new(0),
    num_absent: AtomicU64::new(0),
    waited_ns: AtomicU64::new(0),
};

impl Team for Threads {
    fn run(&self, num_threads: usize, work: &(dyn Fn() + Sync)) {
        let seats = u32::try_from(num_threads.saturating_sub(1)).unwrap_or(SEATS).min(SEATS);
        let mut started = match BOARD.caller.try_lock() {
            Ok(started) => started,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => {
                BOARD.count(seats);
                return work();
            }
        };
        let seats = seats.min(started.at_least(seats));
        if seats == 0 {
            return work();
        }
        started.keep_off_this_core();
        BOARD.run(seats, work);
    }
}

/// The threads that were started, and in which process: a child that was forked has none.
struct Started {
    process: u32,
    threads: u32,
    /// The caller's core when the threads were placed, and when that was.
    core: c_int,
    placed: Option<Instant>,
}

impl Started {
    /// Starts threads up to `wanted`; returns how many run, fewer if the system refuses one.
    fn at_least(&mut self, wanted: u32) -> u32 {
        if self.process != std::process::id() {
            *self = Self { process: std::process::id(), threads: 0, core: -1, placed: None };
            BOARD.sleepers.store(0, Ordering::SeqCst);
            BOARD.with_names(Vec::clear);
        }
        while self.threads < wanted {
            let thread = std::thread::Builder::new().name(format!("pagedserve-{}", self.threads));
            if thread.spawn(|| BOARD.serve()).is_err() {
                break;
            }
            self.threads += 1;
            (self.core, self.placed) = (-1, None); // the new one is to be placed, too
        }
        self.threads
    }

    /// Lets the threads run on the cores of the caller but the one it is on.
    ///
    /// Callers seldom move, and this looks no more often than once in `PLACED`.
    fn keep_off_this_core(&mut self) {
        // SAFETY: no arguments.
        let core = unsafe { libc::sched_getcpu() };
        if core == self.core || self.placed.is_some_and(|placed| placed.elapsed() < PLACED) {
            return;
        }
        let num_named = BOARD.with_names(|names| {
            if let Some(others) = cores_but(core) {
                // SAFETY: a set of cores is read; that a system refuses one is no error here.
                names.iter().for_each(|name| unsafe {
                    libc::sched_setaffinity(*name, size_of::<libc::cpu_set_t>(), &raw const others);
                });
            }
            names.len()
        });
        let is_complete = u32::try_from(num_named) == Ok(self.threads);
        self.core = if is_complete { core } else { -1 };
        self.placed = is_complete.then(Instant::now);
    }
}

/// The cores that the calling thread may use, without one of them; None if no other is left.
fn cores_but(core: c_int) -> Option<libc::cpu_set_t> {
    let core = usize::try_from(core).ok()?;
    // SAFETY: a set is bits alone, and the calls write no more than one.
    unsafe {
        let mut cores: libc::cpu_set_t = std::mem::zeroed();
        let is_known =
            libc::sched_getaffinity(0, size_of::<libc::cpu_set_t>(), &raw mut cores) == 0;
        if !is_known || core >= libc::CPU_SETSIZE.try_into().unwrap_or(0) {
            return None;
        }
        libc::CPU_CLR(core, &mut cores);
        (libc::CPU_COUNT(&cores) > 0).then_some(cores)
    }
}

/// State shared by caller and threads.
struct Board {
    /// Held by the caller whose turn it is.
    caller: Mutex<Started>,
    /// The kernel's names of the threads.
    names: Mutex<Vec<libc::pid_t>>,
    /// The number of the turn and its open seats.
    gate: AtomicU32,
    /// Threads that sleep at the gate, or are about to.
    sleepers: AtomicUsize,
    work: Lent,
    /// Threads that have ended this turn's work.
    ended: AtomicU32,
    /// Whether the caller sleeps until one more has ended.
    caller_sleeps: AtomicBool,
    /// Panic of a thread in this turn; raised again in the caller.
    panic: Mutex<Option<Panic>>,
    /// The numbers of [`Waits`].
    num_calls: AtomicU64,
    num_absent: AtomicU64,
    waited_ns: AtomicU64,
}

/// The closure of a turn.
struct Lent(UnsafeCell<Option<*const Work<'static>>>);

// SAFETY: written by the caller alone, between two turns; read by threads that have a seat.
unsafe impl Sync for Lent {}

impl Board {
    /// A turn: opens seats, works, closes them and waits for the threads that have taken one.
    fn run(&self, seats: u32, work: &Work<'_>) {
        // SAFETY: only the lifetime changes.  No thread has a seat, so none reads; before this call
        // returns all that took one have ended.
        unsafe {
            *self.work.0.get() =
                Some(std::mem::transmute::<&Work<'_>, &'static Work<'static>>(work));
        };
        self.ended.store(0, Ordering::Relaxed);
        let turn = (self.gate.load(Ordering::Relaxed) & !SEATS).wrapping_add(SEATS + 1);
        self.gate.store(turn | seats, Ordering::SeqCst);
        if self.sleepers.load(Ordering::SeqCst) > 0 {
            wake(&self.gate);
        }
        let result = catch_unwind(AssertUnwindSafe(work));
        let open = self.gate.fetch_and(!SEATS, Ordering::SeqCst) & SEATS;
        self.count(open);
        self.wait_for_ends(seats - open);
        let raised = self.panic.lock().ok().and_then(|mut panic| panic.take());
        if let Some(panic) = result.err().or(raised) {
            resume_unwind(panic);
        }
    }

    /// Counts a call, and its seats that no thread took.
    fn count(&self, absent: u32) {
        self.num_calls.fetch_add(1, Ordering::Relaxed);
        self.num_absent.fetch_add(absent.into(), Ordering::Relaxed);
    }

    /// Returns once `taken` threads have ended.
    fn wait_for_ends(&self, taken: u32) {
        if self.ended.load(Ordering::SeqCst) == taken {
            return;
        }
        let begun = Instant::now();
        self.sleep_until_ended(taken);
        let waited = u64::try_from(begun.elapsed().as_nanos()).unwrap_or(u64::MAX);
        self.waited_ns.fetch_add(waited, Ordering::Relaxed);
    }

    /// Spins, then sleeps, until `taken` threads have ended.
    fn sleep_until_ended(&self, taken: u32) {
        if spin_until(SPIN, || self.ended.load(Ordering::SeqCst) == taken) {
            return;
        }
        self.caller_sleeps.store(true, Ordering::SeqCst);
        loop {
            let ended = self.ended.load(Ordering::SeqCst);
            if ended == taken {
                break;
            }
            sleep(&self.ended, ended);
        }
        self.caller_sleeps.store(false, Ordering::SeqCst);
    }

    fn with_names<T>(&self, act: impl FnOnce(&mut Vec<libc::pid_t>) -> T) -> T {
        act(&mut self.names.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Main loop of a thread, for the life of the process.
    fn serve(&self) {
        // SAFETY: no arguments.
        let name = unsafe { libc::gettid() };
        self.with_names(|names| names.push(name));
        let mut seen = 0;
        let mut core = Core::new();
        loop {
            seen = self.next_turn(seen, &mut core);
            if !self.takes_seat(seen) {
                continue;
            }
            // SAFETY: this thread has a seat, so the closure lives and is not written.
            let work = unsafe { (*self.work.0.get()).map(|work| &*work) };
            if let Some(Err(panic)) = work.map(|work| catch_unwind(AssertUnwindSafe(work)))
                && let Ok(mut first) = self.panic.lock()
            {
                first.get_or_insert(panic);
            }
            self.ended.fetch_add(1, Ordering::SeqCst);
            if self.caller_sleeps.load(Ordering::SeqCst) {
                wake(&self.ended);
            }
        }
    }

    /// Waits for a turn after the one that was `seen`, and returns its number.
    fn next_turn(&self, seen: u32, core: &mut Core) -> u32 {
        let turn = || self.gate.load(Ordering::SeqCst) & !SEATS;
        let is_next = || turn() != seen;
        if !spin_until(BRIEF, is_next) && !spin_until(core.spin(), is_next) {
            self.sleepers.fetch_add(1, Ordering::SeqCst);
            loop {
                let gate = self.gate.load(Ordering::SeqCst);
                if gate & !SEATS != seen {
                    break;
                }
                sleep(&self.gate, gate);
            }
            self.sleepers.fetch_sub(1, Ordering::SeqCst);
        }
        turn()
    }

    /// Takes a seat of a turn, unless all are taken or the turn is over.
    fn takes_seat(&self, turn: u32) -> bool {
        let fewer = |gate: u32| (gate & !SEATS == turn && gate & SEATS > 0).then(|| gate - 1);
        self.gate.fetch_update(Ordering::SeqCst, Ordering::SeqCst, fewer).is_ok()
    }
}

/// Load of the core that a thread runs on.
struct Core {
    num_preempted: i64,
    shared_until: Option<Instant>,
}

impl Core {
    fn new() -> Self {
        Self { num_preempted: num_preempted(), shared_until: None }
    }

    /// How long to spin for the next turn.
    fn spin(&mut self) -> Duration {
        let num_preempted = num_preempted();
        let now = Instant::now();
        if num_preempted != self.num_preempted {
            self.num_preempted = num_preempted;
            self.shared_until = Some(now + SHARED);
        }
        if self.shared_until.is_some_and(|until| now < until) { Duration::ZERO } else { SPIN }
    }
}

/// How often the kernel has taken the core from this thread while it could have continued.
fn num_preempted() -> i64 {
    // SAFETY: numbers alone, for which all bits 0 is a value; the call writes no more than them.
    let usage = unsafe {
        let mut usage: libc::rusage = std::mem::zeroed();
        libc::getrusage(libc::RUSAGE_THREAD, &raw mut usage);
        usage
    };
    usage.ru_nivcsw
}

/// Sleeps while a word has the value that was `seen`.
fn sleep(word: &AtomicU32, seen: u32) {
    let operation = libc::FUTEX_WAIT | libc::FUTEX_PRIVATE_FLAG;
    // SAFETY: the word lives as long as the process; no timeout is given.
    unsafe {
        let timeout = std::ptr::null::<libc::timespec>();
        libc::syscall(libc::SYS_futex, word.as_ptr(), operation, seen, timeout)
    };
}

/// Wakes all threads that sleep on a word.
fn wake(word: &AtomicU32) {
    let operation = libc::FUTEX_WAKE | libc::FUTEX_PRIVATE_FLAG;
    // SAFETY: a wake reads no memory.
    unsafe { libc::syscall(libc::SYS_futex, word.as_ptr(), operation, i32::MAX) };
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::isa::InstructionSet;
    use crate::team::Execution;

    fn for_each(num_threads: usize, num_items: usize, work: &(dyn Fn(usize) + Sync)) {
        let execution =
            Execution { instructions: InstructionSet::Portable, team: &Threads, num_threads };
        execution.for_each(num_items, work);
    }

    fn each_is_done_once(num_threads: usize, num_items: usize) {
        let done: Vec<AtomicU32> = (0..num_items).map(|_| AtomicU32::new(0)).collect();
        for_each(num_threads, num_items, &|item| {
            done[item].fetch_add(1, Ordering::Relaxed);
        });
        assert!(done.iter().all(|times| times.load(Ordering::Relaxed) == 1));
    }

    #[test]
    fn each_item_is_done_once_in_each_of_many_calls() {
        for call in 0..20_000 {
            each_is_done_once(2 + call % 3, call % 40);
            if call % 1000 == 0 {
                std::thread::sleep(Duration::from_micros(300)); // threads fall asleep
            }
        }
    }

    #[test]
    fn callers_at_the_same_time_do_their_own_work() {
        let callers: Vec<_> = (0..4)
            .map(|_| std::thread::spawn(|| (0..2_000).for_each(|_| each_is_done_once(3, 17))))
            .collect();
        assert!(callers.into_iter().all(|caller| caller.join().is_ok()));
    }

    #[test]
    fn a_call_within_a_call_is_done() {
        for_each(3, 8, &|_| each_is_done_once(3, 8));
    }

    #[test]
    fn a_panic_of_any_thread_reaches_the_caller_and_ends_no_other_call() {
        for item in 0..12 {
            let call = || for_each(3, 12, &|at| assert!(at != item, "item {at}"));
            assert!(catch_unwind(call).is_err());
            each_is_done_once(3, 12);
        }
    }
}
