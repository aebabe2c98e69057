//! Steps over poisoned memory, and a naive float64 model of their outputs.
#![allow(unsafe_code, reason = "the call under test takes pointers")]

use super::numbers::{Numbers, bfloat16_at_least, levels, nearest};
use crate::attention::{CacheDType, Memory, Options, Place, Rows, Shape, Tokens, paged_attention};
use crate::{DType, Execution, InstructionSet, Result, Team};

/// Threads that are started for each call.
pub(super) struct Threads;

impl Team for Threads {
    fn run(&self, num_threads: usize, work: &(dyn Fn() + Sync)) {
        std::thread::scope(|scope| {
            for _ in 1..num_threads {
                scope.spawn(work);
            }
            work();
        });
    }
}

/// A row of a case: cached keys, queries.
pub(super) type Row = (usize, usize);

/// Parameters of a step.
#[derive(Clone, Debug)]
pub(super) struct Case {
    pub(super) dtype: DType,
    pub(super) cache_dtype: CacheDType,
    pub(super) num_kv_heads: usize,
    pub(super) group: usize,
    pub(super) key_size: usize,
    pub(super) value_size: usize,
    pub(super) block_size: usize,
    pub(super) rows: Vec<Row>,
    pub(super) scale: f32,
    pub(super) window: Option<usize>,
    pub(super) softcap: Option<f32>,
    pub(super) sinks: Option<f32>,
    /// The first head's slope; each further head's is half of the one before.
    pub(super) alibi: Option<f32>,
    pub(super) num_biases: Option<usize>,
    pub(super) causal: bool,
    /// Whole cached blocks of the first row that the others have too.
    pub(super) shares_prefix: bool,
    /// Unused elements between heads and tokens.
    pub(super) gap: usize,
    pub(super) seed: u64,
}

impl Case {
    /// Asserts that every instruction set gives what is expected.
    pub(super) fn check(&self, num_threads: usize) {
        let step = Step::new(self);
        let expected = step.expected();
        for instructions in available() {
            step.clone().check(&expected, instructions, num_threads);
        }
    }

    /// A case without special options.
    pub(super) fn plain(rows: &[Row]) -> Self {
        Self {
            dtype: DType::Float32,
            cache_dtype: CacheDType::Auto,
            num_kv_heads: 2,
            group: 3,
            key_size: 32,
            value_size: 32,
            block_size: 16,
            rows: rows.to_vec(),
            scale: 0.2,
            window: None,
            softcap: None,
            sinks: None,
            alibi: None,
            num_biases: None,
            causal: true,
            shares_prefix: false,
            gap: 0,
            seed: 1,
        }
    }
}

/// Numbers between -1 and 1, and a shuffle.
pub(super) struct Random(u64);

impl Random {
    pub(super) fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 >> 24
    }

    pub(super) fn number(&mut self) -> f32 {
        let bits = u16::try_from(self.next() % 65_536).expect("16 bits");
        f32::from(bits) / 32_768.0 - 1.0
    }

    pub(super) fn below(&mut self, count: usize) -> usize {
        usize::try_from(self.next()).expect("40 bits") % count
    }
}

/// `[T, heads, size]` with gaps, tokens within heads as transformers has them.
#[derive(Clone)]
pub(super) struct Tensor {
    pub(super) numbers: Numbers,
    pub(super) token_stride: usize,
    pub(super) head_stride: usize,
}

impl Tensor {
    fn new(case: &Case, num_tokens: usize, heads: usize, size: usize) -> Self {
        let token_stride = size + case.gap;
        let head_stride = token_stride * num_tokens + case.gap;
        let len = head_stride * (heads - 1) + token_stride * (num_tokens.max(1) - 1) + size;
        Self { numbers: Numbers::poisoned(case.dtype, len), token_stride, head_stride }
    }

    fn index(&self, token: usize, head: usize) -> usize {
        token * self.token_stride + head * self.head_stride
    }

    fn tokens(&self) -> Tokens {
        Tokens {
            pointer: self.numbers.bytes.as_ptr(),
            token_stride: self.token_stride,
            head_stride: self.head_stride,
        }
    }
}

/// A step, and each row's keys and values as the model knows them.
#[derive(Clone)]
pub(super) struct Step {
    pub(super) case: Case,
    pub(super) shape: Shape,
    pub(super) query: Tensor,
    pub(super) key: Tensor,
    pub(super) value: Tensor,
    pub(super) pool: Numbers,
    pub(super) output: Numbers,
    pub(super) block_tables: Vec<i32>,
    pub(super) query_start: Vec<i32>,
    pub(super) seq_lens: Vec<i32>,
    pub(super) slot_mapping: Vec<i64>,
    pub(super) sinks: Option<Vec<f32>>,
    pub(super) alibi: Option<Vec<f32>>,
    pub(super) position_bias: Option<Vec<f32>>,
    /// `[row][position][kv_head]`: key, then value.
    known: Vec<Vec<Vec<Vec<f64>>>>,
    /// Those of a pool of bytes.
    levels: Vec<(u8, f32)>,
}

fn int(number: usize) -> i32 {
    i32::try_from(number).expect("a small number")
}

impl Step {
    pub(super) fn new(case: &Case) -> Self {
        let mut random = Random::new(case.seed);
        let lens: Vec<usize> = case.rows.iter().map(|(cached, queries)| cached + queries).collect();
        let counts: Vec<usize> = lens.iter().map(|len| len.div_ceil(case.block_size)).collect();
        let num_blocks = counts.iter().sum::<usize>() + 2;
        let mut ids: Vec<usize> = (0..num_blocks).collect();
        for index in (1..num_blocks).rev() {
            ids.swap(index, random.below(index + 1));
        }
        let width = counts.iter().copied().max().unwrap_or(0) + 1;
        let num_tokens: usize = case.rows.iter().map(|row| row.1).sum();
        let num_heads = case.num_kv_heads * case.group;
        let shape = Shape {
            dtype: case.dtype,
            cache_dtype: case.cache_dtype,
            num_heads,
            num_kv_heads: case.num_kv_heads,
            key_size: case.key_size,
            value_size: case.value_size,
            num_blocks,
            block_size: case.block_size,
        };
        let mut step = Self {
            query: Tensor::new(case, num_tokens, num_heads, case.key_size),
            key: Tensor::new(case, num_tokens, case.num_kv_heads, case.key_size),
            value: Tensor::new(case, num_tokens, case.num_kv_heads, case.value_size),
            // NaN in all dtypes, and as scales.
            pool: Numbers {
                dtype: case.dtype,
                bytes: vec![0xff; num_blocks * shape.block_bytes()],
            },
            output: Numbers::poisoned(case.dtype, num_tokens * num_heads * case.value_size),
            block_tables: vec![-7; case.rows.len() * width],
            query_start: vec![0],
            seq_lens: lens.iter().map(|&len| int(len)).collect(),
            slot_mapping: Vec::new(),
            sinks: case.sinks.map(|sink| (0..num_heads).map(|_| sink * random.number()).collect()),
            alibi: case
                .alibi
                .map(|slope| (0..num_heads).map(|head| slope * 0.5_f32.powi(int(head))).collect()),
            position_bias: case
                .num_biases
                .map(|count| (0..num_heads * count).map(|_| 3.0 * random.number()).collect()),
            known: Vec::new(),
            levels: levels(case.cache_dtype),
            shape,
            case: case.clone(),
        };
        for (row, count) in counts.into_iter().enumerate() {
            let own = ids.split_off(ids.len() - count);
            step.add_row(&mut random, row, &own, width);
        }
        step
    }

    fn add_row(&mut self, random: &mut Random, row: usize, own: &[usize], width: usize) {
        let Case { block_size, num_kv_heads, rows, window, shares_prefix, .. } = self.case.clone();
        let (cached, queries) = rows[row];
        let shared = if shares_prefix && row > 0 { cached.min(rows[0].0) / block_size } else { 0 };
        let first_token = self.slot_mapping.len();
        let first_key = window.map_or(0, |window| (cached + 1).saturating_sub(window));
        let mut known: Vec<Vec<Vec<f64>>> = Vec::new();
        for position in 0..cached + queries {
            let index = position / block_size;
            let block = if index < shared {
                usize::try_from(self.block_tables[index].max(0)).expect("not negative")
            } else {
                own[index]
            };
            if (index + 1) * block_size > first_key {
                self.block_tables[row * width + index] = int(block);
            }
            let slot = block * block_size + position % block_size;
            // Some keys of queries are in the pool already, as if two rows computed a prefix.
            let is_written = position < cached || random.below(8) == 0;
            if position >= cached {
                let slot = i64::try_from(slot).expect("a small number");
                self.slot_mapping.push(if is_written { -1 } else { slot });
            }
            let heads = (0..num_kv_heads)
                .map(|kv_head| {
                    if index < shared {
                        return self.known[0][position][kv_head].clone();
                    }
                    let token = (position >= cached).then(|| first_token + position - cached);
                    // A key that no query sees is never written.
                    let place = (is_written && position >= first_key)
                        .then(|| Place::new(&self.shape, slot, kv_head));
                    let numbers = self.fill(random, token, place, kv_head);
                    numbers.into_iter().map(f64::from).collect()
                })
                .collect();
            known.push(heads);
        }
        self.known.push(known);
        for token in first_token..first_token + queries {
            for head in 0..self.shape.num_heads {
                let start = self.query.index(token, head);
                for index in start..start + self.shape.key_size {
                    self.query.numbers.set(index, random.number());
                }
            }
        }
        self.query_start.push(int(first_token + queries));
    }

    /// Makes a key and a value, for the step's tensors, for the pool, or for both.
    fn fill(
        &mut self,
        random: &mut Random,
        token: Option<usize>,
        place: Option<Place>,
        kv_head: usize,
    ) -> Vec<f32> {
        let (key_size, value_size) = (self.shape.key_size, self.shape.value_size);
        let mut rounded = Numbers::poisoned(self.case.dtype, 1);
        let numbers: Vec<f32> =
            (0..key_size + value_size).map(|_| rounded.set(0, random.number())).collect();
        for (index, &number) in numbers.iter().enumerate() {
            let is_key = index < key_size;
            let index = if is_key { index } else { index - key_size };
            if let Some(token) = token {
                let tensor = if is_key { &mut self.key } else { &mut self.value };
                let start = tensor.index(token, kv_head);
                tensor.numbers.set(start + index, number);
            }
            if let Some(place) = place
                && self.shape.cache_dtype == CacheDType::Auto
            {
                let at = if is_key { place.key(index) } else { place.value(index) };
                self.pool.set(at, number);
            }
        }
        if !self.shape.cache_dtype.has_scales() {
            return numbers;
        }
        self.fill_levels(&numbers, place)
    }

    /// Rounds a key and a value to the levels of a pool of bytes, and stores them at a place.
    fn fill_levels(&mut self, numbers: &[f32], place: Option<Place>) -> Vec<f32> {
        let mut rounded = Vec::new();
        for (is_value, part) in [false, true]
            .into_iter()
            .zip(<[&[f32]; 2]>::from(numbers.split_at(self.shape.key_size)))
        {
            let peak = part.iter().fold(0.0_f32, |peak, number| peak.max(number.abs()));
            let (_, largest) = self.levels[self.levels.len() - 1];
            let scale = bfloat16_at_least(peak / largest);
            for (index, number) in part.iter().enumerate() {
                let (byte, level) = nearest(&self.levels, number * (1.0 / scale));
                rounded.push(level * scale);
                if let Some(place) = place {
                    let at = if is_value { place.value(index) } else { place.key(index) };
                    self.pool.bytes[at] = byte;
                }
            }
            if let Some(place) = place {
                let at = place.scales()[usize::from(is_value)];
                self.pool.bytes[at..at + 2].copy_from_slice(&scale.to_le_bytes()[2..]);
            }
        }
        rounded
    }

    pub(super) fn memory(&mut self) -> Memory {
        Memory {
            query: self.query.tokens(),
            key: self.key.tokens(),
            value: self.value.tokens(),
            pool: self.pool.bytes.as_mut_ptr(),
            output: self.output.bytes.as_mut_ptr(),
        }
    }

    pub(super) fn rows(&self) -> Rows<'_> {
        Rows {
            block_tables: &self.block_tables,
            query_start: &self.query_start,
            seq_lens: &self.seq_lens,
            slot_mapping: &self.slot_mapping,
        }
    }

    pub(super) fn options(&self) -> Options<'_> {
        Options {
            scale: self.case.scale,
            window: self.case.window,
            softcap: self.case.softcap,
            sinks: self.sinks.as_deref(),
            alibi: self.alibi.as_deref(),
            position_bias: self.position_bias.as_deref(),
            causal: self.case.causal,
        }
    }

    /// The output of the call under test.
    pub(super) fn run(
        &mut self,
        instructions: InstructionSet,
        num_threads: usize,
    ) -> Result<Vec<f32>> {
        let memory = self.memory();
        let execution = Execution { instructions, team: &Threads, num_threads };
        // SAFETY: the memory belongs to this step and has the sizes of its shape.
        unsafe {
            paged_attention(&self.shape, &memory, &self.rows(), &self.options(), &execution)?;
        }
        let len = self.output.bytes.len() / self.case.dtype.size();
        Ok((0..len).map(|index| self.output.get(index)).collect())
    }

    /// The output of a step of one row whose queries before `first` were computed before.
    pub(super) fn run_tail(&mut self, first: usize, num_threads: usize) -> Vec<f32> {
        let mut memory = self.memory();
        let size = self.case.dtype.size();
        for (tokens, tensor) in [
            (&mut memory.query, &self.query),
            (&mut memory.key, &self.key),
            (&mut memory.value, &self.value),
        ] {
            tokens.pointer = tokens.pointer.wrapping_add(first * tensor.token_stride * size);
        }
        let num_tokens = self.slot_mapping.len() - first;
        let rows = Rows {
            query_start: &[0, int(num_tokens)],
            slot_mapping: &self.slot_mapping[first..],
            ..self.rows()
        };
        let instructions = InstructionSet::detect();
        let execution = Execution { instructions, team: &Threads, num_threads };
        // SAFETY: the memory belongs to this step; fewer tokens of the same strides are used.
        unsafe { paged_attention(&self.shape, &memory, &rows, &self.options(), &execution) }
            .expect("a correct step");
        let len = num_tokens * self.shape.num_heads * self.shape.value_size;
        (0..len).map(|index| self.output.get(index)).collect()
    }

    /// The expected output, computed naively.
    pub(super) fn expected(&self) -> Vec<f64> {
        let mut answer = Vec::new();
        for (row, &(cached, queries)) in self.case.rows.iter().enumerate() {
            let first_token = usize::try_from(self.query_start[row]).expect("not negative");
            for query in 0..queries {
                for head in 0..self.shape.num_heads {
                    answer.extend(self.expected_query(
                        row,
                        first_token + query,
                        cached + query,
                        head,
                    ));
                }
            }
        }
        answer
    }

    fn expected_query(&self, row: usize, token: usize, position: usize, head: usize) -> Vec<f64> {
        let (key_size, value_size) = (self.shape.key_size, self.shape.value_size);
        let start = self.query.index(token, head);
        let query: Vec<f64> = (start..start + key_size)
            .map(|index| f64::from(self.query.numbers.get(index)))
            .collect();
        let known = &self.known[row];
        let window = self.case.window.unwrap_or(known.len());
        let first = (position + 1).saturating_sub(window);
        let ahead = if self.case.causal { 1 } else { window };
        let seen = &known[first..known.len().min(position + ahead)];
        let mut weights: Vec<f64> = seen
            .iter()
            .zip(first..)
            .map(|(heads, key_position)| {
                let key = &heads[head / self.case.group][..key_size];
                let product: f64 = query.iter().zip(key).map(|(q, k)| q * k).sum();
                let score = product * f64::from(self.case.scale);
                let capped = |cap: f32| f64::from(cap) * (score / f64::from(cap)).tanh();
                let slope = self.alibi.as_ref().map_or(0.0, |slopes| f64::from(slopes[head]));
                let distance = f64::from(int(position) - int(key_position));
                let bias = self.position_bias.as_ref().map_or(0.0, |biases| {
                    let count = biases.len() / self.shape.num_heads;
                    f64::from(biases[head * count + (position - key_position).min(count - 1)])
                });
                self.case.softcap.map_or(score, capped) - slope * distance + bias
            })
            .collect();
        let sink = self.sinks.as_ref().map(|sinks| f64::from(sinks[head]));
        let largest = weights.iter().copied().chain(sink).fold(f64::NEG_INFINITY, f64::max);
        let mut sum = sink.map_or(0.0, |sink| (sink - largest).exp());
        for weight in &mut weights {
            *weight = (*weight - largest).exp();
            sum += *weight;
        }
        let mut answer = vec![0.0; value_size];
        for (heads, weight) in seen.iter().zip(weights) {
            for (to, &number) in answer.iter_mut().zip(&heads[head / self.case.group][key_size..]) {
                *to += weight / sum * number;
            }
        }
        answer
    }

    /// Asserts that the call under test gives what is expected.
    fn check(&mut self, expected: &[f64], instructions: InstructionSet, num_threads: usize) {
        let answer = self.run(instructions, num_threads).expect("a correct step");
        let tolerance = match self.case.dtype {
            DType::Float32 => 5e-6,
            // Outputs below 1 are rounded by 2^-9, weights by as much of each.
            DType::BFloat16 => 8e-3,
            // The same with 2^-12.
            DType::Float16 => 1e-3,
        };
        assert_eq!(answer.len(), expected.len());
        for (index, (&got, &wanted)) in answer.iter().zip(expected).enumerate() {
            let difference = (f64::from(got) - wanted).abs();
            assert!(
                difference <= tolerance,
                "{instructions:?}, element {index}: {got} is not {wanted}"
            );
        }
    }
}

/// All types of numbers.
pub(super) const DTYPES: [DType; 3] = [DType::Float32, DType::BFloat16, DType::Float16];

/// All types of pools.
pub(super) const CACHE_DTYPES: [CacheDType; 4] =
    [CacheDType::Auto, CacheDType::Int8, CacheDType::Float8E4M3, CacheDType::Float8E5M2];

/// The instruction sets that this CPU has.
pub(super) fn available() -> impl Iterator<Item = InstructionSet> {
    InstructionSet::ALL.into_iter().filter(|set| set.is_available())
}
