//! Errors of calls.

use std::fmt;

/// Arguments that do not fit each other: what was given and what is accepted.  Nothing was
/// read or written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Error(pub(crate) String);

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Error {}

/// The result of a call that can be refused.
pub type Result<T> = std::result::Result<T, Error>;
