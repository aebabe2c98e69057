//! `pagedserve._core.cpu`: kernels over the memory of torch tensors, and what they share: names of
//! types and instructions, torch's threads.
//!
//! torch is not linked: a tensor comes as its address, sizes and strides.
#![expect(unsafe_code, reason = "addresses from Python become pointers")]

mod attention;
#[cfg(target_os = "linux")]
mod exchange;
#[cfg(target_os = "linux")]
mod futex;
mod layer;
mod linear;
mod lora;
mod moves;

use std::sync::atomic::{AtomicUsize, Ordering};

use pagedserve_core::error::Error;
#[cfg(target_os = "linux")]
use pagedserve_cpu::OpenMp;
use pagedserve_cpu::{DType, Execution, InstructionSet, Sequential, Team};
use pyo3::prelude::*;

use crate::arrays::{checked, readonly, readwrite};
use crate::config::{choice_or, count_or};
use crate::error::to_py;
use crate::gateway::{Work, compute};

/// What a model computes on a CPU, over the memory of torch tensors.
///
/// Tensors come as addresses (``Tensor.data_ptr()``), which nothing can check: a wrong one ends the
/// process.  Everything else is checked before the first byte is read or written.  Calls that take
/// more than some 20 us run without the GIL; the memory must live, and nobody else may change it,
/// until they return.
#[pymodule(submodule, name = "cpu")]
pub(crate) mod module {
    #[pymodule_export]
    use super::attention::paged_attention;
    #[cfg(target_os = "linux")]
    #[pymodule_export]
    use super::exchange::RankExchange;
    #[cfg(target_os = "linux")]
    #[pymodule_export]
    use super::futex::{bump, wait_for_bump};
    #[pymodule_export]
    use super::layer::{DecoderLayer, rms_norm};
    #[pymodule_export]
    use super::linear::PackedWeights;
    #[pymodule_export]
    use super::moves::copy_blocks;
    #[pymodule_export]
    use super::{
        advise_huge_pages, has_torch_threads, instruction_sets, instructions_in_use, top_k,
        use_instructions,
    };
}

const DTYPES: [(&str, DType); 3] =
    [("float32", DType::Float32), ("bfloat16", DType::BFloat16), ("float16", DType::Float16)];

const INSTRUCTION_SETS: [(&str, InstructionSet); 4] = [
    ("portable", InstructionSet::Portable),
    ("avx2", InstructionSet::Avx2),
    ("avx512", InstructionSet::Avx512),
    ("avx512_bf16", InstructionSet::Avx512BFloat16),
];

/// One of some names.
pub(crate) fn choice<T: Copy>(name: &str, given: &str, choices: &[(&str, T)]) -> PyResult<T> {
    choice_or(Error::Arrays, name, given, choices)
}

/// A number type by its name.
pub(crate) fn dtype_of(name: &str, given: &str) -> PyResult<DType> {
    choice(name, given, &DTYPES)
}

/// A size, stride or count.
pub(crate) fn size(name: &str, value: i64) -> PyResult<usize> {
    count_or(Error::Arrays, name, value)
}

/// torch's threads, or the caller's alone.
fn team() -> Option<impl Team> {
    #[cfg(target_os = "linux")]
    {
        OpenMp::find()
    }
    #[cfg(not(target_os = "linux"))]
    {
        None::<Sequential>
    }
}

/// The vector instructions that this CPU has and the kernels can use, the best last.
#[pyfunction]
pub(crate) fn instruction_sets() -> Vec<&'static str> {
    let available = INSTRUCTION_SETS.iter().filter(|(_, set)| set.is_available());
    available.map(|(name, _)| *name).collect()
}

/// Which of `INSTRUCTION_SETS` this process uses; beyond the last means the best of this CPU.
static IN_USE: AtomicUsize = AtomicUsize::new(INSTRUCTION_SETS.len());

fn in_use() -> InstructionSet {
    let chosen = INSTRUCTION_SETS.get(IN_USE.load(Ordering::Relaxed));
    chosen.map_or_else(InstructionSet::detect, |(_, set)| *set)
}

/// The vector instructions that this process uses.
#[pyfunction]
pub(crate) fn instructions_in_use() -> &'static str {
    let in_use = in_use();
    let found = INSTRUCTION_SETS.iter().find(|(_, set)| *set == in_use);
    found.map_or("portable", |(name, _)| name)
}

/// Use these vector instructions in this process; None is the best of this CPU.
///
/// Raises:
///     ``ConfigError``: This CPU does not have them.
#[pyfunction]
#[pyo3(signature = (name))]
pub(crate) fn use_instructions(name: Option<&str>) -> PyResult<()> {
    let Some(name) = name else {
        IN_USE.store(INSTRUCTION_SETS.len(), Ordering::Relaxed);
        return Ok(());
    };
    let place =
        INSTRUCTION_SETS.iter().position(|(other, set)| *other == name && set.is_available());
    let Some(place) = place else {
        let accepted = instruction_sets();
        return Err(to_py(&Error::Config(format!(
            "cpu_instructions is {name:?}; this CPU has {accepted:?}"
        ))));
    };
    IN_USE.store(place, Ordering::Relaxed);
    Ok(())
}

/// Whether torch is loaded and the kernels can run on its OpenMP threads.
#[pyfunction]
pub(crate) fn has_torch_threads() -> bool {
    team().is_some()
}

/// Ask for huge pages behind a range of memory; a system without them goes on as before.
///
/// Args:
///     address: Of its first byte.
///     num_bytes: Its length.
#[pyfunction]
pub(crate) fn advise_huge_pages(address: usize, num_bytes: usize) {
    pagedserve_cpu::advise_huge_pages(std::ptr::with_exposed_provenance_mut(address), num_bytes);
}

/// Find the largest logits of each row, largest first, of equals the smaller id first.
///
/// The first value of a row that holds NaN is NaN, and what else is found in it means nothing.
///
/// Args:
///     logits: Address of float32 ``[rows, vocab_size]``, contiguous.
///     vocab_size: Logits of a row.
///     num: How many are wanted of each.
///     ids: int64 ``[rows * num]``, written.
///     values: float32 ``[rows * num]``, written; minus infinity where a mask allows fewer.
///     rows: Which rows of the logits, as many as there is room for; None for the first ones.
///     masks: int32 ``[rows * ceil(vocab_size / 32)]``: of a row's, token ``t`` is bit ``t % 32`` of
///         entry ``t // 32``, and only tokens with a 1 are looked at.
///     num_threads: Of torch's threads, where `has_torch_threads`; else one is used.
///     instructions: None for those in use.
///
/// Raises:
///     ``StepError``: Arguments that do not fit each other.
#[pyfunction]
#[pyo3(signature = (*, logits, vocab_size, num, ids, values, rows = None, masks = None, num_threads = 1, instructions = None))]
#[expect(clippy::too_many_arguments, reason = "named by callers")]
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
    let rows = rows.map(|rows| rows.into_iter().map(|row| size("rows", row)).collect());
    let rows: Option<Vec<usize>> = rows.transpose()?;
    let masks = masks.map(|masks| readonly::<i32>(masks, "masks")).transpose()?;
    let masks = masks.as_ref().map(|masks| masks.as_slice()).transpose()?;
    let found = (ids.as_slice_mut()?, values.as_slice_mut()?);
    let work = Work::numbers(&[found.0.len() / num.max(1), vocab_size]);
    on_torch_threads(py, num_threads, instructions, work, move |execution| {
        let logits = std::ptr::with_exposed_provenance(logits);
        // SAFETY: that the address is that of a live tensor of this size is the caller's promise,
        // as the stub says; everything else is checked.
        unsafe {
            pagedserve_cpu::top_k(logits, vocab_size, num, rows.as_deref(), masks, found, execution)
        }
    })
}

/// Runs `work` with these threads and instructions (None: those that the process uses).
///
/// The interpreter's lock stays: a call takes microseconds, and threads that work here never ask
/// for it.
pub(crate) fn on_torch_threads(
    py: Python<'_>,
    num_threads: i64,
    instructions: Option<&str>,
    work: Work,
    run: impl FnOnce(&Execution<'_>) -> pagedserve_cpu::Result<()> + Send,
) -> PyResult<()> {
    let instructions = match instructions {
        Some(name) => choice("instructions", name, &INSTRUCTION_SETS)?,
        None => in_use(),
    };
    let num_threads = size("num_threads", num_threads)?;
    let found = team();
    let (team, num_threads): (&dyn Team, usize) = match &found {
        Some(team) => (team, num_threads),
        None => (&Sequential, 1),
    };
    compute(py, work, || run(&Execution { instructions, team, num_threads }))
}
