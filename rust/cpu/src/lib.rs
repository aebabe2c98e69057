//! CPU kernels of a model: paged attention and the layers around it.
//!
//! # Invariants
//!
//! 1. All arguments are checked before the first byte is read or written.
//! 2. The result of a token depends on its row alone, to the last bit: not on the batch, on the
//!    number of threads or their timing.  Every sum is made in one order.
//! 3. No two threads write the same byte.
//!
//! # Costs
//!
//! Work runs on the threads of a [`Team`], which are started once and sleep when idle.

#![deny(unsafe_code)] // modules with pointers and intrinsics allow it, with a reason

#[cfg(target_endian = "big")]
compile_error!("pairs of 16-bit numbers are read as little-endian words");

pub mod attention;
pub mod bytes;
mod draw;
mod element;
mod elementwise;
pub mod embedding;
mod error;
#[cfg(target_os = "linux")]
pub mod exchange;
#[cfg(target_os = "linux")]
pub mod futex;
mod isa;
mod kernel;
pub mod layer;
mod level;
pub mod linear;
mod logits;
mod logprobs;
pub mod lora;
mod math;
pub mod moves;
#[cfg(target_arch = "aarch64")]
mod neon;
mod number;
pub mod pack;
mod pages;
mod portable;
mod rounding;
mod scratch;
mod storage;
mod team;
#[cfg(test)]
mod tests;
#[cfg(target_os = "linux")]
mod threads;
mod top_k;
mod vectors;
mod wait;
#[cfg(target_arch = "x86_64")]
mod x86;

pub use draw::{Draws, Sampling, draw};
pub use elementwise::{Norm, rms_norm};
pub use error::{Error, Result};
pub use isa::InstructionSet;
pub use logits::Logits;
pub use logprobs::logprobs;
pub use number::DType;
pub use pages::advise_huge_pages;
pub use rounding::round_to_blocks;
pub use team::{Execution, Sequential, Team};
#[cfg(target_os = "linux")]
pub use threads::{Threads, Waits};
pub use top_k::top_k;
