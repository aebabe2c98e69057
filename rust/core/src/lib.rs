//! The scheduler and the KV-block bookkeeping of a paged-attention serving engine.
//!
//! A [`Scheduler`](scheduler::Scheduler) owns the requests, their token ids and the blocks
//! that their keys and values live in.  It never sees a tensor: the caller runs the model on
//! the inputs that it prepares, and tells it what was sampled.
//!
//! | word | meaning |
//! |---|---|
//! | sequence | a prompt and what was generated after it |
//! | group | the sequences of one request |
//! | block | room for the keys and values of `block_size` tokens, in every layer |
//! | slot | the place of one token in the pool: block x block size + offset |
//! | row | one sequence in one step |
//!
//! A whole step:
//!
//! ```
//! use pagedserve_core::config::{CacheConfig, SchedulerConfig};
//! use pagedserve_core::inputs::InputBuffers;
//! use pagedserve_core::scheduler::{Scheduler, SampledOutputs};
//! use pagedserve_core::sequence::Request;
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
//! let mut inputs = InputBuffers {
//!     token_ids: &mut [0; 64],
//!     positions: &mut [0; 64],
//!     slot_mapping: &mut [0; 64],
//!     query_start: &mut [0; 9],
//!     seq_lens: &mut [0; 8],
//!     block_tables: &mut [0; 128],
//!     sample_index: &mut [0; 8],
//!     sample_rows: &mut [0; 8],
//!     row_handles: &mut [0; 8],
//!     adapter_slots: None,
//!     state_slots: None,
//!     cross_lens: None,
//!     window_tables: None,
//!     window_slots: None,
//!     cross_tables: None,
//! };
//! scheduler.prepare_inputs(&mut inputs)?;
//! assert_eq!(inputs.token_ids[..5], [11, 12, 13, 14, 15]);
//! assert_eq!(inputs.sample_index[0], 4); // the logits of the last prompt token are wanted
//!
//! // The model runs here; say that token 7 was sampled and the sequence lives on.
//! let results =
//!     SampledOutputs { parent_rows: &[0], token_start: &[0, 1], tokens: &[7], finish: &[0] };
//! assert_eq!(scheduler.update(step_id, results)?.handles, [seq]);
//! assert_eq!(*scheduler.sequence(seq)?.token_ids(), [11, 12, 13, 14, 15, 7]);
//! scheduler.check()?;
//! # Ok::<(), pagedserve_core::error::Error>(())
//! ```
//!
//! Layers, lower never names higher: `ids, error, config, hash, arena`, `lookup`, `block`, `table`,
//! `sequence`, `space`, `scheduler` with its data `outputs` and `inputs`.

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
pub mod table;
