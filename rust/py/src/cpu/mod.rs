//! `pagedserve._core.cpu`: kernels over the memory of torch tensors, and what they share: names of
//! number types and instruction sets, and the compute threads.
//!
//! torch is not linked: a tensor comes as its address, sizes and strides.
#![expect(unsafe_code, reason = "addresses from Python become pointers")]

mod attention;
mod decoder;
#[cfg(target_os = "linux")]
mod exchange;
#[cfg(target_os = "linux")]
mod futex;
mod layer;
mod linear;
mod lora;
mod moves;
mod pack;
mod sampling;
mod texts;

use std::sync::atomic::{AtomicUsize, Ordering};

use pagedserve_core::error::Error;
#[cfg(not(target_os = "linux"))]
use pagedserve_cpu::Sequential as Threads;
#[cfg(target_os = "linux")]
use pagedserve_cpu::Threads;
use pagedserve_cpu::attention::CacheDType;
use pagedserve_cpu::{DType, Execution, InstructionSet};
use pyo3::prelude::*;

use crate::config::{choice_or, count_or};
use crate::error::to_py;
use crate::gateway::{Work, compute};

/// CPU kernels over the memory of torch tensors.
///
/// Tensors come as addresses (``Tensor.data_ptr()``), which nothing can check: a wrong one ends the
/// process.  Everything else is checked before the first byte is read or written.  Calls that take
/// more than some 20 us run without the GIL; the memory must stay allocated and unchanged by others
/// until they return.
#[pymodule(submodule, name = "cpu")]
pub(crate) mod module {
    #[pymodule_export]
    use super::attention::paged_attention;
    #[pymodule_export]
    use super::decoder::Decoder;
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
    use super::pack::{pack_layers, round_to_blocks};
    #[pymodule_export]
    use super::sampling::{draw, logprobs, top_k};
    #[pymodule_export]
    use super::texts::{pass_texts, read_pairs, read_texts};
    #[pymodule_export]
    use super::{
        advise_huge_pages, instruction_sets, instructions_in_use, thread_waits, use_instructions,
    };
}

const DTYPES: [(&str, DType); 3] =
    [("float32", DType::Float32), ("bfloat16", DType::BFloat16), ("float16", DType::Float16)];

const CACHE_DTYPES: [(&str, CacheDType); 4] = [
    ("auto", CacheDType::Auto),
    ("int8", CacheDType::Int8),
    ("fp8_e4m3", CacheDType::Float8E4M3),
    ("fp8_e5m2", CacheDType::Float8E5M2),
];

const INSTRUCTION_SETS: [(&str, InstructionSet); 6] = [
    ("portable", InstructionSet::Portable),
    ("avx2", InstructionSet::Avx2),
    ("avx512", InstructionSet::Avx512),
    ("avx512_bf16", InstructionSet::Avx512BFloat16),
    ("amx", InstructionSet::Amx),
    ("neon", InstructionSet::Neon),
];

/// Looks a name up in a list.
pub(crate) fn choice<T: Copy>(name: &str, given: &str, choices: &[(&str, T)]) -> PyResult<T> {
    choice_or(Error::Arrays, name, given, choices)
}

/// Looks a number type up by its name.
pub(crate) fn dtype_of(name: &str, given: &str) -> PyResult<DType> {
    choice(name, given, &DTYPES)
}

/// Looks a storage type of keys and values up by its name.
pub(crate) fn cache_dtype_of(name: &str, given: &str) -> PyResult<CacheDType> {
    choice(name, given, &CACHE_DTYPES)
}

/// Converts a size, stride or count.
pub(crate) fn size(name: &str, value: i64) -> PyResult<usize> {
    count_or(Error::Arrays, name, value)
}

/// Return the instruction sets that this CPU has and the kernels support, the fastest last.
#[pyfunction]
pub(crate) fn instruction_sets() -> Vec<&'static str> {
    let available = INSTRUCTION_SETS.iter().filter(|(_, set)| set.is_available());
    available.map(|(name, _)| *name).collect()
}

/// Index into `INSTRUCTION_SETS` of the set in use; past the end means the fastest of this CPU.
static IN_USE: AtomicUsize = AtomicUsize::new(INSTRUCTION_SETS.len());

fn in_use() -> InstructionSet {
    let chosen = INSTRUCTION_SETS.get(IN_USE.load(Ordering::Relaxed));
    chosen.map_or_else(InstructionSet::detect, |(_, set)| *set)
}

/// Return the instruction set that this process uses.
#[pyfunction]
pub(crate) fn instructions_in_use() -> &'static str {
    let in_use = in_use();
    let found = INSTRUCTION_SETS.iter().find(|(_, set)| *set == in_use);
    found.map_or("portable", |(name, _)| name)
}

/// Select the instruction set of this process; None selects the fastest of this CPU.
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
        let accepted = instruction_sets().join(", ");
        return Err(to_py(&Error::Config(format!(
            "cpu_instructions, or PAGEDSERVE_CPU_INSTRUCTIONS, is {name:?}; this CPU has {accepted}"
        ))));
    };
    IN_USE.store(place, Ordering::Relaxed);
    Ok(())
}

/// Request huge pages for a range of memory; a system without them ignores the request.
///
/// Args:
///     address: Address of its first byte.
///     num_bytes: Length in bytes.
#[pyfunction]
pub(crate) fn advise_huge_pages(address: usize, num_bytes: usize) {
    pagedserve_cpu::advise_huge_pages(std::ptr::with_exposed_provenance_mut(address), num_bytes);
}

/// Return what the compute threads of this process have lost to waiting.
///
/// Returns:
///     Calls of more than one thread; threads that took no part in a call, as they slept or had no
///     core until it was over; seconds in which callers waited for threads that still computed.
#[pyfunction]
pub(crate) fn thread_waits() -> (u64, u64, f64) {
    #[cfg(target_os = "linux")]
    {
        let waits = Threads.waits();
        (waits.num_calls, waits.num_absent, waits.waited.as_secs_f64())
    }
    #[cfg(not(target_os = "linux"))]
    (0, 0, 0.0)
}

/// Runs `work` with these threads and instructions (None: those that the process uses).
///
/// The interpreter's lock is released if `work` is long; the compute threads never take it.
pub(crate) fn on_threads(
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
    compute(py, work, || run(&Execution { instructions, team: &Threads, num_threads }))
}
