"""Edits of logits before sampling: processors, biases, penalties, allowed tokens, top_n_sigma.

The order, and why:

1. Processors, so that they see the model's logits and nothing that depends on our formulas.
2. Bias, then the penalties: a penalty scales preferences, and a bias is one.  Repetition comes
   before presence and frequency: it depends on the sign of a logit, which they would change.
3. Allowed and banned tokens, then grammars, so that nothing reverts them.
4. `top_n_sigma`, whose standard deviation is that of the tokens that are left.

Temperature and filters follow when the token is sampled (`SamplingOps.draw`).

Costs: each edit is a few operations over flat (row, token) pairs, whatever the number of rows, and
touches no other logits.  Distinct pairs and their counts come from sorting the pairs, not from
arrays of the vocabulary's size.  Processors are called one by one.
"""

from collections.abc import Callable, Iterable, Sequence
from operator import add, sub

import numpy as np
from numpy.typing import NDArray

from pagedserve.sampling.grammar import compute_masks
from pagedserve.sampling.ops import Array, SamplingOps
from pagedserve.sampling.processors import run_processors
from pagedserve.sampling.rows import LogitsEdits, RowSampling

# Edits with the indices of their rows.
_EditedRows = Sequence[tuple[int, LogitsEdits]]


def edit_logits(logits: Array, rows: Sequence[RowSampling], ops: SamplingOps) -> dict[int, str]:
    """Edit rows in place.

    Args:
        logits: float32 ``[N, V]``, contiguous; must not contain NaN.
        rows: parameters of the N rows.
        ops: operations on the logits.

    Returns:
        Errors of failed rows, in one line each; their logits are undefined.

    Raises:
        IndexError: A token id is not below V.
    """
    edited = [(index, row.edits) for index, row in enumerate(rows) if row.edits is not None]
    errors = run_processors(logits, edited, ops)
    with np.errstate(all="ignore"):  # the sampler reports rows that cannot be sampled
        _add_bias(logits, edited, ops)
        _penalise_repetition(logits, edited, ops)
        _penalise_output(logits, edited, ops)
        _restrict(logits, edited, ops)
        errors |= _keep_to_grammars(logits, rows, ops)
        _keep_within_deviations(logits, edited, ops)
    return errors


def _add_bias(logits: Array, rows: _EditedRows, ops: SamplingOps) -> None:
    cells = _cells(((row, [token for token, _ in edit.logit_bias]) for row, edit in rows), logits)
    values = [value for _, edit in rows for _, value in edit.logit_bias]
    cells, places = np.unique(cells, return_inverse=True)
    sums = np.bincount(places, weights=values, minlength=len(cells))
    _change(logits, cells, add, sums.astype(np.float32), ops)


def _penalise_repetition(logits: Array, rows: _EditedRows, ops: SamplingOps) -> None:
    rows = [(row, edit) for row, edit in rows if edit.repetition_penalty != 1]
    seen = ((r, ids) for r, edit in rows for ids in (edit.prompt_token_ids, edit.output_token_ids))
    # Without counts np.unique imports numpy.ma, which takes 30 ms.
    cells, _ = np.unique(_cells(seen, logits), return_counts=True)
    penalties = _by_cell(cells, {row: edit.repetition_penalty for row, edit in rows}, logits)

    def scale(values: Array, penalties: Array) -> Array:
        return ops.xp.where(values > 0, values / penalties, values * penalties)

    _change(logits, cells, scale, penalties, ops)


def _penalise_output(logits: Array, rows: _EditedRows, ops: SamplingOps) -> None:
    rows = [(row, edit) for row, edit in rows if edit.presence_penalty or edit.frequency_penalty]
    output = ((row, edit.output_token_ids) for row, edit in rows)
    cells, counts = np.unique(_cells(output, logits), return_counts=True)
    presence = _by_cell(cells, {row: edit.presence_penalty for row, edit in rows}, logits)
    frequency = _by_cell(cells, {row: edit.frequency_penalty for row, edit in rows}, logits)
    _change(logits, cells, sub, presence + frequency * counts.astype(np.float32), ops)


def _restrict(logits: Array, rows: _EditedRows, ops: SamplingOps) -> None:
    allowed = {r: edit.allowed_token_ids for r, edit in rows if edit.allowed_token_ids is not None}
    flat = logits.reshape(-1)
    if allowed:
        index = ops.upload(_cells(allowed.items(), logits))
        values = flat[index]
        logits[list(allowed)] = -np.inf
        flat[index] = values
    banned = _cells(((row, edit.banned_token_ids) for row, edit in rows), logits)
    if banned.size:
        flat[ops.upload(banned)] = -np.inf


def _keep_to_grammars(
    logits: Array, rows: Sequence[RowSampling], ops: SamplingOps
) -> dict[int, str]:
    """Mask tokens that grammars do not allow, in place, and return errors of rows."""
    states = {index: row.grammar for index, row in enumerate(rows) if row.grammar is not None}
    if not states:
        return {}
    masks = ops.upload(compute_masks(list(states.values())))
    index = ops.upload(np.array(list(states)))
    is_allowed = ops.unpack_masks(masks, logits.shape[1])
    logits[index] = ops.xp.where(is_allowed, logits[index], -np.inf)
    return {row: state.fault for row, state in states.items() if state.fault is not None}


def _keep_within_deviations(logits: Array, rows: _EditedRows, ops: SamplingOps) -> None:
    """Keep tokens near enough to the most likely one: `top_n_sigma`."""
    num_deviations = {row: edit.top_n_sigma for row, edit in rows if edit.top_n_sigma > 0}
    if not num_deviations:
        return
    xp = ops.xp
    index = ops.upload(np.array(list(num_deviations)))
    values = logits[index]
    # The mean of V logits is at most V ** 0.5 deviations below the largest, so that the difference
    # of squares keeps its digits.
    peaks = xp.amax(values, axis=-1, keepdims=True)
    offsets = xp.asarray(values, dtype=xp.float64)
    offsets -= peaks
    is_finite = offsets > -np.inf
    count = is_finite.sum(axis=-1)
    finite = xp.where(is_finite, offsets, 0.0)
    variance = _row_sums(xp.square(finite)) / count - xp.square(_row_sums(finite) / count)
    distance = ops.upload(np.array(list(num_deviations.values()))) * xp.sqrt(variance)
    logits[index] = xp.where(~(offsets < -distance[:, None]), values, -np.inf)


def _row_sums(values: Array) -> Array:
    """Sums of rows ``[N, V]``, which are overwritten; added in one order, whatever the batch."""
    width = values.shape[1]
    while width > 1:
        half = (width + 1) // 2
        values[:, : width - half] += values[:, half:width]
        width = half
    return values[:, 0]


def _change(
    logits: Array,
    cells: NDArray[np.int64],
    change: Callable[[Array, Array], Array],
    operands: NDArray[np.float32],
    ops: SamplingOps,
) -> None:
    """Replace the logits at distinct cells by a function of them and their operands."""
    if cells.size:
        flat, index = logits.reshape(-1), ops.upload(cells)
        flat[index] = change(flat[index], ops.upload(operands))


def _cells(
    pairs: Iterable[tuple[int, Sequence[int] | NDArray[np.int32]]], logits: Array
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


def _by_cell(
    cells: NDArray[np.int64], values: dict[int, float], logits: Array
) -> NDArray[np.float32]:
    """Values of the cells' rows, float32."""
    by_row = np.zeros(logits.shape[0], dtype=np.float32)
    by_row[list(values)] = list(values.values())
    found: NDArray[np.float32] = by_row[cells // logits.shape[1]]
    return found
