//! Huge pages.
#![expect(unsafe_code, reason = "a system call")]

/// Advises the system to back the whole huge pages of a range with huge pages, when they are first
/// touched.  A system without them ignores the advice.
pub fn advise_huge_pages(start: *mut u8, num_bytes: usize) {
    #[cfg(target_os = "linux")]
    // SAFETY: the advice changes how memory is backed, not what is in it; a range that is not
    // mapped is refused by the system.
    unsafe {
        libc::madvise(start.cast(), num_bytes, libc::MADV_HUGEPAGE);
    }
    #[cfg(not(target_os = "linux"))]
    let _ = (start, num_bytes);
}
