"""Runs of a model on a few tokens over paged KV, held to the logits of its own attention.

A trial is made with the model as transformers built it, and can be asked again of the same model
when modules of it have been replaced.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor
from transformers import PreTrainedModel

from pagedserve.attention.backends import min_block_size
from pagedserve.attention.interface import ATTENTION_NAME
from pagedserve.cache.engine import LayerShape
from pagedserve.cache.states import LayerStates
from pagedserve.config import AttentionBackend
from pagedserve.errors import UnsupportedModelError
from pagedserve.models.files import architecture_of
from pagedserve.models.paged_logits import flat_logits, paged_logits
from pagedserve.models.quantized import is_quantized, nudged
from pagedserve.models.thresholds import lowered_thresholds
from pagedserve.models.towers import attending_part
from pagedserve.parallel.modules import VocabEmbedding

# Largest difference of the logits, as a share of the largest logit.
TOLERANCE: Final = {torch.float32: 5e-5, torch.float16: 1e-2, torch.bfloat16: 5e-2}
# Where roundings are coarse, by dtype or by quantized weights, a model's own logits move with what
# is beside a row.  Ours may move by so many times as much, and by no more than this in all.
_NOISE_FACTOR: Final = 4
_MOST_NOISE: Final = 0.1
# What roundings of sums are taken to move the input of a layer by, as a share.
_NUDGES: Final = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """Two sequences of several blocks: one comes in two chunks, one decodes a token.

    Attributes:
        layers: what each attention call stores.
        states: what layers keep beside it.
        prompts: token ids of the sequences.
        rows: positions of each prompt whose logits are compared, not in order and not all, so that
            a model that mixes them up is found out.
        expected: their logits float32 ``[rows, V]`` with the model's own attention.
        bound: largest difference, as a share of the largest logit.
        dtype: of keys and values.
        backend: computes attention.
        selects_logits: see `pagedserve.models.flat_batch.flat_batch_logits`.
        is_lowered: whether the model's thresholds are lowered (`pagedserve.models.thresholds`).
    """

    layers: tuple[LayerShape, ...]
    states: LayerStates
    prompts: list[Tensor]
    rows: list[Tensor]
    expected: list[Tensor]
    bound: float
    dtype: torch.dtype
    backend: AttentionBackend
    selects_logits: bool
    is_lowered: bool = False

    def check(self, model: PreTrainedModel, bound: float | None = None) -> None:
        """Compare the logits over paged KV.

        Args:
            model: answers with our attention.
            bound: None takes the trial's own.

        Raises:
            UnsupportedModelError: if they differ by more than the bound.
        """
        bound = self.bound if bound is None else bound
        first = [max(1, len(self.prompts[0]) - 3), max(1, len(self.prompts[1]) - 1)]
        lowered = lowered_thresholds(model, self.backend) if self.is_lowered else nullcontext()
        with lowered:
            found = paged_logits(
                model,
                self.layers,
                self.prompts,
                first,
                self.backend,
                rows=self.rows,
                dtype=self.dtype,
                selects_logits=self.selects_logits,
                states=self.states,
            )
        differ = "over paged attention its logits differ from its own"
        compare(model, found, self.expected, bound, differ)

    def compare_with(self, other: PreTrainedModel, differ: str) -> None:
        """Hold what the model's own attention gave to what another's gives.

        Args:
            other: of the same weights.
            differ: what a refusal says, before the figures.

        Raises:
            UnsupportedModelError: if they differ by more than the trial's bound.
        """
        lowered = lowered_thresholds(other, self.backend) if self.is_lowered else nullcontext()
        with lowered:
            wanted = _own_logits(other, self.prompts, self.rows, selects_logits=self.selects_logits)
        compare(other, (logits.cpu() for logits in self.expected), wanted, self.bound, differ)


def _own_logits(
    model: PreTrainedModel, prompts: list[Tensor], rows: list[Tensor], *, selects_logits: bool
) -> list[Tensor]:
    """What a model gives with its own attention."""
    with using_attention(model, "eager"):
        return [
            flat_logits(model, prompt.to(model.device), index=row, selects_logits=selects_logits)
            for prompt, row in zip(prompts, rows, strict=True)
        ]


def make_trial(
    model: PreTrainedModel,
    layers: tuple[LayerShape, ...],
    max_len: int,
    *,
    states: LayerStates,
    backend: AttentionBackend,
    dtype: torch.dtype,
    selects_logits: bool,
    is_lowered: bool = False,
) -> Trial:
    """Ask a model for the logits of its own attention.

    Args:
        model: as transformers built it.
        layers: what its attention calls store.
        max_len: most tokens of a sequence.
        states: see `Trial`.
        backend: computes attention.
        dtype: that the model computes in.
        selects_logits: see `Trial`.
        is_lowered: see `Trial`; the caller lowers them.
    """
    block_size = min_block_size(backend)
    lengths = [min(4 * block_size - 2, max_len), min(2 * block_size - 2, max_len)]
    prompts = [prompt_of(model, length) for length in lengths]
    rows = [torch.tensor(sorted({*range(0, length, 3), length - 1})[::-1]) for length in lengths]
    expected = _own_logits(model, prompts, rows, selects_logits=selects_logits)
    with using_attention(model, "eager"):
        noise = _noise(model, prompts, expected[1], rows[1]) if _is_coarse(model, dtype) else 0.0
        if is_quantized(model):
            with nudged(model, _NUDGES[dtype]):
                moved = flat_logits(model, prompts[0], index=rows[0], selects_logits=selects_logits)
            noise = max(noise, difference(moved, expected[0]))
    return Trial(
        layers=layers,
        states=states,
        prompts=prompts,
        rows=rows,
        expected=expected,
        bound=max(TOLERANCE[dtype], min(_NOISE_FACTOR * noise, _MOST_NOISE)),
        dtype=dtype,
        backend=backend,
        selects_logits=selects_logits,
        is_lowered=is_lowered,
    )


def compare(
    model: PreTrainedModel,
    found: Iterable[Tensor],
    expected: Iterable[Tensor],
    bound: float,
    differ: str,
) -> None:
    """Hold tensors to those of a model's own attention, each to the one in its place.

    Args:
        model: made both.
        found: by our attention.
        expected: in the same order.
        bound: largest difference, as a share of the largest element.
        differ: what a refusal says, before the figures.

    Raises:
        UnsupportedModelError: if some differ by more.
    """
    for ours, theirs in zip(found, expected, strict=True):
        error = difference(ours.float(), theirs.float())
        if not error <= bound:
            raise UnsupportedModelError(
                f"architecture {architecture_of(model.config)} cannot be run: {differ} by "
                f"{error:.1e} of the largest (accepted: {bound:.0e})"
            )


def difference(found: Tensor, expected: Tensor) -> float:
    """The largest difference of logits, as a share of the largest logit."""
    return float((found - expected).abs().max() / expected.abs().max())


def prompt_of(model: PreTrainedModel, num_tokens: int) -> Tensor:
    """Token ids [num_tokens] spread over the vocabulary, but no padding: it has no position."""
    size, padding = vocab_size(model), getattr(model.config, "pad_token_id", None)
    tokens = (torch.arange(num_tokens) * 7919 + 11) % size
    if padding is not None:
        tokens[tokens == padding] = (padding + 1) % size
    return tokens.to(model.device)


def vocab_size(model: PreTrainedModel) -> int:
    """Rows of the embedding: token ids are below it."""
    embedding: Any = model.get_input_embeddings()
    if isinstance(embedding, VocabEmbedding):
        return embedding.num_embeddings
    return int(embedding.weight.shape[0])


@contextmanager
def using_attention(model: PreTrainedModel, name: str) -> Iterator[None]:
    """The model with another attention function for a while, but for its tower of images."""
    part = attending_part(model)
    part.set_attn_implementation(name)
    try:
        yield
    finally:
        part.set_attn_implementation(ATTENTION_NAME)


def _is_coarse(model: PreTrainedModel, dtype: torch.dtype) -> bool:
    """Whether roundings of a model's own show in its logits."""
    return dtype != torch.float32 or is_quantized(model)


@torch.inference_mode()
def _noise(model: PreTrainedModel, prompts: list[Tensor], expected: Tensor, rows: Tensor) -> float:
    """How far a model's own logits move with what is beside a row, and with the rows of a call.

    Args:
        model: with its own attention.
        prompts: the second is the shorter.
        expected: logits ``[rows, V]`` of the second prompt alone.
        rows: positions of ``expected``, the last of them is 0.
    """
    length = len(prompts[1])
    pair = torch.stack((prompts[0][:length], prompts[1]))
    beside = model(input_ids=pair, use_cache=False).logits[1, rows.to(model.device)].float()
    alone = model(input_ids=pair[1:, :1], use_cache=False).logits[0, -1].float()
    return max(difference(beside, expected), difference(alone, expected[-1]))
