//! Whole scheduler lives made of random operations, with the whole-state checker after each, and a
//! model that follows the contents of the blocks by the moves alone.
//!
//! `PAGEDSERVE_PROPTEST_OPS` sets the number of operations (default 250,000).

#![allow(
    clippy::unwrap_used,
    clippy::disallowed_types,
    clippy::disallowed_methods,
    missing_docs,
    reason = "proptest shares strategies by Arc; the number of operations comes from outside"
)]

mod common;

use std::collections::BTreeMap;

use common::arrays::Arrays;
use common::groups::{GroupModel, move_blocks};
use common::limits::limits;
use common::slots::{Slots, at};
use common::{Limits, Output, assert_all_returned, propose, sampled_rows, update, update_drafted};
use pagedserve_core::config::{KvGroup, KvKind};
use pagedserve_core::hash::PrefixKey;
use pagedserve_core::scheduler::Scheduler;
use pagedserve_core::sequence::{GroupHandle, Request};
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};

#[derive(Clone, Debug)]
enum Op {
    /// Prompt length, width, seed of the tokens, adapter, encoder tokens.
    Add(usize, usize, i32, u32, usize),
    Abort(prop::sample::Index),
    /// A step; per sampled row how many outputs it gets, which of them end, and their seed.
    Step(Vec<(u8, u8)>, i32),
    /// A step whose decode rows have drafts: per row the number of drafts and of right ones, the
    /// seed of all tokens, and how the step ends.
    Draft(Vec<(usize, usize)>, i32, DraftEnd),
    /// A step that fails while it runs, before or after its work.
    Fail(bool),
    /// A group aborted while the step runs.
    AbortInStep(prop::sample::Index),
    /// Steps ended before their tokens are known, one per seed; sequences end now and then, by a
    /// number per sample.
    Async(Vec<i32>, Vec<u8>),
    /// A step ended before its tokens are known that fails, before or after its work, and how much
    /// of the next step was done.
    FailAsync(bool, Failure),
}

#[derive(Clone, Copy, Debug)]
enum DraftEnd {
    Update,
    Fail,
    Abort(prop::sample::Index),
}

#[derive(Clone, Copy, Debug)]
enum Failure {
    BeforeNext,
    Scheduled,
    Run,
}

fn draft_end() -> impl Strategy<Value = DraftEnd> {
    prop_oneof![
        6 => Just(DraftEnd::Update),
        1 => Just(DraftEnd::Fail),
        1 => any::<prop::sample::Index>().prop_map(DraftEnd::Abort),
    ]
}

fn ops() -> impl Strategy<Value = Vec<Op>> {
    let failure =
        || prop_oneof![Just(Failure::BeforeNext), Just(Failure::Scheduled), Just(Failure::Run)];
    let fates = || prop::collection::vec((0..6u8, 0..24u8), 1..12);
    let op = prop_oneof![
        3 => (1..40usize, prop_oneof![Just(1), 1..5usize], 0..3i32, 0..6u32, 0..9usize).prop_map(
            |(len, width, seed, adapter, encoder)| Op::Add(len, width, seed, adapter, encoder)
        ),
        1 => any::<prop::sample::Index>().prop_map(Op::Abort),
        12 => (fates(), 0..50i32).prop_map(|(fates, seed)| Op::Step(fates, seed)),
        4 => (prop::collection::vec((0..5usize, 0..5usize), 1..9), 0..50i32, draft_end())
            .prop_map(|(counts, seed, end)| Op::Draft(counts, seed, end)),
        1 => any::<bool>().prop_map(Op::Fail),
        1 => any::<prop::sample::Index>().prop_map(Op::AbortInStep),
        4 => (prop::collection::vec(0..50i32, 1..9), prop::collection::vec(0..24u8, 1..12))
            .prop_map(|(seeds, ends)| Op::Async(seeds, ends)),
        1 => (any::<bool>(), failure()).prop_map(|(ran, failure)| Op::FailAsync(ran, failure)),
    ];
    prop::collection::vec(op, 20..120)
}

fn chain(before: u64, token: i32) -> u64 {
    (before ^ u64::from(token.unsigned_abs())).wrapping_mul(0x9E37_79B9_7F4A_7C15).rotate_left(23)
}

struct Life {
    limits: Limits,
    scheduler: Scheduler,
    device: Slots,
    host: Slots,
    groups_beside: Vec<GroupModel>,
    /// The adapter in each adapter slot, and the step that loaded it.
    adapters: BTreeMap<i32, (u32, u64)>,
    groups: Vec<GroupHandle>,
    /// Samples of the unresolved step, which the scheduler does not know yet.
    sampled: Vec<i32>,
    num_ops: usize,
}

impl Life {
    fn new(limits: Limits) -> Self {
        let groups_beside = GroupModel::all(&limits.cache);
        Self {
            scheduler: limits.scheduler(),
            limits,
            device: Slots::new(),
            host: Slots::new(),
            groups_beside,
            adapters: BTreeMap::new(),
            groups: Vec::new(),
            sampled: Vec::new(),
            num_ops: 0,
        }
    }

    fn apply(&mut self, op: &Op) {
        self.num_ops += 1;
        match op {
            Op::Add(len, width, seed, adapter, encoder) => {
                let prompt: Vec<i32> = (0i32..).map(|i| seed * 100 + i % 7).take(*len).collect();
                let mut request = Request::new(&prompt, 0.0);
                request.max_num_running_seqs = *width;
                request.can_regrow = seed % 3 == 0;
                request.priority = i64::from(*seed);
                // A request with an encoder needs a salt where prefixes are shared.
                request.key =
                    PrefixKey { adapter: adapter.saturating_sub(1), salt: u64::from(*encoder > 5) };
                let has_cross = |group: &KvGroup| group.kind == KvKind::Cross;
                if self.limits.cache.groups.iter().any(has_cross) {
                    request.num_encoder_tokens = encoder.saturating_sub(5);
                }
                self.groups.push(self.scheduler.add_seq_group(&request).unwrap().0);
            }
            Op::Abort(pick) => self.abort(*pick),
            Op::Step(fates, seed) => self.step(fates, *seed),
            Op::Draft(counts, seed, end) => self.draft(counts, *seed, *end),
            Op::Fail(ran) => {
                let outputs = self.scheduler.schedule(0.0).unwrap();
                let (step_id, is_empty) = (outputs.step_id, outputs.is_empty());
                if !is_empty {
                    if *ran {
                        self.execute();
                    }
                    self.abandon(step_id);
                }
            }
            Op::AbortInStep(pick) => {
                let outputs = self.scheduler.schedule(0.0).unwrap();
                let (step_id, is_empty) = (outputs.step_id, outputs.is_empty());
                self.abort(*pick);
                if !is_empty {
                    self.scheduler.check().unwrap();
                    self.execute();
                    let outputs = common::one_each(&self.scheduler, 5);
                    let outputs = self.ended_at_model_len(outputs);
                    update(&mut self.scheduler, step_id, &outputs).unwrap();
                }
            }
            Op::Async(seeds, ends) => self.run_async(seeds, ends),
            Op::FailAsync(ran, failure) => self.fail_async(*ran, *failure),
        }
        self.scheduler.check().unwrap();
    }

    /// Runs a step, ended before its tokens are known if possible; its id, and its samples' groups.
    fn end_async(&mut self, seed: i32) -> Option<(u64, Vec<GroupHandle>)> {
        let outputs = self.scheduler.outputs();
        let step_id = outputs.step_id;
        let rows = sampled_rows(&self.scheduler);
        let of_row = |row: usize| self.scheduler.sequence(self.scheduler.outputs().rows[row].seq);
        let groups = rows.into_iter().map(|row| of_row(row).unwrap().group()).collect();
        if !self.scheduler.update_async(step_id).unwrap() {
            return None;
        }
        self.scheduler.check().unwrap();
        self.sampled = (seed..).take(self.scheduler.outputs().num_samples).collect();
        Some((step_id, groups))
    }

    /// Steps in a pipeline: each is scheduled before the tokens of the last are known.
    fn run_async(&mut self, seeds: &[i32], ends: &[u8]) {
        if !self.begin() {
            return;
        }
        for seed in seeds {
            let Some((step_id, groups)) = self.end_async(*seed) else { break };
            let has_next = self.begin();
            self.scheduler.resolve_tokens(step_id, &self.sampled).unwrap();
            self.sampled.clear();
            for (nth, group) in groups.into_iter().enumerate() {
                if ends[nth % ends.len()] == 0 {
                    self.scheduler.abort(group);
                }
            }
            self.scheduler.check().unwrap();
            if !has_next {
                return;
            }
        }
        let outputs = self.ended_at_model_len(common::one_each(&self.scheduler, 5));
        let step_id = self.scheduler.outputs().step_id;
        update(&mut self.scheduler, step_id, &outputs).unwrap();
    }

    fn fail_async(&mut self, ran: bool, failure: Failure) {
        if self.scheduler.schedule(0.0).unwrap().is_empty() {
            return;
        }
        if ran {
            self.execute();
        } else {
            self.forget_loads();
        }
        let Some((step_id, _)) = self.end_async(3) else {
            let step_id = self.scheduler.outputs().step_id;
            return self.abandon(step_id);
        };
        match failure {
            Failure::BeforeNext => {}
            // What follows a step runs after it.
            Failure::Run if ran => {
                self.begin();
            }
            Failure::Scheduled | Failure::Run => {
                self.scheduler.schedule(0.0).unwrap();
            }
        }
        self.abandon(step_id);
        self.sampled.clear();
    }

    /// Abandons the steps from `step_id` on.
    fn abandon(&mut self, step_id: u64) {
        self.forget_loads();
        self.scheduler.abandon(step_id).unwrap();
        self.adapters.retain(|_, (_, loaded_in)| *loaded_in < step_id);
    }

    /// Forgets the slots that a step loads which was abandoned before it ran: they hold anything.
    fn forget_loads(&mut self) {
        for (_, slot) in &self.scheduler.outputs().adapters_to_load {
            self.adapters.remove(slot);
        }
    }

    /// Schedules a step and runs it; false if there is none.
    fn begin(&mut self) -> bool {
        let is_empty = self.scheduler.schedule(0.0).unwrap().is_empty();
        self.scheduler.check().unwrap();
        self.assert_progress();
        if !is_empty {
            self.execute();
        }
        !is_empty
    }

    fn abort(&mut self, pick: prop::sample::Index) {
        if !self.groups.is_empty() {
            let group = self.groups.swap_remove(pick.index(self.groups.len()));
            let lives = self.scheduler.store().find_group(group).is_ok();
            assert_eq!(self.scheduler.abort(group).is_some(), lives);
            assert!(self.scheduler.abort(group).is_none(), "a second abort finds nothing");
        }
    }

    /// Invariant 2 of the scheduler: a step that schedules nothing resolved something.
    fn assert_progress(&self) {
        let outputs = self.scheduler.outputs();
        let resolved = !outputs.ignored_seq_groups.is_empty() || !outputs.preempted.is_empty();
        assert!(
            !outputs.rows.is_empty() || resolved || self.scheduler.queues().is_empty(),
            "work waits and nothing happened: {:?}",
            self.scheduler
        );
    }

    fn draft(&mut self, counts: &[(usize, usize)], seed: i32, end: DraftEnd) {
        if self.scheduler.schedule(0.0).unwrap().is_empty() {
            return;
        }
        let outputs = self.scheduler.outputs().clone();
        let step_id = outputs.step_id;
        let mut left = self.limits.scheduler.max_num_batched_tokens - outputs.num_batched_tokens;
        let mut drafts = Vec::new();
        for row in sampled_rows(&self.scheduler) {
            let (wanted, _) = counts[row % counts.len()];
            let len = self.scheduler.sequence(outputs.rows[row].seq).unwrap().len();
            let room = (self.limits.scheduler.max_model_len).saturating_sub(len + 1);
            let most = if row < outputs.num_prefill_rows { 0 } else { outputs.num_lookahead_slots };
            let count = wanted.min(most).min(room).min(left);
            left -= count;
            drafts.extend((count > 0).then(|| (row, (seed..).take(count).collect())));
        }
        propose(&mut self.scheduler, step_id, &drafts).unwrap();
        self.scheduler.check().unwrap();
        self.execute();
        if !drafts.is_empty() {
            assert!(!self.scheduler.update_async(step_id).unwrap(), "drafts wait for their tokens");
        }
        match end {
            DraftEnd::Fail => return self.abandon(step_id),
            DraftEnd::Abort(pick) => self.abort(pick),
            DraftEnd::Update => {}
        }
        let mut outputs = self.ended_at_model_len(common::one_each(&self.scheduler, 77));
        let mut accepted = BTreeMap::new();
        for (row, tokens) in drafts {
            let right = counts[row % counts.len()].1.min(tokens.len());
            let output = outputs.iter_mut().find(|output| output.row == row).unwrap();
            output.finish = (right, seed % 7) == (2, 0);
            accepted.insert(row, tokens[..right].to_vec());
        }
        let accepted = |row| accepted.get(&row).cloned().unwrap_or_default();
        update_drafted(&mut self.scheduler, step_id, &outputs, accepted).unwrap();
    }

    fn step(&mut self, fates: &[(u8, u8)], seed: i32) {
        if !self.begin() {
            return;
        }
        let step_id = self.scheduler.outputs().step_id;
        let outputs = self.branch(fates, seed);
        update(&mut self.scheduler, step_id, &outputs).unwrap();
    }

    /// Outputs for the sampled rows: most continue alone, some fork, end or are dropped, and no
    /// group exceeds its number of sequences.
    fn branch(&self, fates: &[(u8, u8)], seed: i32) -> Vec<Output> {
        let mut outputs = Vec::new();
        let mut alive: BTreeMap<i64, usize> = BTreeMap::new();
        for (nth, row) in sampled_rows(&self.scheduler).into_iter().enumerate() {
            let (count, end) = fates[nth % fates.len()];
            let seq = self.scheduler.outputs().rows[row].seq;
            let group = self.scheduler.sequence(seq).unwrap().group();
            let width = self.scheduler.store().find_group(group).unwrap().num_budgeted_seqs();
            let alive = alive.entry(group.to_bits()).or_default();
            let count = if count == 5 { 0 } else { 1 + usize::from(count / 4) * 2 };
            for branch in 0..count {
                let finish = end == 0 && branch == 0 || *alive >= width;
                *alive += usize::from(!finish);
                let token = seed + i32::try_from(branch % 2).unwrap();
                outputs.push(Output { row, token, finish });
            }
        }
        self.ended_at_model_len(outputs)
    }

    fn ended_at_model_len(&self, mut outputs: Vec<Output>) -> Vec<Output> {
        for output in &mut outputs {
            let seq = self.scheduler.outputs().rows[output.row].seq;
            let len = self.scheduler.sequence(seq).unwrap().len();
            output.finish |= len >= self.limits.scheduler.max_model_len;
        }
        outputs
    }

    /// Does what a worker does, on hashes instead of keys: the moves in order, then the writes; and
    /// checks that every row then sees exactly its own history.
    fn execute(&mut self) {
        let outputs = self.scheduler.outputs().clone();
        for group in &mut self.groups_beside {
            group.move_blocks(&outputs);
        }
        let size = self.limits.cache.block_size;
        move_blocks(&outputs.moves[0], size, &mut self.device, &mut self.host);
        for (adapter, slot) in outputs.adapters_to_load {
            let mut known = self.adapters.values();
            assert!(known.all(|(other, _)| *other != adapter), "{adapter} was loaded already");
            self.adapters.insert(slot, (adapter, outputs.step_id));
        }
        assert!(self.adapters.len() <= self.limits.scheduler.max_loras.unwrap());
        let arrays = Arrays::filled(&self.scheduler, &self.limits);
        self.run_rows(&arrays);
    }

    fn run_rows(&mut self, arrays: &Arrays) {
        for row in 0..self.scheduler.outputs().rows.len() {
            self.write_row(arrays, row);
            let keys = self.keys(row);
            for group in &mut self.groups_beside {
                group.write(self.scheduler.outputs(), arrays, row, &keys);
            }
            self.write_encoder(arrays, row);
        }
        // All keys are written before any row attends.
        for row in 0..self.scheduler.outputs().rows.len() {
            self.attend(arrays, row);
            let keys = self.keys(row);
            for group in &mut self.groups_beside {
                group.attend(self.scheduler.outputs(), arrays, row, &keys);
            }
            self.attend_encoder(arrays, row);
        }
        let num_samples = self.scheduler.outputs().num_samples;
        let samples = arrays.sample_rows[..num_samples].iter().map(|row| at(*row));
        let samples = samples.zip(arrays.sample_index[..num_samples].iter().map(|at_| at(*at_)));
        let wanted = sampled_rows(&self.scheduler).into_iter().flat_map(|row| {
            let end = at(arrays.query_start[row + 1]);
            let first = end - 1 - self.scheduler.outputs().rows[row].num_drafts;
            (first..end).map(move |index| (row, index))
        });
        assert!(samples.eq(wanted), "every sampled token, and every draft");
    }

    fn adapter(&self, row: usize) -> u32 {
        let seq = self.scheduler.sequence(self.scheduler.outputs().rows[row].seq).unwrap();
        self.scheduler.store().find_group(seq.group()).unwrap().key.adapter
    }

    /// The drafts of a row.
    fn drafts(&self, row: usize) -> Vec<i32> {
        let outputs = self.scheduler.outputs();
        let before: usize = outputs.rows[..row].iter().map(|row| row.num_drafts).sum();
        outputs.drafts[before..before + outputs.rows[row].num_drafts].to_vec()
    }

    /// Keys of the history up to each position, drafts included, under the adapter of the row.
    fn keys(&self, row: usize) -> Vec<u64> {
        let seq = self.scheduler.sequence(self.scheduler.outputs().rows[row].seq).unwrap();
        let adapter = self.adapter(row);
        let extend = |hash: &mut u64, token: &i32| {
            let sample = usize::try_from(-1 - *token).ok();
            *hash = chain(*hash, sample.map_or(*token, |sample| self.sampled[sample]));
            Some(*hash)
        };
        let tokens = [seq.token_ids().to_vec(), self.drafts(row)].concat();
        tokens.iter().scan(1 + u64::from(adapter), extend).collect()
    }

    fn slot(&self, arrays: &Arrays, row: usize, position: usize) -> usize {
        let size = self.limits.cache.block_size;
        let table = &arrays.block_tables[row * self.scheduler.outputs().max_num_blocks..];
        at(table[position / size]) * size + position % size
    }

    fn write_row(&mut self, arrays: &Arrays, row: usize) {
        let scheduled = self.scheduler.outputs().rows[row];
        let seq = self.scheduler.sequence(scheduled.seq).unwrap();
        let query = at(arrays.query_start[row])..at(arrays.query_start[row + 1]);
        assert_eq!(query.len(), scheduled.num_tokens + scheduled.num_drafts);
        assert_eq!(arrays.row_handles[row], scheduled.seq.to_bits());
        let loaded = self.adapters.get(&arrays.adapter_slots[row]).map(|(adapter, _)| *adapter);
        assert_eq!(loaded.unwrap_or(0), self.adapter(row), "row {row} runs under another adapter");
        assert_eq!(arrays.adapter_slots[row] == -1, self.adapter(row) == 0);
        let keys = self.keys(row);
        let tokens = [seq.token_ids().to_vec(), self.drafts(row)].concat();
        let mut written = Vec::new();
        for index in query {
            let position = usize::try_from(arrays.positions[index]).unwrap();
            assert_eq!(arrays.token_ids[index], tokens[position]);
            // A slot that is not written holds the key already, or another row of this step writes
            // it: `attend` checks that.
            if arrays.slot_mapping[index] >= 0 {
                let slot = usize::try_from(arrays.slot_mapping[index]).unwrap();
                assert_eq!(slot, self.slot(arrays, row, position));
                written.push((slot, keys[position]));
            }
        }
        self.device.extend(written);
        self.grow_into_lookahead(arrays, row);
    }

    /// Writes to the lookahead slots of a row, and asserts that no other row sees them.
    fn grow_into_lookahead(&mut self, arrays: &Arrays, row: usize) {
        let outputs = self.scheduler.outputs();
        if row < outputs.num_prefill_rows {
            return;
        }
        let num_keys = at(arrays.seq_lens[row]);
        let num_free = outputs.num_lookahead_slots - outputs.rows[row].num_drafts;
        for position in num_keys..num_keys + num_free {
            let slot = self.slot(arrays, row, position);
            self.device.insert(slot, u64::MAX); // a draft of this row
            let others = (0..row).filter(|other| *other != row);
            for other in others {
                let end = at(arrays.seq_lens[other]);
                let visible = end.saturating_sub(self.window())..end;
                for position in visible {
                    assert_ne!(slot, self.slot(arrays, other, position), "lookahead on a key");
                }
            }
        }
    }

    /// The slots of the encoder's keys and values for a row, in the first group's pool.
    fn encoder_slots(&self, arrays: &Arrays, row: usize) -> Vec<usize> {
        let outputs = self.scheduler.outputs();
        let size = self.limits.cache.block_size;
        let kinds = self.limits.cache.groups.iter().map(|group| group.kind).enumerate();
        let of_group = |(index, _): (usize, KvKind)| {
            let table = &arrays.group_tables[index][row * outputs.table_widths[index]..];
            (0..at(arrays.cross_lens[row]))
                .map(|place| at(table[place / size]) * size + place % size)
                .collect::<Vec<_>>()
        };
        kinds.filter(|(_, kind)| *kind == KvKind::Cross).flat_map(of_group).collect()
    }

    /// The key that a row writes there, of the request and the place.
    fn encoder_key(&self, row: usize, place: usize) -> u64 {
        let seq = self.scheduler.outputs().rows[row].seq;
        let group = self.scheduler.sequence(seq).unwrap().group();
        chain(group.to_bits().unsigned_abs(), i32::try_from(place).unwrap())
    }

    fn write_encoder(&mut self, arrays: &Arrays, row: usize) {
        if row < self.scheduler.outputs().num_prefill_rows {
            for (place, slot) in self.encoder_slots(arrays, row).into_iter().enumerate() {
                self.device.insert(slot, self.encoder_key(row, place));
            }
        }
    }

    fn attend_encoder(&self, arrays: &Arrays, row: usize) {
        for (place, slot) in self.encoder_slots(arrays, row).into_iter().enumerate() {
            let key = self.encoder_key(row, place);
            assert_eq!(self.device.get(&slot), Some(&key), "row {row} sees a foreign encoder");
        }
    }

    fn window(&self) -> usize {
        self.limits.cache.sliding_window.unwrap_or(usize::MAX)
    }

    fn attend(&self, arrays: &Arrays, row: usize) {
        let keys = self.keys(row);
        let num_keys = at(arrays.seq_lens[row]);
        let hidden = num_keys.saturating_sub(self.window());
        for (position, key) in keys.iter().enumerate().take(num_keys).skip(hidden) {
            let found = self.device.get(&self.slot(arrays, row, position));
            assert_eq!(found, Some(key), "row {row} sees a foreign key at {position}");
        }
    }
}

/// Runs the remaining requests to their end: each finishes or is ended with a reason.
fn drain(life: &mut Life) {
    let bound = 4000;
    for _ in 0..bound {
        if life.scheduler.queues().is_empty() {
            return;
        }
        life.step(&[(0, 1)], 3);
        life.scheduler.check().unwrap();
    }
    panic!("work is left after {bound} steps: {:?}", life.scheduler.queues());
}

#[test]
fn any_life_keeps_every_invariant_and_ends_with_all_blocks_free() {
    let wanted: usize = std::env::var("PAGEDSERVE_PROPTEST_OPS")
        .map_or(250_000, |ops| ops.parse().expect("PAGEDSERVE_PROPTEST_OPS is a number"));
    let num_ops = std::cell::Cell::new(0);
    while num_ops.get() < wanted {
        let mut runner = TestRunner::new(Config { cases: 100, ..Config::default() });
        let life = |(limits, ops): (Limits, Vec<Op>)| {
            let mut life = Life::new(limits);
            for op in &ops {
                life.apply(op);
            }
            drain(&mut life);
            assert_all_returned(&life.scheduler);
            num_ops.set(num_ops.get() + life.num_ops);
            Ok(())
        };
        runner.run(&(limits(), ops()), life).unwrap();
    }
}
