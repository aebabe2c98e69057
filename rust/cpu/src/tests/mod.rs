//! Tests of several modules at once, by what a caller can name.
//!
//! Here and not beside `src`, where the kernels would be compiled once more for them.

mod common;
mod exchange;
mod guard;
mod reference;
mod refusals;
mod waits;
