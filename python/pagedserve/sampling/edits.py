"""Edits of logits before sampling: processors, biases, penalties, allowed tokens, top_n_sigma.

The order, and why:

1. Processors, so that they see the model's logits and nothing that depends on our formulas.
2. Bias, then the penalties: a penalty scales preferences, and a bias is one.  Repetition comes
   before presence and frequency: it depends on the sign of a logit, which they would change.
3. Allowed and banned tokens, then grammars, so that nothing reverts them.
4. `top_n_sigma`, whose standard deviation is that of the tokens that are left.

Temperature and filters follow when the token is sampled (`pagedserve.sampling.draw`).

Costs: each edit is a few operations over flat (row, token) pairs, whatever the number of rows, and
touches no other logits.  Distinct pairs and their counts come from sorting the pairs, not from
arrays of the vocabulary's size.  Processors are called one by one.
"""

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.ma  # np.unique would import it within a step, which takes 0.1 s
import torch
from numpy.typing import NDArray
from torch import Tensor

from pagedserve.sampling.grammar import compute_masks
from pagedserve.sampling.masks import unpack_masks
from pagedserve.sampling.rows import LogitsEdits, RowSampling
from pagedserve.sampling_params import LogitsProcessor

# Edits with the indices of their rows.
_EditedRows = Sequence[tuple[int, LogitsEdits]]


def edit_logits(logits: Tensor, rows: Sequence[RowSampling]) -> dict[int, str]:
    """Edit rows in place.

    Args:
        logits: float32 ``[N, V]``, contiguous; must not contain NaN.
        rows: parameters of the N rows.

    Returns:
        Errors of failed rows, in one line each; their logits are undefined.

    Raises:
        IndexError: A token id is not below V.
    """
    edited = [(index, row.edits) for index, row in enumerate(rows) if row.edits is not None]
    errors = _run_processors(logits, edited)
    _add_bias(logits, edited)
    _penalise_repetition(logits, edited)
    _penalise_output(logits, edited)
    _restrict(logits, edited)
    errors |= _keep_to_grammars(logits, rows)
    _keep_within_deviations(logits, edited)
    return errors


def _keep_to_grammars(logits: Tensor, rows: Sequence[RowSampling]) -> dict[int, str]:
    """Mask tokens that grammars do not allow, in place, and return errors of rows."""
    states = {index: row.grammar for index, row in enumerate(rows) if row.grammar is not None}
    if not states:
        return {}
    masks = _on_device(compute_masks(list(states.values())), logits)
    which = _on_device(np.array(list(states)), logits)
    may_come = unpack_masks(masks, logits.shape[1])
    logits[which] = logits[which].where(may_come, -torch.inf)
    return {row: state.fault for row, state in states.items() if state.fault is not None}


def _run_processors(logits: Tensor, rows: _EditedRows) -> dict[int, str]:
    errors = {}
    for row, edit in rows:
        for processor in edit.logits_processors:
            token_ids = np.asarray(edit.output_token_ids, dtype=np.int64).tolist()
            fault = _run(processor, token_ids, logits[row])
            if fault is not None:
                errors[row] = " ".join(f"logits processor {_name_of(processor)} {fault}".split())
                break
    return errors


def _run(processor: LogitsProcessor, token_ids: list[int], logits: Tensor) -> str | None:
    """Replace the logits by the result of a processor, or return its error."""
    try:
        result: object = processor(token_ids, logits.clone())
        fault = _fault_of(result, logits)
        if fault is None and isinstance(result, Tensor):
            logits.copy_(result)
    # Custom code, and tensors that it creates, may raise anything.
    except Exception as error:  # noqa: BLE001
        return f"raised {_told(error)}"
    return fault


def _fault_of(result: object, logits: Tensor) -> str | None:
    wanted = f"expected a dense float tensor of shape [{logits.shape[0]}]"
    if not isinstance(result, Tensor):
        return f"returned {type(result).__name__}, {wanted}"
    is_dense = result.layout is torch.strided and not result.is_meta
    if result.shape != logits.shape or not (result.is_floating_point() and is_dense):
        kind = str(result.dtype).removeprefix("torch.")
        layout = "" if is_dense else "meta " if result.is_meta else f"{result.layout} "
        return f"returned {layout}{kind} {list(result.shape)}, {wanted}"
    return "returned NaN" if result.isnan().any() else None


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


def _add_bias(logits: Tensor, rows: _EditedRows) -> None:
    cells = _cells(((row, [token for token, _ in edit.logit_bias]) for row, edit in rows), logits)
    values = [value for _, edit in rows for _, value in edit.logit_bias]
    logits.view(-1).index_add_(0, _on_device(cells, logits), logits.new_tensor(values))


def _penalise_repetition(logits: Tensor, rows: _EditedRows) -> None:
    rows = [(row, edit) for row, edit in rows if edit.repetition_penalty != 1]
    seen = ((r, ids) for r, edit in rows for ids in (edit.prompt_token_ids, edit.output_token_ids))
    cells = np.unique(_cells(seen, logits))
    penalty = _by_cell(cells, {row: edit.repetition_penalty for row, edit in rows}, logits)
    index = _on_device(cells, logits)
    values = logits.view(-1)[index]
    logits.view(-1)[index] = torch.where(values > 0, values / penalty, values * penalty)


def _penalise_output(logits: Tensor, rows: _EditedRows) -> None:
    rows = [(row, edit) for row, edit in rows if edit.presence_penalty or edit.frequency_penalty]
    output = ((row, edit.output_token_ids) for row, edit in rows)
    cells, counts = np.unique(_cells(output, logits), return_counts=True)
    presence = _by_cell(cells, {row: edit.presence_penalty for row, edit in rows}, logits)
    frequency = _by_cell(cells, {row: edit.frequency_penalty for row, edit in rows}, logits)
    penalty = presence + frequency * _on_device(counts, logits)
    logits.view(-1)[_on_device(cells, logits)] -= penalty


def _restrict(logits: Tensor, rows: _EditedRows) -> None:
    allowed = {r: edit.allowed_token_ids for r, edit in rows if edit.allowed_token_ids is not None}
    index = _on_device(_cells(allowed.items(), logits), logits)
    values = logits.view(-1)[index]
    logits[list(allowed)] = -torch.inf
    logits.view(-1)[index] = values
    banned = _cells(((row, edit.banned_token_ids) for row, edit in rows), logits)
    logits.view(-1)[_on_device(banned, logits)] = -torch.inf


def _keep_within_deviations(logits: Tensor, rows: _EditedRows) -> None:
    """Keep tokens near enough to the most likely one: `top_n_sigma`."""
    num_deviations = {row: edit.top_n_sigma for row, edit in rows if edit.top_n_sigma > 0}
    if not num_deviations:
        return
    index = _on_device(np.array(list(num_deviations)), logits)
    values = logits[index]
    # The mean of V logits is at most V ** 0.5 deviations below the largest, so that the difference
    # of squares keeps its digits.
    offsets = values.double() - values.amax(dim=-1, keepdim=True)
    is_finite = offsets > -torch.inf
    count = is_finite.sum(dim=-1)
    finite = offsets.where(is_finite, 0.0)
    variance = _row_sums(finite.square()) / count - (_row_sums(finite) / count).square()
    distance = _on_device(np.array(list(num_deviations.values())), logits) * variance.sqrt()
    logits[index] = values.masked_fill_(offsets < -distance[:, None], -torch.inf)


def _row_sums(values: Tensor) -> Tensor:
    """Sums of rows ``[N, V]``, which are overwritten; added in one order, whatever the batch."""
    width = values.shape[1]
    while width > 1:
        half = (width + 1) // 2
        values[:, : width - half] += values[:, half:width]
        width = half
    return values[:, 0]


def _cells(
    pairs: Iterable[tuple[int, Sequence[int] | NDArray[np.int32]]], logits: Tensor
) -> NDArray[np.int64]:
    """Indices of (row, token) pairs in the flat logits, int64, from rows and their tokens."""
    vocab_size = logits.shape[1]
    parts = [(row, np.asarray(tokens, dtype=np.int64)) for row, tokens in pairs]
    row_of = np.repeat([row for row, _ in parts], [len(tokens) for _, tokens in parts])
    tokens = np.concatenate([np.zeros(0, dtype=np.int64), *(tokens for _, tokens in parts)])
    # In a flat array such a token would belong to another row.
    if np.any((tokens < 0) | (tokens >= vocab_size)):
        raise IndexError(f"token ids must be in [0, {vocab_size})")
    cells: NDArray[np.int64] = row_of.astype(np.int64) * vocab_size + tokens
    return cells


def _by_cell(cells: NDArray[np.int64], values: dict[int, float], logits: Tensor) -> Tensor:
    """Values of the cells' rows, float32."""
    by_row = np.zeros(logits.shape[0], dtype=np.float32)
    by_row[list(values)] = list(values.values())
    return _on_device(by_row[cells // logits.shape[1]], logits)


def _on_device(values: NDArray[np.generic], logits: Tensor) -> Tensor:
    return torch.from_numpy(values).to(logits.device)
