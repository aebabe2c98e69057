"""A model's modules exchanged for Rust kernels on the CPU; what is not known stays as it is."""
