//! `pagedserve._core`: the Python binding of `pagedserve-core`.  Every method checks its arguments,
//! calls the core and maps the error.  The doc comments of Python classes and functions are their
//! docstrings, and written as such.
#![allow(clippy::doc_markdown, reason = "Python's docstrings name arguments without backticks")]

mod arrays;
mod blocks;
mod config;
mod cpu;
mod error;
mod gateway;
mod groups;
mod log_files;
mod lookup;
mod metadata;
mod outputs;
mod scheduler;
mod space;

use pyo3::prelude::pymodule;

/// Scheduler core: every decision about sequences and KV blocks, written in Rust.
///
/// Handles (sequence groups, sequences) are opaque integers.  A handle dies with the object it
/// names and is never reused, so a late call raises ``StaleHandleError`` instead of touching the
/// blocks of another request.  ``pagedserve._core.cpu`` holds the CPU kernels.
#[pymodule(gil_used = true)]
mod _core {
    use pyo3::prelude::*;
    use pyo3::types::{PyString, PyType};

    #[pymodule_export]
    use super::arrays::InputBuffers;
    #[pymodule_export]
    use super::blocks::{CachedBlockAllocator, LRUEvictor, Prefix, UncachedBlockAllocator};
    #[pymodule_export]
    use super::config::{CacheChoices, CacheConfig, SchedulerChoices, SchedulerConfig};
    #[pymodule_export]
    use super::cpu::module as cpu;
    #[pymodule_export]
    use super::groups::KVGroup;
    #[pymodule_export]
    use super::lookup::TokenLookup;
    #[pymodule_export]
    use super::metadata::SequenceGroupMetadata;
    #[pymodule_export]
    use super::outputs::{BlockMoves, GroupStats, ScheduledSequenceGroup, SchedulerOutputs};
    #[pymodule_export]
    use super::scheduler::Scheduler;
    #[pymodule_export]
    use super::space::BlockSpaceManager;

    #[pymodule_export]
    #[expect(non_upper_case_globals, reason = "the name that Python packages use")]
    const __version__: &str = env!("CARGO_PKG_VERSION");

    /// Registers a submodule: inside an extension it has no file and is found by its name.
    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        const NAME: &str = "pagedserve._core.cpu";
        let cpu = module.getattr("cpu")?;
        cpu.setattr("__name__", NAME)?;
        for name in cpu.getattr("__all__")?.try_iter()? {
            // Functions take the name that the module had when they were created.
            let member = cpu.getattr(name?.cast::<PyString>()?)?;
            if !member.is_instance_of::<PyType>() {
                member.setattr("__module__", NAME)?;
            }
        }
        module.py().import("sys")?.getattr("modules")?.set_item(NAME, cpu)
    }
}
