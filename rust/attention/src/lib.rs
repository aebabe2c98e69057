//! Paged attention on the CPU: one call answers one layer for a whole flat batch.
//!
//! A call first writes the step's new keys and values into the pool, then attends, decode rows
//! and ragged prefill rows alike.  What is computed is what `kernels/reference.py` says.
//!
//! # Layout of a pool
//!
//! A block takes `block_size * Hkv * (D + Dv)` elements in any layout, so whole blocks can be
//! copied and swapped without knowing it.  Where the shape allows it (see [`Shape::has_panels`])
//! a block holds `[Hkv][block_size / 16]` *panels* of 16 tokens, each the keys transposed,
//! `[D][16]`, then the values, `[16][Dv]`.  So 16 scores are made side by side without a
//! horizontal sum, a weight meets whole vectors of values, and what one work item reads of a
//! block is one contiguous piece.  In bfloat16 the unit is a pair that lies side by side: two
//! dimensions of a key, `[D / 2][16][2]`, and two tokens of a value, `[8][Dv][2]`: this is what
//! a dot-product instruction takes, and without one a shift and a mask make two float32
//! vectors of it.  Any other shape is stored `[block_size][Hkv][D + Dv]`, and 16 tokens at a
//! time are made into panels when they are read.
//!
//! # Invariants
//!
//! 1. All arguments are checked before the first byte is read or written.
//! 2. A slot that no visible key lives in is never used: it may hold NaN.
//! 3. The answer of a query depends on its row alone, to the last bit: not on the batch, on how
//!    the prompt was cut, on the number of threads or their timing.  Keys are taken in chunks
//!    at fixed positions, each with its own maximum, and chunks are merged in order.
//! 4. No two threads write the same byte: new tokens are dealt by block, answers by work item.
//!
//! # Costs
//!
//! A KV head is read once for all query heads of its group.  A call allocates its list of work
//! items; each thread keeps its scratch memory, about 100 KiB, for the next call.

#![deny(unsafe_code)] // the modules with pointers and intrinsics say so and why

#[cfg(target_endian = "big")]
compile_error!("pairs of bfloat16 are read as little-endian words");

mod check;
mod error;
mod isa;
mod kernel;
mod layout;
mod number;
#[cfg(target_os = "linux")]
mod openmp;
mod plan;
mod portable;
mod shape;
mod softmax;
mod team;
mod tile;
mod worker;
#[cfg(target_arch = "x86_64")]
mod x86;

pub use error::{Error, Result};
pub use isa::InstructionSet;
pub use layout::Place;
#[cfg(target_os = "linux")]
pub use openmp::OpenMp;
pub use shape::{DType, Memory, Options, Rows, Shape, Tokens};
pub use team::{Sequential, Team};
pub use worker::{Execution, paged_attention};
