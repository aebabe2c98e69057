"""Random sampling of tokens on a GPU, all rows at once, each with separate parameters.

Computes with torch what `pagedserve._core.cpu.draw` computes in host memory, with the same
formulas: they take the same tokens, but at the edges of intervals.  `SamplingOps.draw` defines
them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pagedserve.device import Cuda, to_device
from pagedserve.sampling.rows import RowSampling

# Most likely tokens that top_k and top_p examine, first and second; rows that need more are sorted
# completely, which costs several times the rest of a sample.
NUM_LIKELIEST = (256, 4096)


@dataclass(frozen=True, slots=True)
class RandomRows:
    """Parameters of randomly sampled rows, ``[N]`` each; U is the most samples of a row.

    Includes what the host can precompute, so that nothing synchronizes with the device.

    Attributes:
        temperature: float64, above 0.
        top_k: int64, 1 to V.
        top_p: float64, above 0.
        min_p: float64.
        uniforms: Random numbers, float64 ``[N, U]``; 0 past a row's number of samples.
        draws: int64 ``[D]``, the indices in ``[N, U]`` that are sampled, row by row; None for all.
        with_top_k: pairs of a number of most likely tokens and the rows, int64, whose top_k it
            covers.
        with_top_p: int64, the rows with top_p and without top_k; None if there are none.
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    uniforms: Tensor
    draws: Tensor | None
    with_top_k: list[tuple[int, Tensor]]
    with_top_p: Tensor | None

    @classmethod
    def of(
        cls, rows: Sequence[RowSampling], *, vocab_size: int, cuda: Cuda | None = None
    ) -> "RandomRows":
        """Build arrays from the parameters of random rows, at least one."""
        top_k = [row.top_k_of(vocab_size) for row in rows]
        num_draws = [len(row.uniforms) for row in rows]
        width = max(num_draws)
        parameters = [
            (row.temperature, k, row.top_p, row.min_p, *row.uniforms, *(0.0,) * (width - n))
            for row, k, n in zip(rows, top_k, num_draws, strict=True)
        ]
        # Integers are exact in float64, so a single copy moves everything to the device.
        columns = to_device(torch.tensor(parameters, dtype=torch.float64), cuda).T
        by_size: dict[int, list[int]] = {}
        for row, k in enumerate(top_k):
            if k < vocab_size:
                size = next(size for size in (*NUM_LIKELIEST, vocab_size) if size >= k)
                by_size.setdefault(min(size, vocab_size), []).append(row)
        alone = [n for n, row in enumerate(rows) if row.top_p < 1 and top_k[n] == vocab_size]
        draws = [row * width + draw for row, n in enumerate(num_draws) for draw in range(n)]
        return cls(
            temperature=columns[0],
            top_k=columns[1].long(),
            top_p=columns[2],
            min_p=columns[3],
            uniforms=columns[4:].T.contiguous(),
            draws=_index(draws, cuda) if len(draws) < width * len(rows) else None,
            with_top_k=[(size, _index(found, cuda)) for size, found in sorted(by_size.items())],
            with_top_p=_index(alone, cuda) if alone else None,
        )

    def __len__(self) -> int:
        """Number of rows."""
        return self.temperature.shape[0]


def draw_on_device(
    logits: Tensor, rows: RandomRows, peaks: Tensor, may_come: Tensor | None = None
) -> Tensor:
    """Sample tokens with torch.

    Nothing here synchronizes with the device except top_p without top_k: once, and again for each
    size that some row's nucleus exceeds.

    Args:
        logits: float32 ``[N, V]``, edited.  Not modified.
        rows: parameters of the N rows.
        peaks: float32 ``[N]``, the largest allowed logit of each row.
        may_come: bool ``[N, V]``, allowed tokens of rows without top_k and top_p; None allows all.

    Returns:
        int64 ``[D]`` token ids, row by row; undefined for rows whose maximum is not finite.
    """
    # The most likely token has weight 1, so min_p is the threshold itself.
    weights = logits.double().sub_(peaks[:, None].double()).div_(rows.temperature[:, None]).exp_()
    is_dropped = weights < rows.min_p[:, None]
    if may_come is not None:
        is_dropped |= ~may_come
    if rows.with_top_k or rows.with_top_p is not None:
        is_dropped |= logits < _top_threshold(logits, weights, rows)[:, None]
    cumulative = weights.masked_fill_(is_dropped, 0.0).cumsum(dim=-1)
    total = cumulative[:, -1:]
    # Rounding must not move the target past the last kept token.
    target = torch.minimum(rows.uniforms * total, total.nextafter(torch.zeros_like(total)))
    tokens = torch.searchsorted(cumulative, target, right=True)
    return tokens.flatten() if rows.draws is None else tokens.flatten()[rows.draws]


def _top_threshold(logits: Tensor, weights: Tensor, rows: RandomRows) -> Tensor:
    """float32 [N]: the smallest logit that top_k and top_p keep; -inf keeps all."""
    threshold = logits.new_full((len(rows),), -torch.inf)
    for num_likeliest, index in rows.with_top_k:
        found, _ = _search(logits, weights, rows, index, num_likeliest)
        threshold[index] = found
    open_rows = rows.with_top_p
    for num_likeliest in (*NUM_LIKELIEST, logits.shape[1]):
        if open_rows is None or open_rows.numel() == 0:
            break
        found, is_final = _search(
            logits, weights, rows, open_rows, min(num_likeliest, logits.shape[1])
        )
        threshold[open_rows] = found
        open_rows = open_rows[~is_final]
    return threshold


def _search(
    logits: Tensor, weights: Tensor, rows: RandomRows, index: Tensor, num_likeliest: int
) -> tuple[Tensor, Tensor]:
    """Thresholds of the rows `index` from the most likely tokens, and whether these suffice.

    They always suffice for rows whose top_k is among them: further tokens equal the last one that
    is kept, or are dropped.
    """
    vocab_size = logits.shape[1]
    logits, weights = logits.index_select(0, index), weights.index_select(0, index)
    top_k, top_p = rows.top_k[index], rows.top_p[index]
    ordered, ids = logits.topk(num_likeliest, dim=-1)
    has_top_k = top_k < vocab_size
    last = top_k.clamp(max=num_likeliest)[:, None] - 1
    kth = torch.where(has_top_k, ordered.gather(1, last)[:, 0], -torch.inf)
    # Tokens below the k-th have weight 0; ties with it do not.
    total = weights.masked_fill(logits < kth[:, None], 0.0).cumsum(dim=-1)[:, -1]
    mass = weights.gather(1, ids).masked_fill_(ordered < kth[:, None], 0.0).cumsum(dim=-1)
    # The first token whose cumulative probability reaches top_p is the last that is kept.
    reached = mass >= (top_p * total)[:, None]
    reaches = reached.any(dim=-1)
    first = reached.long().argmax(dim=-1, keepdim=True)
    nucleus = torch.where(reaches, ordered.gather(1, first)[:, 0], -torch.inf)
    nucleus = torch.where(top_p < 1, nucleus, -torch.inf)
    return torch.maximum(kth, nucleus), reaches | (num_likeliest == vocab_size)


def _index(places: Sequence[int], cuda: Cuda | None) -> Tensor:
    return to_device(torch.tensor(places), cuda)
