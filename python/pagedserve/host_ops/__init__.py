"""Host memory and Rust kernels: huge pages, block copies, dtypes and instructions."""
