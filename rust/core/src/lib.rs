//! The scheduler and the KV-block bookkeeping of a paged-attention serving engine.
//!
//! A [`Scheduler`] owns the requests, their token ids and the blocks
//! that hold their keys and values.  It never sees a tensor: the caller runs the model on the
//! inputs that it prepares, and passes back the sampled tokens.
//!
//! | word | meaning |
//! |---|---|
//! | sequence | a prompt and what was generated after it |
//! | group | the sequences of one request |
//! | block | memory for the keys and values of `block_size` tokens, in every layer |
//! | slot | position of one token in the pool: block x block size + offset |
//! | row | one sequence in one step |
//!
//! A whole step:
//!
//! ```
//! use pagedserve_core::{
//!     CacheConfig, InputBuffers, Request, SampledOutputs, Scheduler, SchedulerConfig,
//! };
//!
//! let mut scheduler =
//!     Scheduler::new(SchedulerConfig::new(8, 64, 64), &CacheConfig::new(4, 32))?;
//! let request = Request::new(&[11, 12, 13, 14, 15], 0.0);
//! let (_group, seq) = scheduler.add_seq_group(&request)?;
//!
//! let outputs = scheduler.schedule(0.0)?;
//! assert_eq!((outputs.num_prefill_groups, outputs.num_batched_tokens), (1, 5));
//! let step_id = outputs.step_id;
//!
//! let (mut token_ids, mut positions, mut slot_mapping) = ([0; 64], [0; 64], [0; 64]);
//! let (mut query_start, mut seq_lens, mut block_tables) = ([0; 9], [0; 8], [0; 128]);
//! let (mut sample_index, mut sample_rows, mut row_handles) = ([0; 8], [0; 8], [0; 8]);
//! let mut inputs = InputBuffers::default();
//! inputs.token_ids = &mut token_ids;
//! inputs.positions = &mut positions;
//! inputs.slot_mapping = &mut slot_mapping;
//! inputs.query_start = &mut query_start;
//! inputs.seq_lens = &mut seq_lens;
//! inputs.block_tables = &mut block_tables;
//! inputs.sample_index = &mut sample_index;
//! inputs.sample_rows = &mut sample_rows;
//! inputs.row_handles = &mut row_handles;
//! scheduler.prepare_inputs(&mut inputs)?;
//! assert_eq!(token_ids[..5], [11, 12, 13, 14, 15]);
//! assert_eq!(sample_index[0], 4); // the logits of the last prompt token are sampled from
//!
//! // The model runs here; token 7 was sampled, and the sequence continues.
//! let results =
//!     SampledOutputs { parent_rows: &[0], token_start: &[0, 1], tokens: &[7], finish: &[0] };
//! assert_eq!(scheduler.update(step_id, results)?.handles, [seq]);
//! assert_eq!(*scheduler.sequence(seq)?.token_ids(), [11, 12, 13, 14, 15, 7]);
//! scheduler.check()?;
//! # Ok::<(), pagedserve_core::Error>(())
//! ```
//!
//! `examples/loop.rs` is a whole loop.
//!
//! Layers, of which no lower one names a higher one: `ids, error, config, hash, arena`, `lookup`,
//! `block`, `table`, `sequence`, `space`, `scheduler` with its data `outputs` and `inputs`.

#![forbid(unsafe_code)]
#![cfg_attr(test, allow(clippy::unwrap_used))]

pub mod arena;
pub mod block;
pub mod config;
pub mod error;
pub mod hash;
pub mod ids;
pub mod inputs;
pub mod log;
pub mod lookup;
pub mod outputs;
pub mod scheduler;
pub mod sequence;
pub mod space;
#[doc(hidden)]
pub mod table;

pub use config::{CacheConfig, SchedulerConfig};
pub use error::{Error, Result};
pub use inputs::InputBuffers;
pub use outputs::SchedulerOutputs;
pub use scheduler::{Drafts, SampledOutputs, Scheduler};
pub use sequence::Request;

/// The example of the README, compiled and run with the tests.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
