//! The work items of a call.

use std::ops::Range;
use std::sync::atomic::AtomicUsize;

use crate::attention::shape::{Options, Rows, Shape};
use crate::number::{CHUNK, PANEL};

/// Queries of a tile, each of one token and one head.
pub(crate) const TILE: usize = 48;
/// The fewest chunks of an item where the keys of a tile are split.
const SPLIT_CHUNKS: usize = 2;
/// Items for each thread where keys are split: enough that no thread waits long for the last one.
const ITEMS_PER_THREAD: usize = 8;
/// The most numbers of partial results: 64 MiB, in which long prompts are split in part.
const MOST_PARTIALS: usize = 16 << 20;

/// Some queries of one row that read the same KV head, and the chunks of keys to read.
#[derive(Clone, Debug)]
pub(crate) struct Item {
    pub(crate) row: usize,
    pub(crate) kv_head: usize,
    /// Queries of the row, numbered `token * group + head`.
    pub(crate) queries: Range<usize>,
    /// The keys that any of them sees.
    pub(crate) keys: Range<usize>,
    /// Chunks of the row's keys.
    pub(crate) chunks: Range<usize>,
    /// The tile's split, if other items have the rest of its chunks.
    pub(crate) split: Option<usize>,
}

/// A tile whose chunks are spread over items.
#[derive(Debug)]
pub(crate) struct Split {
    /// Items that are not done yet.
    pub(crate) pending: AtomicUsize,
    /// All chunks.
    pub(crate) chunks: Range<usize>,
    /// Offset of the items' results in the partial results.
    pub(crate) start: usize,
}

/// All work of a call except writing new tokens.
#[derive(Debug, Default)]
pub(crate) struct Plan {
    pub(crate) items: Vec<Item>,
    pub(crate) splits: Vec<Split>,
    /// Number of numbers in the partial results.
    pub(crate) num_partials: usize,
}

impl Plan {
    /// Plans prompts before decode rows, their last tiles first: long items come early.
    ///
    /// Keys are split only if there are too few tiles for the threads.  Results are the same
    /// either way.
    pub(crate) fn new(
        shape: &Shape,
        rows: &Rows<'_>,
        options: &Options<'_>,
        num_threads: usize,
    ) -> Self {
        let mut plan = Self::default();
        for is_prompt in [true, false] {
            for row in 0..rows.len() {
                if (rows.queries(row).len() > 1) == is_prompt {
                    plan.add_row(shape, rows, options, row);
                }
            }
        }
        if num_threads > 1 && plan.items.len() < 4 * num_threads {
            plan.split(shape, num_threads);
        }
        plan
    }

    fn add_row(&mut self, shape: &Shape, rows: &Rows<'_>, options: &Options<'_>, row: usize) {
        let group = shape.group();
        let num_tokens = rows.queries(row).len();
        let num_cached = rows.seq_len(row) - num_tokens;
        let num_queries = num_tokens * group;
        for kv_head in 0..shape.num_kv_heads {
            for tile in (0..num_queries.div_ceil(TILE)).rev() {
                let queries = tile * TILE..((tile + 1) * TILE).min(num_queries);
                let first = options.first_key(num_cached + queries.start / group);
                let last = num_cached + (queries.end - 1) / group;
                let keys = first..options.end_key(last, rows.seq_len(row));
                let chunks = keys.start / CHUNK..keys.end.div_ceil(CHUNK);
                self.items.push(Item { row, kv_head, queries, keys, chunks, split: None });
            }
        }
    }

    /// Splits tiles into few long items: a thread at the end of one prefetches keys that another
    /// thread may take.
    fn split(&mut self, shape: &Shape, num_threads: usize) {
        let pieces = (ITEMS_PER_THREAD * num_threads).div_ceil(self.items.len().max(1));
        let columns = shape.value_size.next_multiple_of(PANEL);
        for item in std::mem::take(&mut self.items) {
            let piece_chunks = item.chunks.len().div_ceil(pieces).max(SPLIT_CHUNKS);
            let num_partials = item.chunks.len() * item.queries.len() * (columns + 2);
            if item.chunks.len() <= piece_chunks || self.num_partials + num_partials > MOST_PARTIALS
            {
                self.items.push(item);
                continue;
            }
            let split = Some(self.splits.len());
            let starts = item.chunks.clone().step_by(piece_chunks);
            self.splits.push(Split {
                pending: AtomicUsize::new(starts.len()),
                chunks: item.chunks.clone(),
                start: self.num_partials,
            });
            self.num_partials += num_partials;
            for start in starts {
                let chunks = start..(start + piece_chunks).min(item.chunks.end);
                self.items.push(Item { chunks, split, ..item.clone() });
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::DType;
    use crate::attention::CacheDType;

    #[test]
    fn partial_results_of_long_prompts_stay_within_their_bound() {
        let shape = Shape {
            dtype: DType::BFloat16,
            cache_dtype: CacheDType::Auto,
            num_heads: 32,
            num_kv_heads: 8,
            key_size: 128,
            value_size: 128,
            num_blocks: 1,
            block_size: 16,
        };
        let options = Options {
            scale: 1.0,
            window: None,
            softcap: None,
            sinks: None,
            alibi: None,
            position_bias: None,
            causal: true,
        };
        for (num_tokens, num_keys) in [(1, 131_072), (180, 131_072), (180, 4096)] {
            let rows = Rows {
                block_tables: &[],
                query_start: &[0, num_tokens],
                seq_lens: &[num_keys],
                slot_mapping: &[],
            };
            let plan = Plan::new(&shape, &rows, &options, 32);
            assert!(plan.num_partials <= MOST_PARTIALS);
            assert!(!plan.splits.is_empty(), "some tiles are split");
            let chunks: usize = plan.items.iter().map(|item| item.chunks.len()).sum();
            let whole = Plan::new(&shape, &rows, &options, 1);
            assert_eq!(chunks, whole.items.iter().map(|item| item.chunks.len()).sum());
        }
    }
}
