"""Operations in host memory, most of them in Rust: allocation, block copies, top-k of logits."""
