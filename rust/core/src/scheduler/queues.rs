//! The three queues.
//!
//! Owns the order of the groups.  Invariant:
//! 1. Every living group is in one queue, the one its status names, once.
//!
//! Costs: ends O(1), taking out of the middle (aborts) O(length).

use std::collections::VecDeque;

use crate::sequence::{GroupHandle, SequenceStatus};

/// Groups in order: the front is served first.
#[derive(Clone, Debug, Default)]
pub struct Queues {
    /// Without blocks.
    pub waiting: VecDeque<GroupHandle>,
    /// With device blocks.
    pub running: VecDeque<GroupHandle>,
    /// With host blocks.
    pub swapped: VecDeque<GroupHandle>,
}

impl Queues {
    fn of(&mut self, status: SequenceStatus) -> &mut VecDeque<GroupHandle> {
        match status {
            SequenceStatus::Waiting => &mut self.waiting,
            SequenceStatus::Running => &mut self.running,
            SequenceStatus::Swapped => &mut self.swapped,
        }
    }

    /// Removes `group` from the queue that `status` names.
    pub(crate) fn remove(&mut self, group: GroupHandle, status: SequenceStatus) {
        let queue = self.of(status);
        if let Some(position) = queue.iter().position(|member| *member == group) {
            queue.remove(position);
        }
    }

    /// Whether nothing waits, runs or is swapped.
    pub fn is_empty(&self) -> bool {
        self.waiting.is_empty() && self.running.is_empty() && self.swapped.is_empty()
    }
}
