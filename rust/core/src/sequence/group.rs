//! Sequence groups: the sequences of one request, admitted, preempted and ended together.

use smallvec::SmallVec;

use crate::config::{CacheConfig, KvGroup, KvKind};
use crate::error::{Error, Result};
use crate::hash::PrefixKey;
use crate::ids::TokenId;
use crate::sequence::SeqHandle;

/// Request of a caller: a prompt and how to schedule it.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct Request<'a> {
    /// Token ids of the prompt, at least one.
    pub prompt: &'a [TokenId],
    /// Token ids that continue the prompt, one list for each sequence that the group starts with;
    /// empty for one sequence of the prompt alone.
    pub branches: &'a [&'a [TokenId]],
    /// Seconds of the caller's clock.
    pub arrival_time: f64,
    /// Maximum number of live sequences: parallel samples or beams.
    pub max_num_running_seqs: usize,
    /// Whether forks may replace ended sequences, as in beam search; the group then keeps its whole
    /// budget of sequences.
    pub can_regrow: bool,
    /// Priority, smallest first; used only by the priority policy.
    pub priority: i64,
    /// The adapter (0 for none) and salt under which the prefix may be shared.
    pub key: PrefixKey,
    /// Tokens of the encoder's output, for cross attention; 0 for a decoder-only model.
    pub num_encoder_tokens: usize,
    /// Name of the request in the decision log; empty without one.
    pub request_id: &'a str,
}

impl<'a> Request<'a> {
    /// Request of one sequence for a decoder-only model, with default options.
    pub fn new(prompt: &'a [TokenId], arrival_time: f64) -> Self {
        Self {
            prompt,
            branches: &[],
            arrival_time,
            max_num_running_seqs: 1,
            can_regrow: false,
            priority: 0,
            key: PrefixKey::default(),
            num_encoder_tokens: 0,
            request_id: "",
        }
    }

    /// Tokens of the prompt, and of all its branches.
    fn tokens(&self) -> impl Iterator<Item = TokenId> {
        self.prompt.iter().chain(self.branches.iter().copied().flatten()).copied()
    }

    /// Returns this request, changed by `change`.
    #[must_use]
    pub fn with(mut self, change: impl FnOnce(&mut Self)) -> Self {
        change(&mut self);
        self
    }

    /// Checks that do not depend on the scheduler.
    ///
    /// # Errors
    /// [`Error::Request`] for an empty prompt, a negative token, more branches than sequences, more
    /// encoder tokens than an int32 counts, or an encoder without a KV group of cross attention or
    /// without a salt where prefixes are shared.
    pub(crate) fn check(&self, cache: &CacheConfig) -> Result<()> {
        let is_cross = |group: &KvGroup| group.kind == KvKind::Cross;
        let refusal = if self.prompt.is_empty() {
            "the prompt is empty; at least one token is needed".to_owned()
        } else if let Some(token) = self.tokens().find(|token| *token < 0) {
            format!("the prompt holds the token id {token}; ids are at least 0")
        } else if self.branches.len() > self.max_num_running_seqs {
            format!(
                "the prompt has {} branches; max_num_running_seqs is {}",
                self.branches.len(),
                self.max_num_running_seqs
            )
        } else if i32::try_from(self.num_encoder_tokens).is_err() {
            let number = self.num_encoder_tokens;
            format!("num_encoder_tokens is {number}; it must be at most {}", i32::MAX)
        } else if self.num_encoder_tokens > 0 && !cache.groups.iter().any(is_cross) {
            let number = self.num_encoder_tokens;
            format!("num_encoder_tokens is {number}; the cache has no KV group of cross attention")
        } else if cache.enable_prefix_caching && self.num_encoder_tokens > 0 && self.key.salt == 0 {
            "the salt is 0; with prefix caching a request with num_encoder_tokens needs one that \
             names its encoder's input: what a decoder computes depends on it"
                .to_owned()
        } else {
            return Ok(());
        };
        Err(Error::Request(refusal))
    }
}

/// Which queue a group is in, and so on which tier its blocks are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SequenceStatus {
    /// In the waiting queue, without blocks.
    Waiting,
    /// In the running queue, blocks on the device.
    Running,
    /// In the swapped queue, blocks in host memory.
    Swapped,
}

/// Statistics of a group, for request metrics.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct GroupStats {
    /// Number of preemptions, by recompute or by swap.
    pub num_preemptions: usize,
    /// Tokens computed and discarded, by recompute or by an abandoned step.
    pub num_recomputed_tokens: usize,
    /// Prompt tokens found in the prefix cache at the first admission.
    pub num_cached_tokens: usize,
}

/// Sequences of one request; fields used in every step come first, as in a sequence.
#[derive(Clone, Debug)]
#[repr(C)]
pub struct SequenceGroup {
    /// Live sequences in order of creation, at least one.
    pub seqs: SmallVec<[SeqHandle; 1]>,
    /// The queue that the group is in.
    pub status: SequenceStatus,
    /// Whether the group must compute tokens before it can sample: its prompt, or after a
    /// preemption by recompute all its tokens.
    pub is_prefill: bool,
    /// When the request arrived, in seconds of the caller's clock.
    pub arrival_time: f64,
    /// When the group first ran, in seconds of the caller's clock.
    pub first_scheduled_time: Option<f64>,
    /// Priority, smallest first, under the priority policy.
    pub priority: i64,
    /// The adapter and salt under which prefixes are shared.
    pub key: PrefixKey,
    /// Tokens of the encoder's output.
    pub num_encoder_tokens: usize,
    /// Number of later groups admitted while this one was the first that waited for the resource
    /// that it lacks.
    pub num_times_bypassed: usize,
    /// Statistics of the group.
    pub stats: GroupStats,
    max_num_running_seqs: usize,
    can_regrow: bool,
    /// Number of sequences ever created.
    num_seqs_made: usize,
}

impl SequenceGroup {
    pub(crate) fn new(request: &Request<'_>) -> Self {
        Self {
            seqs: SmallVec::new(),
            status: SequenceStatus::Waiting,
            is_prefill: true,
            arrival_time: request.arrival_time,
            first_scheduled_time: None,
            priority: request.priority,
            key: request.key,
            num_encoder_tokens: request.num_encoder_tokens,
            num_times_bypassed: 0,
            stats: GroupStats::default(),
            max_num_running_seqs: request.max_num_running_seqs,
            can_regrow: request.can_regrow,
            num_seqs_made: 0,
        }
    }

    /// Maximum number of live sequences, from the request.
    pub fn max_num_running_seqs(&self) -> usize {
        self.max_num_running_seqs
    }

    /// Share of the sequence budget, and the limit of live sequences after the next step.
    ///
    /// It is the number in the request until the group has had that many sequences, and then the
    /// number of live ones, unless it can grow again.  It never grows, so admitted groups stay
    /// within the budget.
    pub fn num_budgeted_seqs(&self) -> usize {
        if self.can_regrow || self.num_seqs_made < self.max_num_running_seqs {
            self.max_num_running_seqs
        } else {
            self.seqs.len()
        }
    }

    pub(crate) fn join(&mut self, seq: SeqHandle) {
        self.seqs.push(seq);
        self.num_seqs_made += 1;
    }

    pub(crate) fn leave(&mut self, seq: SeqHandle) {
        self.seqs.retain(|member| *member != seq);
    }
}
