//! `pagedserve._core`: the Python face of `pagedserve-core`, and nothing more.  Every method
//! checks its arguments, calls the core, maps the error.

mod arrays;
mod attention;
mod blocks;
mod config;
mod cpu;
mod error;
mod layer;
mod linear;
mod metadata;
mod moves;
mod outputs;
mod scheduler;
mod space;

use pyo3::prelude::*;

/// The scheduler core.
#[pymodule(gil_used = true)]
mod _core {
    #[pymodule_export]
    use super::arrays::InputBuffers;
    #[pymodule_export]
    use super::attention::paged_attention_cpu;
    #[pymodule_export]
    use super::blocks::{CachedBlockAllocator, LRUEvictor, Prefix, UncachedBlockAllocator};
    #[pymodule_export]
    use super::config::{CacheConfig, SchedulerConfig};
    #[pymodule_export]
    use super::cpu::{
        advise_huge_pages, cpu_instruction_sets, cpu_instructions, has_torch_threads,
        likeliest_cpu, use_cpu_instructions,
    };
    #[pymodule_export]
    use super::layer::{DecoderLayer, rms_norm_cpu};
    #[pymodule_export]
    use super::linear::PackedWeights;
    #[pymodule_export]
    use super::metadata::SequenceGroupMetadata;
    #[pymodule_export]
    use super::moves::copy_blocks_cpu;
    #[pymodule_export]
    use super::outputs::{GroupStats, ScheduledSequenceGroup, SchedulerOutputs};
    #[pymodule_export]
    use super::scheduler::Scheduler;
    #[pymodule_export]
    use super::space::BlockSpaceManager;

    #[pymodule_export]
    #[expect(non_upper_case_globals, reason = "the name that Python packages use")]
    const __version__: &str = env!("CARGO_PKG_VERSION");
}
