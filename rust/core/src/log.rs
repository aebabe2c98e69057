//! Decision log: one JSON line per step, with everything that a replay needs.
//!
//! Owns the writer and the events since the last line.  The first line holds the format, the
//! version of this crate and both configurations.  Every other line holds the calls
//! since the line before (`events`, in order) and then the decisions (the last line may hold only
//! events):
//!
//! ```json
//! {"step":7,"now":0.07,"events":[["update",[412,9],[1]],["add",{"group":4294967298,...}]],
//!  "scheduled":[[4294967297,1,false,1]],"preempted":[],"swapped_in":[],"moves":[0,0,0],
//!  "ignored":[],"refused":[[4294967298,"no_blocks"]],"free":[3,0]}
//! ```
//!
//! `moves` counts the moves of the first KV group: out, in, copied.  A step with moves of other KV
//! groups has `"group_moves":[[0,0,1]]`, their counts, and one with adapters to load
//! `"adapters_to_load":[[3,0]]`, adapter and slot.
//!
//! `update` is written as its tokens and the indices of the outputs that finish; parent rows
//! and token starts follow where they are not one output a sampled row.  A step that
//! ended before its tokens were known has `["update_async"]`, and later
//! `["resolve_tokens",7,[412,9]]`.  Equal configurations and events lead to equal decisions,
//! handles included.
//!
//! Invariant: a line is complete or missing, since each is written in one call.
//!
//! Costs: about 5 ns a token or number and one write a step.  An error of the writer ends the
//! log, never the scheduler.

use std::io::{self, Write};

use crate::config::{
    CacheChoices, CacheConfig, KvGroup, Policy, SchedulerChoices, SchedulerConfig, VictimPolicy,
};
use crate::ids::TokenId;
use crate::outputs::{Moves, SchedulerOutputs};
use crate::scheduler::SampledOutputs;
use crate::sequence::{GroupHandle, Request};

/// Writer of the calls and decisions of a scheduler.
#[derive(Debug)]
pub struct DecisionLog<W: Write> {
    writer: W,
    line: Line,
    error: Option<io::Error>,
}

/// A JSON line that is being built.
#[derive(Debug, Default)]
struct Line(String);

impl Line {
    fn text(&mut self, text: &str) -> &mut Self {
        self.0.push_str(text);
        self
    }

    fn number(&mut self, number: impl itoa::Integer) -> &mut Self {
        let mut digits = itoa::Buffer::new();
        self.0.push_str(digits.format(number));
        self
    }

    /// A JSON string.
    fn quoted(&mut self, text: &str) -> &mut Self {
        self.text("\"");
        for character in text.chars() {
            match character {
                '"' | '\\' => self.0.extend(['\\', character]),
                '\0'..='\x1f' => {
                    self.text(&format!("\\u{:04x}", u32::from(character)));
                }
                _ => self.0.push(character),
            }
        }
        self.text("\"")
    }

    /// Seconds: the shortest digits that read back as the same number.
    fn seconds(&mut self, seconds: f64) -> &mut Self {
        self.text(&format!("{seconds:?}"))
    }

    fn list<T>(
        &mut self,
        items: impl IntoIterator<Item = T>,
        mut write: impl FnMut(&mut Self, T),
    ) -> &mut Self {
        self.text("[");
        for (position, item) in items.into_iter().enumerate() {
            if position > 0 {
                self.text(",");
            }
            write(self, item);
        }
        self.text("]")
    }

    fn numbers<T: itoa::Integer>(&mut self, items: impl IntoIterator<Item = T>) -> &mut Self {
        self.list(items, |line, item| {
            line.number(item);
        })
    }

    /// Separates events: the first follows the opening bracket.
    fn event(&mut self) -> &mut Self {
        let separator = if self.0.is_empty() { "" } else { "," };
        self.text(separator)
    }
}

impl<W: Write> DecisionLog<W> {
    /// Begins a log with its first line.
    pub fn new(writer: W, scheduler: &SchedulerConfig, cache: &CacheConfig) -> Self {
        let mut log = Self { writer, line: Line::default(), error: None };
        let header = format!(
            "{{\"log\":4,\"version\":{:?},\"scheduler\":{},\"cache\":{}}}",
            env!("CARGO_PKG_VERSION"),
            scheduler_json(scheduler),
            cache_json(cache)
        );
        log.write_line(&header);
        log
    }

    /// Records a request that was added as `group`.
    pub fn add(&mut self, group: GroupHandle, request: &Request<'_>) {
        let line = self.line.event();
        line.text("[\"add\",{\"group\":").number(group.to_bits());
        if !request.request_id.is_empty() {
            line.text(",\"request_id\":").quoted(request.request_id);
        }
        line.text(",\"arrival_time\":").seconds(request.arrival_time);
        line.text(",\"max_num_running_seqs\":").number(request.max_num_running_seqs);
        if request.can_regrow {
            line.text(",\"can_regrow\":true");
        }
        line.text(",\"priority\":").number(request.priority);
        line.text(",\"adapter\":").number(request.key.adapter);
        line.text(",\"salt\":").number(request.key.salt);
        line.text(",\"num_encoder_tokens\":").number(request.num_encoder_tokens);
        line.text(",\"token_ids\":").numbers(request.prompt.iter().copied());
        if !request.branches.is_empty() {
            line.text(",\"branches\":").list(request.branches, |line, branch| {
                line.numbers(branch.iter().copied());
            });
        }
        line.text("}]");
    }

    /// Records an abort that found its group.
    pub fn abort(&mut self, group: GroupHandle) {
        self.line.event().text("[\"abort\",").number(group.to_bits()).text("]");
    }

    /// Records that the cached prefixes were dropped.
    pub fn reset_prefix_cache(&mut self) {
        self.line.event().text("[\"reset_prefix_cache\"]");
    }

    /// Records the results of the step `outputs`.
    pub fn update(&mut self, outputs: &SchedulerOutputs, results: &SampledOutputs<'_>) {
        let sampled = (0i32..).zip(&outputs.rows).filter(|(_, row)| row.is_sampled);
        let one_each = sampled.map(|(index, _)| index).eq(results.parent_rows.iter().copied())
            && results.tokens.len() == results.parent_rows.len();
        let finished = (0usize..).zip(results.finish).filter(|(_, finish)| **finish != 0);
        let line = self.line.event();
        line.text("[\"update\",").numbers(results.tokens.iter().copied());
        line.text(",").numbers(finished.map(|(index, _)| index));
        if !one_each {
            line.text(",").numbers(results.parent_rows.iter().copied());
            line.text(",").numbers(results.token_start.iter().copied());
        }
        line.text("]");
    }

    /// Records that a step ended before its tokens were known.
    pub fn update_async(&mut self) {
        self.line.event().text("[\"update_async\"]");
    }

    /// Records the tokens of a step that ended before they were known.
    pub fn resolve_tokens(&mut self, step_id: u64, tokens: &[TokenId]) {
        let line = self.line.event();
        line.text("[\"resolve_tokens\",").number(step_id);
        line.text(",").numbers(tokens.iter().copied()).text("]");
    }

    /// Records that a step was abandoned.
    pub fn abandon(&mut self, step_id: u64) {
        self.line.event().text("[\"abandon\",").number(step_id).text("]");
    }

    /// Writes the line of a step: the events before it, then its decisions and the blocks that
    /// are free after them, of the device and of the host.
    pub fn schedule(&mut self, now: f64, outputs: &SchedulerOutputs, free: (usize, usize)) {
        let events = std::mem::take(&mut self.line.0);
        let mut line = Line(String::with_capacity(events.len() + 256));
        line.text("{\"step\":").number(outputs.step_id).text(",\"now\":").seconds(now);
        line.text(",\"events\":[").text(&events).text("]");
        line.text(",\"scheduled\":").list(&outputs.scheduled_seq_groups, |line, group| {
            line.text("[").number(group.group.to_bits());
            line.text(",").number(group.token_chunk_size);
            line.text(if group.is_prefill { ",true," } else { ",false," });
            line.number(group.num_rows).text("]");
        });
        line.text(",\"preempted\":").list(&outputs.preempted, |line, (group, mode)| {
            line.text("[").number(group.to_bits());
            line.text(",\"").text(mode.as_str()).text("\"]");
        });
        line.text(",\"swapped_in\":").numbers(outputs.swapped_in.iter().map(|g| g.to_bits()));
        let (first, others) = (outputs.moves.first(), outputs.moves.get(1..).unwrap_or_default());
        line.text(",\"moves\":").numbers(first.map_or([0; 3], Moves::counts));
        if others.iter().any(|moves| !moves.is_empty()) {
            line.text(",\"group_moves\":");
            line.list(others, |line, moves| {
                line.numbers(moves.counts());
            });
        }
        if !outputs.adapters_to_load.is_empty() {
            line.text(",\"adapters_to_load\":");
            line.list(&outputs.adapters_to_load, |line, (adapter, slot)| {
                line.text("[").number(*adapter).text(",").number(*slot).text("]");
            });
        }
        line.text(",\"ignored\":").list(&outputs.ignored_seq_groups, |line, (group, reason, _)| {
            line.text("[").number(group.to_bits());
            line.text(",\"").text(&reason.to_string()).text("\"]");
        });
        line.text(",\"refused\":").list(&outputs.refused, |line, (group, reason)| {
            line.text("[").number(group.to_bits());
            line.text(",\"").text(reason.as_str()).text("\"]");
        });
        line.text(",\"free\":").numbers([free.0, free.1]).text("}");
        self.write_line(&line.0);
    }

    fn write_line(&mut self, line: &str) {
        if self.error.is_none() {
            self.error = writeln!(self.writer, "{line}").err();
        }
    }

    /// Flushes the writer; events since the last step are written on a separate line.
    pub fn flush(&mut self) {
        let events = std::mem::take(&mut self.line.0);
        if !events.is_empty() {
            self.write_line(&format!("{{\"events\":[{events}]}}"));
        }
        if self.error.is_none() {
            self.error = self.writer.flush().err();
        }
    }

    /// Error that ended the log, if any.
    pub fn error(&self) -> Option<&io::Error> {
        self.error.as_ref()
    }
}

impl<W: Write> Drop for DecisionLog<W> {
    fn drop(&mut self) {
        self.flush();
    }
}

fn optional(value: Option<usize>) -> String {
    value.map_or("null".to_owned(), |value| value.to_string())
}

fn scheduler_json(config: &SchedulerConfig) -> String {
    let policy = match config.policy {
        Policy::Fcfs => "fcfs",
        Policy::Priority => "priority",
    };
    let victim_policy = match config.victim_policy {
        VictimPolicy::Last => "last",
        VictimPolicy::LeastWork => "least_work",
    };
    let mode =
        config.preemption_mode.map_or("null".to_owned(), |mode| format!("{:?}", mode.as_str()));
    format!(
        "{{\"max_num_seqs\":{},\"max_num_batched_tokens\":{},\"max_model_len\":{},\
         \"preemption_mode\":{mode},\"enable_chunked_prefill\":{},\"policy\":\"{policy}\",\
         \"delay_factor\":{:?},\"num_lookahead_slots\":{},\"max_loras\":{},\
         \"max_num_bypasses\":{},\"victim_policy\":\"{victim_policy}\",\
         \"choices\":{}}}",
        config.max_num_seqs,
        config.max_num_batched_tokens,
        config.max_model_len,
        config.enable_chunked_prefill,
        config.delay_factor,
        config.num_lookahead_slots,
        optional(config.max_loras),
        config.max_num_bypasses,
        scheduler_choices_json(config.choices),
    )
}

fn scheduler_choices_json(choices: SchedulerChoices) -> String {
    format!(
        "{{\"admit_after_preemption\":{},\"reverse_swapped_order\":{},\
         \"whole_block_chunks\":{},\"limit_chunked_prompts\":{},\
         \"drain_adapters\":{}}}",
        choices.admit_after_preemption,
        choices.reverse_swapped_order,
        choices.whole_block_chunks,
        choices.limit_chunked_prompts,
        choices.drain_adapters,
    )
}

fn cache_json(config: &CacheConfig) -> String {
    format!(
        "{{\"block_size\":{},\"num_gpu_blocks\":{},\"num_cpu_blocks\":{},\"watermark\":{:?},\
         \"enable_prefix_caching\":{},\"sliding_window\":{},\"groups\":[{}],\"choices\":{}}}",
        config.block_size,
        config.num_gpu_blocks,
        config.num_cpu_blocks,
        config.watermark,
        config.enable_prefix_caching,
        optional(config.sliding_window),
        config.groups.iter().map(group_json).collect::<Vec<_>>().join(","),
        cache_choices_json(config.choices),
    )
}

fn group_json(group: &KvGroup) -> String {
    let KvGroup { kind, num_gpu_blocks, num_cpu_blocks } = *group;
    let (name, window) = kind.named();
    let sinks = match kind.num_sink_tokens() {
        0 => String::new(),
        num_tokens => format!("\"num_sink_tokens\":{num_tokens},"),
    };
    format!(
        "{{\"kind\":\"{name}\",\"window\":{},{sinks}\"num_gpu_blocks\":{num_gpu_blocks},\
         \"num_cpu_blocks\":{num_cpu_blocks}}}",
        optional(window)
    )
}

fn cache_choices_json(choices: CacheChoices) -> String {
    format!(
        "{{\"count_cached_blocks\":{},\"charge_cached_tokens\":{},\
         \"share_partial_blocks\":{},\"share_generated_blocks\":{},\
         \"swap_in_cached_blocks\":{},\"evict_blank_blocks_in_order\":{},\
         \"exact_append_demand\":{}}}",
        choices.count_cached_blocks,
        choices.charge_cached_tokens,
        choices.share_partial_blocks,
        choices.share_generated_blocks,
        choices.swap_in_cached_blocks,
        choices.evict_blank_blocks_in_order,
        choices.exact_append_demand,
    )
}
