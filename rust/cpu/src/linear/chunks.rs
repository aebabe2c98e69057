//! Rows of a product in chunks, which threads find in their caches.
//!
//! # Costs
//!
//! A row that another core has written is fetched from its cache.  With AMX, which waits for what it
//! reads, prompts took a tenth longer while all threads shared the rows of a chunk.

use super::{Matrix, Product};
use crate::number::DType;
use crate::team::Execution;

/// The fewest rows of a thread's chunk, or of their parts, as a chunk reads all weights.
pub(super) const FEWEST_ROWS: usize = 192;
/// Chunks of a thread where rows are many, so that a thread takes what is left of a slower one's.
const CHUNKS_OF_THREAD: usize = 2;
/// Rows by which a product is divided into chunks.
const TILE_ROWS: usize = 16;

impl Product<'_> {
    /// Calls `run` with chunks of the rows, each on one thread, which finds its rows in its caches;
    /// where a chunk would have fewer than `fewest` rows, with one after another on all threads.
    pub(super) fn for_chunks(
        &self,
        most: usize,
        fewest: usize,
        execution: &Execution<'_>,
        run: &(dyn Fn(&Product<'_>, &Execution<'_>) + Sync),
    ) {
        let num_chunks = self.num_rows.div_ceil(most);
        let num_threads = execution.num_threads.max(1);
        let most_chunks = self.num_rows / fewest;
        if most_chunks < num_threads {
            self.in_chunks(num_chunks).for_each(|chunk| run(&chunk, execution));
            return;
        }
        let num_even = num_chunks.max(CHUNKS_OF_THREAD * num_threads).next_multiple_of(num_threads);
        let num_chunks = num_even.min(most_chunks - most_chunks % num_threads);
        let chunks: Vec<_> = self.in_chunks(num_chunks).collect();
        let alone = Execution { num_threads: 1, ..*execution };
        execution.for_each(chunks.len(), &|chunk| run(&chunks[chunk], &alone));
    }

    /// The products of chunks of rows, whole tiles and about as many in each.
    pub(super) fn in_chunks(&self, num_chunks: usize) -> impl Iterator<Item = Product<'_>> {
        let num_tiles = self.num_rows.div_ceil(TILE_ROWS);
        let start_of =
            move |chunk: usize| (chunk * num_tiles / num_chunks * TILE_ROWS).min(self.num_rows);
        (0..num_chunks).map(move |chunk| {
            let first = start_of(chunk);
            let from = |matrix: Matrix, dtype: DType| {
                let bytes = first * matrix.stride * dtype.size();
                Matrix { pointer: matrix.pointer.wrapping_add(bytes), ..matrix }
            };
            Product {
                num_rows: start_of(chunk + 1) - first,
                input: from(self.input, self.rows),
                output: from(self.output, self.output_dtype),
                additions: (self.additions.0, self.additions.1 + first),
                ..*self
            }
        })
    }
}
