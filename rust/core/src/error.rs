//! Errors of calls.  Running out of blocks or budget is no error; those outcomes are values
//! ([`crate::space::AllocStatus`], [`crate::outputs::IgnoredReason`]).

use std::fmt;

/// Reason why a call was refused.
///
/// A refused call leaves the state unchanged.  [`Error::Invariant`] reports a broken state.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum Error {
    /// A configuration that cannot work.
    Config(String),
    /// A request that cannot be accepted.
    Request(String),
    /// A handle of no live object: its kind and integer form.
    StaleHandle {
        /// "sequence" or "sequence group".
        kind: &'static str,
        /// [`crate::arena::Handle::to_bits`] of the handle.
        bits: i64,
    },
    /// A call of a step out of order.
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
                "no {kind} has the handle {bits}; it has ended, or the handle was never returned"
            ),
        }
    }
}

impl std::error::Error for Error {}

/// The result of a call that can be refused.
pub type Result<T> = std::result::Result<T, Error>;

/// Returns [`Error::Invariant`] with a formatted text unless a condition holds.
macro_rules! ensure {
    ($holds:expr, $($text:tt)*) => {
        if !$holds {
            return Err($crate::error::Error::Invariant(format!($($text)*)));
        }
    };
}
pub(crate) use ensure;
