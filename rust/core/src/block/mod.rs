//! Physical KV blocks of one tier: who holds them and which is handed out next.
//!
//! Called by [`crate::space`] alone; knows nothing of sequences.

mod pool;
mod uncached;

pub use pool::BlockPool;
pub use uncached::UncachedBlockAllocator;
