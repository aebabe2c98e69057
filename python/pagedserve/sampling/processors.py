"""Calls of logits processors, which a request may bring, and which may do anything."""

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pagedserve.sampling.ops import Array, SamplingOps
from pagedserve.sampling.rows import LogitsEdits
from pagedserve.sampling_params import LogitsProcessor


def run_processors(
    logits: Array, rows: Iterable[tuple[int, LogitsEdits]], ops: SamplingOps
) -> dict[int, str]:
    """Replace rows of logits by the results of their processors.

    Args:
        logits: float32 ``[N, V]``, replaced in place.
        rows: edits with the indices of their rows.
        ops: operations on the logits.

    Returns:
        Errors of failed rows, in one line each; their logits are undefined.
    """
    errors = {}
    for row, edit in rows:
        for processor in edit.logits_processors:
            token_ids = np.asarray(edit.output_token_ids, dtype=np.int64).tolist()
            fault = _run(processor, token_ids, logits[row], ops)
            if fault is not None:
                errors[row] = " ".join(f"logits processor {_name_of(processor)} {fault}".split())
                break
    return errors


def run_on_array(
    processor: Callable[[list[int], Any], object],
    token_ids: list[int],
    logits: NDArray[np.float32],
) -> str | None:
    """`SamplingOps.run_processor` for processors of numpy arrays."""
    result = processor(token_ids, logits.copy())
    wanted = f"expected a float array of shape [{len(logits)}]"
    if not isinstance(result, np.ndarray):
        return f"returned {type(result).__name__}, {wanted}"
    if result.shape != logits.shape or not np.issubdtype(result.dtype, np.floating):
        return f"returned {result.dtype} {list(result.shape)}, {wanted}"
    if np.isnan(result).any():
        return "returned NaN"
    with np.errstate(over="ignore"):  # the sampler reports infinities
        logits[:] = result
    return None


def run_on_tensor(
    processor: Callable[[list[int], Any], object],
    token_ids: list[int],
    logits: Array,
) -> str | None:
    """`SamplingOps.run_processor` for processors of tensors; imports torch for the first one."""
    import torch

    with torch.inference_mode():
        row = torch.as_tensor(logits)
        result = processor(token_ids, row.clone())
        wanted = f"expected a dense float tensor of shape [{len(row)}]"
        if not isinstance(result, torch.Tensor):
            return f"returned {type(result).__name__}, {wanted}"
        is_dense = result.layout is torch.strided and not result.is_meta
        if result.shape != row.shape or not (result.is_floating_point() and is_dense):
            kind = str(result.dtype).removeprefix("torch.")
            layout = "" if is_dense else "meta " if result.is_meta else f"{result.layout} "
            return f"returned {layout}{kind} {list(result.shape)}, {wanted}"
        if result.isnan().any():
            return "returned NaN"
        row.copy_(result)
        return None


def _run(
    processor: LogitsProcessor, token_ids: list[int], logits: Array, ops: SamplingOps
) -> str | None:
    """Replace the logits of a row by the result of a processor, or return its error."""
    try:
        return ops.run_processor(processor, token_ids, logits)
    # Custom code, and arrays that it creates, may raise anything.
    except Exception as error:  # noqa: BLE001
        return f"raised {_told(error)}"


def _name_of(processor: LogitsProcessor) -> str:
    try:
        return str(processor.__name__)
    except Exception:  # noqa: BLE001  # most callables have no name
        return type(processor).__name__


def _told(error: Exception) -> str:
    name = type(error).__name__
    try:
        return f"{name}: {error}"
    except Exception:  # noqa: BLE001  # formatting may fail too
        return name
