"""Host memory and the Rust kernels there: huge pages, block copies, dtypes and instructions."""
