//! What the functions of the CPU share: names of types and instructions, torch's threads.
//!
//! torch is not linked: a tensor comes as its address, sizes and strides.
#![expect(unsafe_code, reason = "addresses from Python become pointers")]

use std::sync::atomic::{AtomicUsize, Ordering};

use pagedserve_core::error::Error;
#[cfg(target_os = "linux")]
use pagedserve_cpu::OpenMp;
use pagedserve_cpu::{DType, Execution, InstructionSet, Sequential, Team};
use pyo3::prelude::*;

use crate::arrays::{checked, readwrite};
use crate::config::{choice_or, count_or};
use crate::error::to_py;

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

/// The instruction sets that this CPU has, the best last.
#[pyfunction]
pub(crate) fn cpu_instruction_sets() -> Vec<&'static str> {
    let available = INSTRUCTION_SETS.iter().filter(|(_, set)| set.is_available());
    available.map(|(name, _)| *name).collect()
}

/// Which of `INSTRUCTION_SETS` this process uses; beyond the last means the best of this CPU.
static IN_USE: AtomicUsize = AtomicUsize::new(INSTRUCTION_SETS.len());

fn instructions_in_use() -> InstructionSet {
    let chosen = INSTRUCTION_SETS.get(IN_USE.load(Ordering::Relaxed));
    chosen.map_or_else(InstructionSet::detect, |(_, set)| *set)
}

/// The instruction set that this process uses.
#[pyfunction]
pub(crate) fn cpu_instructions() -> &'static str {
    let in_use = instructions_in_use();
    let found = INSTRUCTION_SETS.iter().find(|(_, set)| *set == in_use);
    found.map_or("portable", |(name, _)| name)
}

#[pyfunction]
#[pyo3(signature = (name))]
pub(crate) fn use_cpu_instructions(name: Option<&str>) -> PyResult<()> {
    let Some(name) = name else {
        IN_USE.store(INSTRUCTION_SETS.len(), Ordering::Relaxed);
        return Ok(());
    };
    let place =
        INSTRUCTION_SETS.iter().position(|(other, set)| *other == name && set.is_available());
    let Some(place) = place else {
        let accepted = cpu_instruction_sets();
        return Err(to_py(&Error::Config(format!(
            "cpu_instructions is {name:?}; this CPU has {accepted:?}"
        ))));
    };
    IN_USE.store(place, Ordering::Relaxed);
    Ok(())
}

/// Whether the threads of a loaded torch can be used.
#[pyfunction]
pub(crate) fn has_torch_threads() -> bool {
    team().is_some()
}

/// Asks for huge pages; a system that has none goes on with small ones.
#[pyfunction]
pub(crate) fn advise_huge_pages(address: usize, num_bytes: usize) {
    pagedserve_cpu::advise_huge_pages(std::ptr::with_exposed_provenance_mut(address), num_bytes);
}

#[pyfunction]
#[pyo3(signature = (*, logits, vocab_size, num, ids, values, num_threads = 1, instructions = None))]
pub(crate) fn likeliest_cpu(
    logits: usize,
    vocab_size: i64,
    num: i64,
    ids: &Bound<'_, PyAny>,
    values: &Bound<'_, PyAny>,
    num_threads: i64,
    instructions: Option<&str>,
) -> PyResult<()> {
    let (vocab_size, num) = (size("vocab_size", vocab_size)?, size("num", num)?);
    let (ids, values) = (checked::<i64>(ids, "ids")?, checked::<f32>(values, "values")?);
    let (mut ids, mut values) = (readwrite(&ids, "ids")?, readwrite(&values, "values")?);
    let found = (ids.as_slice_mut()?, values.as_slice_mut()?);
    on_torch_threads(num_threads, instructions, |execution| {
        let logits = std::ptr::with_exposed_provenance(logits);
        // SAFETY: that the address is that of a live tensor of this size is the caller's promise,
        // as the stub says; everything else is checked.
        unsafe { pagedserve_cpu::likeliest(logits, vocab_size, num, found, execution) }
    })
}

/// Runs `work` with these threads and instructions (None: those that the process uses).
///
/// The interpreter's lock stays: a call takes microseconds, and threads that work here never ask
/// for it.
pub(crate) fn on_torch_threads(
    num_threads: i64,
    instructions: Option<&str>,
    work: impl FnOnce(&Execution<'_>) -> pagedserve_cpu::Result<()>,
) -> PyResult<()> {
    let instructions = match instructions {
        Some(name) => choice("instructions", name, &INSTRUCTION_SETS)?,
        None => instructions_in_use(),
    };
    let num_threads = size("num_threads", num_threads)?;
    let found = team();
    let (team, num_threads): (&dyn Team, usize) = match &found {
        Some(team) => (team, num_threads),
        None => (&Sequential, 1),
    };
    work(&Execution { instructions, team, num_threads }).map_err(|error| refused(&error))
}

/// What a function of the CPU refused, as Python sees it.
pub(crate) fn refused(error: &pagedserve_cpu::Error) -> PyErr {
    to_py(&Error::Arrays(error.to_string()))
}
