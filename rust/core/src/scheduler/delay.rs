//! Delay of prompts, so that more of them run in one step.
//!
//! Owns the duration of the last prompt step, by the caller's clock.

/// Seconds between the last step that ran prompts and the admission after it.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct PromptDelay {
    last_phase: f64,
    last_latency: f64,
    ran_prompts: bool,
}

impl PromptDelay {
    /// Records the time of a new admission phase.
    pub(super) fn begin_phase(&mut self, now: f64) {
        if self.ran_prompts {
            self.last_latency = now - self.last_phase;
        }
        self.last_phase = now;
        self.ran_prompts = false;
    }

    /// Records that the phase admits a prompt.
    pub(super) fn note_prompt(&mut self) {
        self.ran_prompts = true;
    }

    /// Whether the oldest of `arrivals` has waited less than `factor` times the last prompt step.
    pub(super) fn holds_back(
        &self,
        now: f64,
        factor: f64,
        arrivals: impl Iterator<Item = f64>,
    ) -> bool {
        if factor == 0.0 {
            return false;
        }
        let earliest = arrivals.fold(f64::INFINITY, f64::min);
        now - earliest <= factor * self.last_latency
    }
}
