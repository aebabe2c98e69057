//! The OpenMP threads that torch runs, found in the process.
//!
//! torch links libgomp, or another runtime that offers libgomp's entry point.  It is taken from
//! the libraries that `libtorch_cpu` itself was linked to, so that the team is the one of
//! torch's operators even if other packages brought a libgomp of their own.
#![expect(unsafe_code, reason = "foreign functions, found by name")]

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::sync::OnceLock;

use crate::team::Team;

type Region = unsafe extern "C" fn(*mut c_void);
type Parallel = unsafe extern "C" fn(Region, *mut c_void, c_uint, c_uint);

/// torch's OpenMP threads.  Only the thread that calls torch's operators should use it: every
/// thread that does so gets a team of its own.
#[derive(Clone, Copy, Debug)]
pub struct OpenMp(Parallel);

impl OpenMp {
    /// The runtime that the loaded torch uses; None if there is none.
    pub fn find() -> Option<Self> {
        // Remembered only once found: torch may be loaded later.
        static FOUND: OnceLock<OpenMp> = OnceLock::new();
        if let Some(found) = FOUND.get() {
            return Some(*found);
        }
        let parallel = entry_point()?;
        Some(*FOUND.get_or_init(|| Self(parallel)))
    }
}

impl Team for OpenMp {
    fn run(&self, num_threads: usize, work: &(dyn Fn() + Sync)) {
        let mut work = work;
        let data = (&raw mut work).cast::<c_void>();
        let num_threads = c_uint::try_from(num_threads).unwrap_or(c_uint::MAX).max(1);
        // SAFETY: the symbol has had this signature since GCC 4.9.  `region` reads `data` as
        // the type it is, and all its calls return before this one does.
        unsafe { (self.0)(region, data, num_threads, 0) };
    }
}

/// What each thread of the team calls.  A panic in it ends the process: it cannot pass through
/// the frames of a foreign runtime.
unsafe extern "C" fn region(data: *mut c_void) {
    // SAFETY: `data` points at the closure's reference on the stack of `run`; threads share it
    // for reading only, and the closure is Sync.
    let work = unsafe { *data.cast::<&(dyn Fn() + Sync)>() };
    work();
}

/// `GOMP_parallel` among the libraries that `libtorch_cpu` was linked to.
fn entry_point() -> Option<Parallel> {
    let mut path: Vec<u8> = Vec::new();
    // SAFETY: `remember_torch` is called with each loaded object while this call lasts.
    unsafe { libc::dl_iterate_phdr(Some(remember_torch), (&raw mut path).cast()) };
    if path.is_empty() {
        return None;
    }
    // SAFETY: `path` is a C string.  The library is loaded already, so that no initialiser runs;
    // the handle is never closed, which keeps the symbol valid.
    let symbol = unsafe {
        let library =
            libc::dlopen(path.as_ptr().cast::<c_char>(), libc::RTLD_NOLOAD | libc::RTLD_LAZY);
        if library.is_null() {
            return None;
        }
        libc::dlsym(library, c"GOMP_parallel".as_ptr())
    };
    if symbol.is_null() {
        return None;
    }
    // SAFETY: the symbol of this name is a function of this type.
    Some(unsafe { std::mem::transmute::<*mut c_void, Parallel>(symbol) })
}

/// Keeps the path of `libtorch_cpu`, its final NUL included.
unsafe extern "C" fn remember_torch(
    info: *mut libc::dl_phdr_info,
    _size: libc::size_t,
    path: *mut c_void,
) -> c_int {
    // SAFETY: `path` is the vector that `entry_point` lends, and `info` is valid for this call;
    // a name is NULL or a C string.
    unsafe {
        let name = (*info).dlpi_name;
        if !name.is_null() {
            let name = CStr::from_ptr(name).to_bytes_with_nul();
            if name.windows(12).any(|part| part == b"libtorch_cpu") {
                (*path.cast::<Vec<u8>>()).extend_from_slice(name);
                return 1;
            }
        }
    }
    0
}
