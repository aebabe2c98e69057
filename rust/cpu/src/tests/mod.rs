//! Tests of several modules at once, through the names that a caller can use.
//!
//! Here and not beside `src`, where the kernels would be compiled once more for them.

mod common;
mod exchange;
mod guard;
mod numbers;
mod reference;
mod refusals;
mod waits;
