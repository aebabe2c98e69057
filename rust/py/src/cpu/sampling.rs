//! Sampling from logits: the most likely tokens, random ones, log-probabilities.
#![expect(clippy::too_many_arguments, reason = "named by callers")]

use pagedserve_cpu::{Draws, Logits, Sampling};
use pyo3::prelude::*;

use super::{on_threads, size};
use crate::arrays::{checked, readonly, readwrite};
use crate::gateway::Work;

/// An exponential in float64 costs as much as reading this many numbers.
const NUMBERS_PER_EXPONENTIAL: usize = 8;

/// Rows of logits at an address.
fn logits_at(address: usize, vocab_size: usize, rows: Option<&[usize]>) -> Logits<'_> {
    Logits { address: std::ptr::with_exposed_provenance(address), vocab_size, rows }
}

fn sizes(name: &str, values: Vec<i64>) -> PyResult<Vec<usize>> {
    values.into_iter().map(|value| size(name, value)).collect()
}

/// Find the largest logits of each row, largest first; equal ones by smaller id.
///
/// The first value of a row that holds NaN is NaN, and its other results are undefined.
///
/// Args:
///     logits: Address of float32 ``[rows, vocab_size]``, contiguous.
///     vocab_size: Number of logits of a row.
///     num: Number of results per row.
///     ids: Token ids, int64 ``[rows * num]``, written.
///     values: Logits, float32 ``[rows * num]``, written; minus infinity where a mask allows fewer.
///     rows: Row indices of the logits, as many as ``ids`` has rows; None for the first ones.
///     masks: Bit masks of allowed tokens, int32 ``[rows * ceil(vocab_size / 32)]``: token ``t`` of
///         a row is bit ``t % 32`` of its entry ``t // 32``.
///     num_threads: Number of threads, the caller's included.
///     instructions: Instruction set; None for the one in use.
///
/// Raises:
///     ``StepError``: Arguments that do not fit each other.
#[pyfunction]
#[pyo3(signature = (*, logits, vocab_size, num, ids, values, rows = None, masks = None, num_threads = 1, instructions = None))]
pub(crate) fn top_k(
    logits: usize,
    vocab_size: i64,
    num: i64,
    ids: &Bound<'_, PyAny>,
    values: &Bound<'_, PyAny>,
    rows: Option<Vec<i64>>,
    masks: Option<&Bound<'_, PyAny>>,
    num_threads: i64,
    instructions: Option<&str>,
) -> PyResult<()> {
    let py = ids.py();
    let (vocab_size, num) = (size("vocab_size", vocab_size)?, size("num", num)?);
    let (ids, values) = (checked::<i64>(ids, "ids")?, checked::<f32>(values, "values")?);
    let (mut ids, mut values) = (readwrite(&ids, "ids")?, readwrite(&values, "values")?);
    let rows = rows.map(|rows| sizes("rows", rows)).transpose()?;
    let masks = masks.map(|masks| readonly::<i32>(masks, "masks")).transpose()?;
    let masks = masks.as_ref().map(|masks| masks.as_slice()).transpose()?;
    let found = (ids.as_slice_mut()?, values.as_slice_mut()?);
    let work = Work::numbers(&[found.0.len() / num.max(1), vocab_size]);
    on_threads(py, num_threads, instructions, work, move |execution| {
        let logits = logits_at(logits, vocab_size, rows.as_deref());
        // SAFETY: the caller promises, as the stub says, that the address is that of a live tensor
        // of this size; everything else is checked.
        unsafe { pagedserve_cpu::top_k(logits, num, masks, found, execution) }
    })
}

/// Sample tokens at random from rows of logits.
///
/// A token inverts the cumulative distribution of what temperature, top_k, top_p and min_p keep, in
/// the order of ids; ties with the last kept token are kept.  Tokens of rows whose peak is not
/// finite are undefined.
///
/// Args:
///     logits: Address of float32 ``[rows, vocab_size]``, contiguous.
///     vocab_size: Number of logits of a row.
///     peaks: Largest allowed logit of each row, float32 ``[N]``.
///     parameters: Temperature, top_k (1 to ``vocab_size``), top_p and min_p of each row, float64
///         ``[N * 4]``.
///     uniforms: A random number in [0, 1) for each token, row by row, float64 ``[D]``.
///     starts: Row ``r`` has the tokens from ``starts[r]`` to ``starts[r + 1]``; ``N + 1``.
///     tokens: Token ids, int32 ``[D]``, written.
///     rows: N row indices of the logits; None for the first ones.
///     masks: As in ``top_k``, for rows without top_k and top_p.
///     num_threads: Number of threads, the caller's included.
///     instructions: Instruction set; None for the one in use.
///
/// Raises:
///     ``StepError``: Arguments that do not fit each other.
#[pyfunction]
#[pyo3(signature = (*, logits, vocab_size, peaks, parameters, uniforms, starts, tokens, rows = None, masks = None, num_threads = 1, instructions = None))]
pub(crate) fn draw(
    logits: usize,
    vocab_size: i64,
    peaks: &Bound<'_, PyAny>,
    parameters: &Bound<'_, PyAny>,
    uniforms: &Bound<'_, PyAny>,
    starts: Vec<i64>,
    tokens: &Bound<'_, PyAny>,
    rows: Option<Vec<i64>>,
    masks: Option<&Bound<'_, PyAny>>,
    num_threads: i64,
    instructions: Option<&str>,
) -> PyResult<()> {
    let py = tokens.py();
    let vocab_size = size("vocab_size", vocab_size)?;
    let peaks = readonly::<f32>(peaks, "peaks")?;
    let parameters = readonly::<f64>(parameters, "parameters")?;
    let parameters: Vec<Sampling> = parameters.as_slice()?.chunks_exact(4).map(sampling).collect();
    let uniforms = readonly::<f64>(uniforms, "uniforms")?;
    let starts = sizes("starts", starts)?;
    let tokens = checked::<i32>(tokens, "tokens")?;
    let mut tokens = readwrite(&tokens, "tokens")?;
    let rows = rows.map(|rows| sizes("rows", rows)).transpose()?;
    let masks = masks.map(|masks| readonly::<i32>(masks, "masks")).transpose()?;
    let draws = Draws {
        peaks: peaks.as_slice()?,
        parameters: &parameters,
        uniforms: uniforms.as_slice()?,
        starts: &starts,
        masks: masks.as_ref().map(|masks| masks.as_slice()).transpose()?,
    };
    let tokens = tokens.as_slice_mut()?;
    let work = Work::numbers(&[draws.peaks.len(), vocab_size, NUMBERS_PER_EXPONENTIAL]);
    on_threads(py, num_threads, instructions, work, move |execution| {
        let logits = logits_at(logits, vocab_size, rows.as_deref());
        // SAFETY: as for `top_k`.
        unsafe { pagedserve_cpu::draw(logits, draws, tokens, execution) }
    })
}

/// Parameters of a row; top_k is exact in float64.
#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "saturates")]
fn sampling(row: &[f64]) -> Sampling {
    Sampling { temperature: row[0], top_k: row[1] as usize, top_p: row[2], min_p: row[3] }
}

/// Find the rank of one token per row, and the log-sum-exp of the row.
///
/// The log-probability of a token is its logit minus the log-sum-exp.
///
/// Args:
///     logits: Address of float32 ``[rows, vocab_size]``, contiguous.
///     vocab_size: Number of logits of a row.
///     targets: Token ids, N of them.
///     sums: Log-sum-exp, float32 ``[N]``, written.
///     ranks: Number of strictly larger logits, int32 ``[N]``, written.
///     rows: N row indices of the logits; None for the first ones.
///     num_threads: Number of threads, the caller's included.
///     instructions: Instruction set; None for the one in use.
///
/// Raises:
///     ``StepError``: Arguments that do not fit each other, or a token beyond the vocabulary.
#[pyfunction]
#[pyo3(signature = (*, logits, vocab_size, targets, sums, ranks, rows = None, num_threads = 1, instructions = None))]
pub(crate) fn logprobs(
    logits: usize,
    vocab_size: i64,
    targets: Vec<i64>,
    sums: &Bound<'_, PyAny>,
    ranks: &Bound<'_, PyAny>,
    rows: Option<Vec<i64>>,
    num_threads: i64,
    instructions: Option<&str>,
) -> PyResult<()> {
    let py = sums.py();
    let vocab_size = size("vocab_size", vocab_size)?;
    let targets = sizes("targets", targets)?;
    let (sums, ranks) = (checked::<f32>(sums, "sums")?, checked::<i32>(ranks, "ranks")?);
    let (mut sums, mut ranks) = (readwrite(&sums, "sums")?, readwrite(&ranks, "ranks")?);
    let rows = rows.map(|rows| sizes("rows", rows)).transpose()?;
    let found = (sums.as_slice_mut()?, ranks.as_slice_mut()?);
    let work = Work::numbers(&[targets.len(), vocab_size]);
    on_threads(py, num_threads, instructions, work, move |execution| {
        let logits = logits_at(logits, vocab_size, rows.as_deref());
        // SAFETY: as for `top_k`.
        unsafe { pagedserve_cpu::logprobs(logits, &targets, found, execution) }
    })
}
