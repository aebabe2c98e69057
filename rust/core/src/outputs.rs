//! Decisions of one step, as plain data.
//!
//! Independent of the scheduler: a copy may be kept.  Invariants:
//! 1. Rows of prefill groups come first, and the rows of a group are adjacent, in the
//!    order of `scheduled`.
//! 2. Moves must be carried out in the order swap out, swap in, copy, before the rows run.
//! 3. Adapters must be loaded before the rows run, and after the rows of earlier steps.

use std::fmt;

use crate::config::PreemptionMode;
use crate::ids::{BlockPair, TokenId};
use crate::sequence::{GroupHandle, GroupStats, SeqHandle};

/// One sequence in one step: its next `num_tokens` uncomputed tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Row {
    /// The sequence.
    pub seq: SeqHandle,
    /// Tokens computed for it in this step, at least 1.
    pub num_tokens: usize,
    /// Slot of its adapter, -1 for the base model.
    pub adapter_slot: i32,
    /// Whether its next token is sampled: false for a row that stops before its last token.
    pub is_sampled: bool,
    /// Draft tokens after them, each computed and sampled too.
    pub num_drafts: usize,
}

/// One group in one step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ScheduledSequenceGroup {
    /// The group.
    pub group: GroupHandle,
    /// Tokens computed for it in this step: for a prefill in all its rows, for a decode in each.
    pub token_chunk_size: usize,
    /// Whether it computed or recomputed its prompt before this step.
    pub is_prefill: bool,
    /// Whether its next tokens are sampled: false for a chunk that stops before the end.
    pub is_sampled: bool,
    /// Number of its rows.
    pub num_rows: usize,
}

/// Reason why the scheduler ended a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum IgnoredReason {
    /// The prompt is longer than a step or the model allows.
    PromptTooLong {
        /// Tokens of the prompt.
        num_tokens: usize,
        /// Tokens accepted.
        limit: usize,
    },
    /// The group's tokens need more blocks than the device has.
    NeverFits {
        /// Blocks needed.
        num_blocks: usize,
        /// Blocks available.
        limit: usize,
    },
    /// The group holds all used blocks and needs more than the device has.
    OutgrewCache {
        /// Device blocks available.
        limit: usize,
    },
}

impl fmt::Display for IgnoredReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::PromptTooLong { num_tokens, limit } => {
                write!(f, "the prompt has {num_tokens} tokens; at most {limit} are accepted")
            }
            Self::NeverFits { num_blocks, limit } => write!(
                f,
                "the request needs {num_blocks} KV blocks; {limit} can be given (raise num_gpu_blocks)"
            ),
            Self::OutgrewCache { limit } => write!(
                f,
                "the request outgrew the KV cache of {limit} blocks (raise num_gpu_blocks)"
            ),
        }
    }
}

/// Reason why a prompt of some length can never run.  Its text has no subject: the caller adds the
/// name of the prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum PromptRefusal {
    /// The prompt fills `max_model_len`, so that no token can follow.
    FillsModel {
        /// Tokens of the prompt.
        num_tokens: usize,
        /// Tokens of a sequence.
        max_model_len: usize,
    },
    /// Without chunked prefill the prompt is computed in one step, and exceeds it.
    ExceedsStep {
        /// Tokens of the prompt.
        num_tokens: usize,
        /// Tokens of a step.
        max_num_batched_tokens: usize,
    },
    /// The prompt needs more blocks than a new group can get.
    ExceedsCache {
        /// Tokens of the prompt.
        num_tokens: usize,
        /// Tokens of a block.
        block_size: usize,
        /// Blocks needed.
        num_blocks: usize,
        /// Device blocks available.
        num_gpu_blocks: usize,
        /// Device blocks above the watermark.
        num_usable_blocks: usize,
    },
}

impl fmt::Display for PromptRefusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::FillsModel { num_tokens, max_model_len } => write!(
                f,
                "has {num_tokens} tokens; max_model_len is {max_model_len}, so at most {} leave \
                 space for a new one",
                max_model_len - 1
            ),
            Self::ExceedsStep { num_tokens, max_num_batched_tokens } => write!(
                f,
                "has {num_tokens} tokens; a prompt is computed in one step, and \
                 max_num_batched_tokens is {max_num_batched_tokens}: raise it or \
                 enable_chunked_prefill"
            ),
            Self::ExceedsCache {
                num_tokens,
                block_size,
                num_blocks,
                num_gpu_blocks,
                num_usable_blocks,
            } => write!(
                f,
                "has {num_tokens} tokens and needs {num_blocks} KV blocks of {block_size}; the \
                 engine has {num_gpu_blocks}, of which a prompt may use {num_usable_blocks}: raise \
                 num_gpu_blocks or kv_cache_memory"
            ),
        }
    }
}

/// Why a group that waits or is swapped did not run in a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Refusal {
    /// Too few free blocks now.
    NoBlocks,
    /// The token budget of the step is spent.
    NoTokens,
    /// `max_num_seqs` sequences run.
    NoSequences,
    /// Its adapter has no slot.
    NoAdapterSlot,
    /// Prompts are delayed by the delay factor.
    Delayed,
}

impl Refusal {
    /// The name used in logs.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::NoBlocks => "no_blocks",
            Self::NoTokens => "no_tokens",
            Self::NoSequences => "no_sequences",
            Self::NoAdapterSlot => "no_adapter_slot",
            Self::Delayed => "delayed",
        }
    }
}

/// Moves of the blocks of one pool, to be made in this order before the rows run.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Moves {
    /// (device, host) pairs.
    pub swap_out: Vec<BlockPair>,
    /// (host, device) pairs.
    pub swap_in: Vec<BlockPair>,
    /// (source, destination) pairs on the device.
    pub copy: Vec<BlockPair>,
}

impl Moves {
    /// Whether there is nothing to move.
    pub fn is_empty(&self) -> bool {
        self.swap_out.is_empty() && self.swap_in.is_empty() && self.copy.is_empty()
    }

    /// Numbers of pairs: out, in, copied.
    pub fn counts(&self) -> [usize; 3] {
        [self.swap_out.len(), self.swap_in.len(), self.copy.len()]
    }

    pub(crate) fn clear(&mut self) {
        self.swap_out.clear();
        self.swap_in.clear();
        self.copy.clear();
    }
}

/// Decisions of one call of `schedule`.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct SchedulerOutputs {
    /// Names the step in `update` and `abandon`; counts up from 0.
    pub step_id: u64,
    /// Groups that run, prefills first.
    pub scheduled_seq_groups: Vec<ScheduledSequenceGroup>,
    /// Rows that run, in the order of the groups.
    pub rows: Vec<Row>,
    /// Leading entries of `scheduled_seq_groups` that are prefills.
    pub num_prefill_groups: usize,
    /// Leading entries of `rows` that belong to prefill groups.
    pub num_prefill_rows: usize,
    /// Tokens of the prefill groups.
    pub num_prefill_tokens: usize,
    /// Tokens of all rows, draft tokens included.
    pub num_batched_tokens: usize,
    /// Number of samples: rows whose next token is sampled, and draft tokens.
    pub num_samples: usize,
    /// Draft tokens added by [`propose`](crate::scheduler::Scheduler::propose), in order of rows.
    pub drafts: Vec<TokenId>,
    /// Largest number of blocks of a row in the first KV group, computed ones included.
    pub max_num_blocks: usize,
    /// Entries of the longest table of a row in each KV group beside the first.
    pub table_widths: Vec<usize>,
    /// Blocks to move in the pool of each KV group, the first group's first.  A group without a
    /// separate pool moves in the first, and its entry is empty.
    pub moves: Vec<Moves>,
    /// (adapter, slot) pairs; the previous content of the slot is no longer needed.
    pub adapters_to_load: Vec<(u32, i32)>,
    /// Groups that the scheduler ended, with reason and statistics; their handles are dead.
    pub ignored_seq_groups: Vec<(GroupHandle, IgnoredReason, GroupStats)>,
    /// Groups that were considered and did not run, with the reason; later ones were not
    /// considered.
    pub refused: Vec<(GroupHandle, Refusal)>,
    /// Groups that lost their device blocks in this step, lowest priority first.
    pub preempted: Vec<(GroupHandle, PreemptionMode)>,
    /// Groups swapped in from the host.
    pub swapped_in: Vec<GroupHandle>,
    /// Slots of every decoding sequence after its next token.
    pub num_lookahead_slots: usize,
    /// Groups in the running queue after the decisions.
    pub running_queue_size: usize,
}

impl SchedulerOutputs {
    /// Whether the step has nothing to execute; then no step is open.
    pub fn is_empty(&self) -> bool {
        self.rows.is_empty() && !self.has_moves()
    }

    /// Whether blocks must be moved before the rows run.
    pub fn has_moves(&self) -> bool {
        self.moves.iter().any(|moves| !moves.is_empty())
    }

    /// Groups whose blocks are moved between the tiers, and whether they end on the device.
    pub(crate) fn moved_groups(&self) -> impl Iterator<Item = (GroupHandle, bool)> {
        let left = self.preempted.iter().filter(|(_, mode)| *mode == PreemptionMode::Swap);
        let returned = self.swapped_in.iter().map(|group| (*group, true));
        left.map(|(group, _)| (*group, false)).chain(returned)
    }

    /// Creates empty outputs for `num_groups` KV groups.
    pub(crate) fn new(num_groups: usize) -> Self {
        Self { moves: vec![Moves::default(); num_groups], ..Self::default() }
    }

    /// Empties everything for step `step_id`, keeping the memory.
    pub(crate) fn reset(&mut self, step_id: u64) {
        self.step_id = step_id;
        self.scheduled_seq_groups.clear();
        self.rows.clear();
        self.drafts.clear();
        self.table_widths.clear();
        self.moves.iter_mut().for_each(Moves::clear);
        self.adapters_to_load.clear();
        self.ignored_seq_groups.clear();
        self.refused.clear();
        self.preempted.clear();
        self.swapped_in.clear();
        self.num_prefill_groups = 0;
        self.num_prefill_rows = 0;
        self.num_prefill_tokens = 0;
        self.num_batched_tokens = 0;
        self.num_samples = 0;
        self.max_num_blocks = 0;
        self.num_lookahead_slots = 0;
        self.running_queue_size = 0;
    }
}
