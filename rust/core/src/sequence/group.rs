//! Sequence groups: the sequences of one request, admitted, preempted and ended together.

use smallvec::SmallVec;

use crate::sequence::SeqHandle;

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

/// The sequences of one request.
#[derive(Clone, Debug)]
pub struct SequenceGroup {
    /// Living sequences in order of creation, at least one.
    pub seqs: SmallVec<[SeqHandle; 1]>,
    /// The queue that the group is in.
    pub status: SequenceStatus,
    /// Whether the group still has to compute tokens before it can sample: its prompt, or
    /// after a preemption by recompute all that it had.
    pub is_prefill: bool,
    /// When the request arrived, in seconds of the caller's clock.
    pub arrival_time: f64,
    /// When the group first ran, in seconds of the caller's clock.
    pub first_scheduled_time: Option<f64>,
    max_num_running_seqs: usize,
    /// Sequences ever made.
    num_seqs_made: usize,
}

impl SequenceGroup {
    pub(crate) fn new(arrival_time: f64, max_num_running_seqs: usize) -> Self {
        Self {
            seqs: SmallVec::new(),
            status: SequenceStatus::Waiting,
            is_prefill: true,
            arrival_time,
            first_scheduled_time: None,
            max_num_running_seqs,
            num_seqs_made: 0,
        }
    }

    /// The most sequences the group may have alive, as its request asked.
    pub fn max_num_running_seqs(&self) -> usize {
        self.max_num_running_seqs
    }

    /// What the group takes of the sequence budget, and how many it may have alive after the
    /// next step: all that its request asked for until it has spread that far, from then on
    /// those alive.  Never grows, so what was admitted stays within the budget.
    pub fn num_budgeted_seqs(&self) -> usize {
        if self.num_seqs_made < self.max_num_running_seqs {
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
