//! What can be wrong with a call.  Running out of blocks or budget is normal life and never
//! an error; those are values ([`crate::space::AllocStatus`], [`crate::outputs::IgnoredReason`]).

use std::fmt;

/// Why a call was refused.  The state is unchanged whenever one of these is returned, except
/// for [`Error::Invariant`], which reports a state that must not be.
#[derive(Clone, Debug, PartialEq)]
pub enum Error {
    /// A configuration that cannot work.
    Config(String),
    /// A request that cannot be accepted.
    Request(String),
    /// A handle that names nothing (any more): which kind, and its integer form.
    StaleHandle {
        /// "sequence" or "sequence group".
        kind: &'static str,
        /// [`crate::arena::Handle::to_bits`] of the handle given.
        bits: i64,
    },
    /// Calls of a step out of order.
    Step(String),
    /// Arrays that do not belong to the step: wrong length, order or value.
    Arrays(String),
    /// The whole-state checker found a broken invariant: a bug in this crate.
    Invariant(String),
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Config(text)
            | Self::Request(text)
            | Self::Step(text)
            | Self::Arrays(text)
            | Self::Invariant(text) => f.write_str(text),
            Self::StaleHandle { kind, bits } => write!(
                f,
                "no {kind} has the handle {bits}; it has ended, or the handle was never given out"
            ),
        }
    }
}

impl std::error::Error for Error {}

/// The result of a call that can be refused.
pub type Result<T> = std::result::Result<T, Error>;
