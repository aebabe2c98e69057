"""An engine loop of one's own: pagedserve's scheduler, numpy, and a model that is not there.

Runs in an environment that holds only numpy and the pagedserve wheel.  Eight requests share so few
KV blocks that some lose theirs and are computed again.
"""

import time
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pagedserve.scheduler import CacheConfig, InputBuffers, Scheduler, SchedulerConfig

BLOCK_SIZE, NUM_BLOCKS, MAX_TOKENS, MAX_ROWS, MAX_LEN = 4, 24, 64, 8, 40
VOCAB_SIZE, NEW_TOKENS = 1000, 12


def fake_model(token_ids: NDArray[np.int32], positions: NDArray[np.int64]) -> NDArray[np.int32]:
    """The next token after each token: here a pure function of token and position."""
    tokens = (token_ids * 31 + positions * 7 + 11) % VOCAB_SIZE
    return tokens.astype(np.int32)


def main() -> None:
    """Run eight requests to their end, a line a step."""
    scheduler = Scheduler(
        SchedulerConfig(
            max_num_seqs=MAX_ROWS, max_num_batched_tokens=MAX_TOKENS, max_model_len=MAX_LEN
        ),
        CacheConfig(block_size=BLOCK_SIZE, num_gpu_blocks=NUM_BLOCKS),
    )
    arrays: dict[str, Any] = {
        "token_ids": np.zeros(MAX_TOKENS, np.int32),
        "positions": np.zeros(MAX_TOKENS, np.int64),
        "slot_mapping": np.zeros(MAX_TOKENS, np.int64),
        "query_start": np.zeros(MAX_ROWS + 1, np.int32),
        "seq_lens": np.zeros(MAX_ROWS, np.int32),
        "block_tables": np.zeros(MAX_ROWS * MAX_LEN // BLOCK_SIZE, np.int32),
        "sample_index": np.zeros(MAX_ROWS, np.int32),
        "sample_rows": np.zeros(MAX_ROWS, np.int32),
        "row_handles": np.zeros(MAX_ROWS, np.int64),
    }
    buffers = InputBuffers(**arrays)

    texts: dict[int, list[int]] = {}
    for number in range(8):
        prompt = np.arange(number, number + 5 + number, dtype=np.int32)
        _, seq = scheduler.add_seq_group(prompt, arrival_time=time.monotonic())
        texts[seq] = []

    while scheduler.has_unfinished:
        step = scheduler.schedule(time.monotonic())
        print(
            f"step {step.step_id:2}: {step.num_prefill_groups} prompts, {step.num_rows} rows, "
            f"{step.num_batched_tokens:2} tokens, {scheduler.num_free_gpu_blocks:2} blocks free, "
            f"{scheduler.num_waiting} waiting" + ", preempted" * len(step.preempted)
        )
        if step.is_empty:
            continue
        scheduler.prepare_inputs(buffers)  # fills the arrays in place
        wanted = arrays["sample_index"][: step.num_samples]
        tokens = fake_model(arrays["token_ids"][wanted], arrays["positions"][wanted])
        rows = arrays["sample_rows"][: step.num_samples]
        seqs = arrays["row_handles"][rows].tolist()
        for seq, token in zip(seqs, tokens.tolist(), strict=True):
            texts[seq].append(token)
        finish = np.array([len(texts[seq]) == NEW_TOKENS for seq in seqs], np.uint8)
        one_each = np.arange(len(seqs) + 1, dtype=np.int32)
        scheduler.update(step.step_id, rows, one_each, tokens, finish)

    for number, tokens_of_request in enumerate(texts.values()):
        print(f"request {number}: {tokens_of_request}")
    print(f"{scheduler.num_preemptions} preemptions, {scheduler.num_free_gpu_blocks} blocks free")


if __name__ == "__main__":
    main()
