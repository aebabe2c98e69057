"""The sampler, written a second time: one row after the other, in float64 and plain numpy."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pagedserve.sampling.rows import LogitsEdits, RowSampling

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Expected:
    """What a row should give.

    Attributes:
        tokens: The sampled tokens.
        order: All tokens, most likely first, by the logits of the model.
        logprobs: Log-probability of each token, by the same.
        candidates: All tokens, most likely first, by the edited logits.
        candidate_logprobs: Log-probability of each token, by the same.
    """

    tokens: list[int]
    order: list[int]
    logprobs: Floats
    candidates: list[int]
    candidate_logprobs: Floats


def expected(logits: NDArray[np.float32], row: RowSampling, allowed: set[int] | None) -> Expected:
    """What a row should give; ``allowed`` are the tokens of its grammar, None without one."""
    exact = logits.astype(np.float64)
    edited = _edited(exact, row.edits or LogitsEdits(), allowed)
    is_free = row.top_k <= 0 and row.top_p == 1 and row.min_p == 0 and len(row.uniforms) == 1
    if row.num_candidates:
        tokens = []
    elif row.is_greedy:
        tokens = [int(edited.argmax())]
    elif allowed is not None and row.edits is None and is_free:
        tokens = _drawn(exact, row, row.uniforms)
        if tokens[0] not in allowed:
            tokens = _drawn(edited, row, (row.second_uniform,))
    else:
        tokens = _drawn(edited, row, row.uniforms)
    return Expected(tokens, _order(exact), log_softmax(exact), _order(edited), log_softmax(edited))


def log_softmax(logits: Floats) -> Floats:
    """Log-probabilities of one row."""
    below = logits - logits.max()
    found: Floats = below - np.log(np.exp(below).sum())
    return found


def _order(logits: Floats) -> list[int]:
    return sorted(range(len(logits)), key=lambda token: (-logits[token], token))


def _edited(logits: Floats, edits: LogitsEdits, allowed: set[int] | None) -> Floats:
    values = logits.astype(np.float32)
    for processor in edits.logits_processors:
        values = processor(list(edits.output_token_ids), values.copy())  # type: ignore[arg-type,assignment]
    found = values.astype(np.float64)
    prompt, output = list(edits.prompt_token_ids), list(edits.output_token_ids)
    for token, value in edits.logit_bias:
        found[token] += value
    for token in {*prompt, *output}:
        penalty = edits.repetition_penalty
        found[token] = found[token] / penalty if found[token] > 0 else found[token] * penalty
    for token in set(output):
        found[token] -= edits.presence_penalty + edits.frequency_penalty * output.count(token)
    for token in range(len(found)):
        is_listed = edits.allowed_token_ids is None or token in edits.allowed_token_ids
        is_in_grammar = allowed is None or token in allowed
        if not (is_listed and is_in_grammar) or token in edits.banned_token_ids:
            found[token] = -np.inf
    if edits.top_n_sigma > 0:
        deviation = np.std(found[np.isfinite(found)])
        found[found < found.max() - edits.top_n_sigma * deviation] = -np.inf
    return found


def _drawn(logits: Floats, row: RowSampling, uniforms: tuple[float, ...]) -> list[int]:
    """Invert the cumulative distribution of the kept tokens, in the order of their ids."""
    weights = np.exp((logits - logits.max()) / row.temperature)
    order = _order(logits)
    kept = order[: row.top_k] if row.top_k > 0 else order
    shares = weights[kept].cumsum() / weights[kept].sum()
    if row.top_p < 1:
        kept = kept[: int((shares < row.top_p).sum()) + 1]
    kept = [token for token in kept if weights[token] >= row.min_p]
    ids = sorted(kept)
    ends = weights[ids].cumsum()
    return [ids[int(np.searchsorted(ends, uniform * ends[-1], "right"))] for uniform in uniforms]
