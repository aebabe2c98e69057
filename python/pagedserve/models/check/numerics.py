"""Numerics checks of a model on a few tokens over paged KV, against its original attention.

The reference is computed with the model as transformers built it, and the check can be repeated
after modules of the model have been replaced.

In half precision a model's original logits are no reference: their rounding errors are as large as
ours.  There both are compared with float32 arithmetic on the same weights, and our error may be
`_ROUNDING_FACTOR` times the model's.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from pagedserve.attention.backend import AttentionBackend
from pagedserve.cache.layers import LayerShape
from pagedserve.cache.states import LayerStates
from pagedserve.errors import UnsupportedModelError
from pagedserve.models.attention_function import ATTENTION_NAME
from pagedserve.models.check.paged_logits import flat_logits, paged_logits
from pagedserve.models.families.towers import attending_part
from pagedserve.models.load.files import architecture_of
from pagedserve.models.load.quantized import is_quantized, nudged
from pagedserve.models.mixers import mixing_modules
from pagedserve.parallel.modules import VocabEmbedding

Measure: TypeAlias = Callable[[Tensor, Tensor], float]

# Maximum difference of the logits, as a fraction of the largest logit.
TOLERANCE: Final = {torch.float32: 5e-5, torch.float16: 1e-2, torch.bfloat16: 5e-2}
# Error of our logits relative to that of the model's, both against float32 arithmetic as root mean
# squares; the minimum and maximum that is accepted, as fractions.  Equally good arithmetic differs
# by up to 1.7 (SmolLM2, with torch's two attention functions).
_ROUNDING_FACTOR: Final = 2.0
_LEAST_ROUNDING: Final = {torch.float16: 2e-3, torch.bfloat16: 1e-2}
_MOST_ROUNDING: Final = 0.25
# If weights are quantized, a model's original logits depend on the batch.  Our difference may be
# this
# multiple of theirs, up to this maximum.
_NOISE_FACTOR: Final = 4
_MOST_NOISE: Final = 0.1
# Assumed change of a layer's input by rounding of sums, as a fraction.
_NUDGES: Final = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
# Lowered to this, a check has several windows and chunks; blocks may not be larger.
_LOWERED_THRESHOLD: Final = 8
# Names of thresholds in modules and configs.
_THRESHOLDS: Final = (
    "sliding_window",
    "sliding_window_size",
    "attention_chunk_size",
    "floor_scale",
    "index_topk",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class NumericsCheck:
    """Two sequences of several blocks: one is computed in two chunks, one decodes a token.

    Attributes:
        layers: KV shape of each attention call.
        states: shapes of recurrent states.
        prompts: token ids of the sequences.
        rows: positions of each prompt whose logits are compared, unordered and incomplete, so that
            a model that mixes them up is detected.
        expected: their logits float32 ``[rows, V]`` with the model's original attention.
        is_exact: whether ``expected`` was computed in float32 though the model is not.
        bound: accepted difference, as `rms_difference` of exact logits and `difference` of others.
        dtype: dtype of keys and values.
        backend: attention backend.
        selects_logits: see `pagedserve.models.forward.flat_batch_logits`.
        is_lowered: whether the model's thresholds are lowered (`lowered_thresholds`).
    """

    layers: tuple[LayerShape, ...]
    states: LayerStates
    prompts: list[Tensor]
    rows: list[Tensor]
    expected: list[Tensor]
    is_exact: bool
    bound: float
    dtype: torch.dtype
    backend: AttentionBackend
    selects_logits: bool
    is_lowered: bool = False

    @property
    def measure(self) -> Measure:
        """The measure of differences from ``expected``."""
        return rms_difference if self.is_exact else difference

    def run(self, model: PreTrainedModel, bound: float | None = None) -> None:
        """Compare the logits over paged KV.

        Args:
            model: model with our attention.
            bound: accepted difference; None is ``self.bound``.

        Raises:
            UnsupportedModelError: they differ by more than the bound.
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
        if self.is_exact:
            differ += " in float32 arithmetic"
        compare(model, found, self.expected, bound, differ, measure=self.measure)

    def own_logits(self, model: PreTrainedModel) -> list[Tensor]:
        """Logits of a model with its original attention, computed as ``expected``."""
        lowered = lowered_thresholds(model, self.backend) if self.is_lowered else nullcontext()
        with lowered:
            return _own_logits(
                model,
                self.prompts,
                self.rows,
                selects_logits=self.selects_logits,
                in_float32=self.is_exact,
            )

    def compare_with(
        self, other: PreTrainedModel, differ: str, expected: Sequence[Tensor] | None = None
    ) -> None:
        """Compare the reference with another model's original attention.

        Args:
            other: model with the same weights.
            differ: start of the error's message, before the figures.
            expected: its ``own_logits``; None is the reference.

        Raises:
            UnsupportedModelError: they differ by more than ``self.bound``.
        """
        bound = TOLERANCE[torch.float32] if self.is_exact else self.bound
        ours = (logits.cpu() for logits in expected or self.expected)
        compare(other, ours, self.own_logits(other), bound, differ)


def _own_logits(
    model: PreTrainedModel,
    prompts: list[Tensor],
    rows: list[Tensor],
    *,
    selects_logits: bool,
    in_float32: bool = False,
) -> list[Tensor]:
    """Logits of a model with its original attention."""
    arithmetic = computing_in_float32(model) if in_float32 else nullcontext()
    with using_attention(model, "eager"), arithmetic:
        return [
            flat_logits(model, prompt.to(model.device), index=row, selects_logits=selects_logits)
            for prompt, row in zip(prompts, rows, strict=True)
        ]


def make_check(
    model: PreTrainedModel,
    layers: tuple[LayerShape, ...],
    max_len: int,
    *,
    states: LayerStates,
    backend: AttentionBackend,
    dtype: torch.dtype,
    selects_logits: bool,
    is_lowered: bool = False,
) -> NumericsCheck:
    """Compute the reference logits with a model's original attention.

    Args:
        model: as transformers built it.
        layers: KV shapes of its attention calls.
        max_len: maximum tokens of a sequence.
        states: see `NumericsCheck`.
        backend: attention backend.
        dtype: dtype of the computation.
        selects_logits: see `NumericsCheck`.
        is_lowered: see `NumericsCheck`; the caller lowers the thresholds.
    """
    block_size = backend.min_block_size
    lengths = [min(4 * block_size - 2, max_len), min(2 * block_size - 2, max_len)]
    prompts = [prompt_of(model, length) for length in lengths]
    rows = [torch.tensor(sorted({*range(0, length, 3), length - 1})[::-1]) for length in lengths]
    own_logits = partial(_own_logits, model, prompts, rows, selects_logits=selects_logits)
    own = expected = own_logits()
    is_exact = _rounds_coarsely(model, dtype)
    if is_exact:
        expected = own_logits(in_float32=True)
        bound = _rounding_bound(own, expected, dtype)
    else:
        noise = _noise(model, prompts, own, rows, dtype) if is_quantized(model) else 0.0
        bound = max(TOLERANCE[dtype], min(_NOISE_FACTOR * noise, _MOST_NOISE))
    return NumericsCheck(
        layers=layers,
        states=states,
        prompts=prompts,
        rows=rows,
        expected=expected,
        is_exact=is_exact,
        bound=bound,
        dtype=dtype,
        backend=backend,
        selects_logits=selects_logits,
        is_lowered=is_lowered,
    )


def _rounds_coarsely(model: PreTrainedModel, dtype: torch.dtype) -> bool:
    """Whether a model computes in half precision with weights that support float32 arithmetic."""
    return dtype != torch.float32 and not is_quantized(model)


def _rounding_bound(own: list[Tensor], exact: list[Tensor], dtype: torch.dtype) -> float:
    """Accepted rms error of ours, given that of a model's original logits."""
    error = max(map(rms_difference, own, exact))
    return min(max(_ROUNDING_FACTOR * error, _LEAST_ROUNDING[dtype]), _MOST_ROUNDING)


def compare(
    model: PreTrainedModel,
    found: Iterable[Tensor],
    expected: Iterable[Tensor],
    bound: float,
    differ: str,
    *,
    measure: Measure | None = None,
) -> None:
    """Compare tensors with those of a model's original attention, pair by pair.

    Args:
        model: model that computed both.
        found: tensors with our attention.
        expected: tensors in the same order.
        bound: maximum accepted difference.
        differ: start of the error's message, before the figures.
        measure: measure of differences; None is `difference`.

    Raises:
        UnsupportedModelError: some differ by more.
    """
    measure = measure or difference
    for ours, theirs in zip(found, expected, strict=True):
        error = measure(ours.float(), theirs.float())
        if not error <= bound:
            shares = "of the largest" if measure is difference else "as root mean squares"
            raise UnsupportedModelError(
                f"architecture {architecture_of(model.config)} cannot be run: {differ} by "
                f"{error:.1e} {shares} (accepted: {bound:.0e})"
            )


def difference(found: Tensor, expected: Tensor) -> float:
    """Largest difference of logits, as a fraction of the largest logit."""
    return float((found - expected).abs().max() / expected.abs().max())


def rms_difference(found: Tensor, expected: Tensor) -> float:
    """Root mean square of the difference of logits, as a fraction of that of the logits."""
    return float((found - expected).square().mean().sqrt() / expected.square().mean().sqrt())


def prompt_of(model: PreTrainedModel, num_tokens: int) -> Tensor:
    """Token ids [num_tokens] spread over the vocabulary, except padding, which has no position."""
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
    """A context in which the model uses another attention function, except its vision encoder."""
    part = attending_part(model)
    part.set_attn_implementation(name)
    try:
        yield
    finally:
        part.set_attn_implementation(ATTENTION_NAME)


@torch.inference_mode()
def _noise(
    model: PreTrainedModel,
    prompts: list[Tensor],
    own: list[Tensor],
    rows: list[Tensor],
    dtype: torch.dtype,
) -> float:
    """Largest change of a quantized model's original logits by irrelevant changes of the input.

    These are the other rows of a batch, their number, and rounding of the embeddings.

    Args:
        model: model with its original attention.
        prompts: the second is the shorter.
        own: logits ``[rows, V]`` of each prompt alone.
        rows: positions of ``own``, the last of which is 0.
        dtype: dtype of the computation.
    """
    length = len(prompts[1])
    pair = torch.stack((prompts[0][:length], prompts[1]))
    with using_attention(model, "eager"):
        beside = model(input_ids=pair, use_cache=False).logits[1, rows[1].to(model.device)].float()
        alone = model(input_ids=pair[1:, :1], use_cache=False).logits[0, -1].float()
        with nudged(model, _NUDGES[dtype]):
            moved = model(input_ids=prompts[0][None], use_cache=False).logits[0].float()
    moved = moved[rows[0].to(model.device)]
    pairs = ((beside, own[1]), (alone, own[1][-1]), (moved, own[0]))
    return max(difference(ours, theirs) for ours, theirs in pairs)


@contextmanager
def lowered_thresholds(model: PreTrainedModel, backend: AttentionBackend) -> Iterator[bool]:
    """A context in which the model's length thresholds are lowered; yields whether it has any.

    A sliding window of 4,096 tokens, a chunk, a temperature that starts at 8,192: a check of a few
    dozen tokens would never reach them.  With the number lowered, the same code of the model and
    the same weights compute all of it.
    """
    lowered = max(_LOWERED_THRESHOLD, backend.min_block_size)
    places = [
        (holder, name)
        for holder, names in _holders(model)
        for name in names
        if type(holder.get(name)) is int and holder[name] > lowered
    ]
    values = [holder[name] for holder, name in places]
    for holder, name in places:
        holder[name] = lowered
    try:
        yield bool(places)
    finally:
        for (holder, name), value in zip(places, values, strict=True):
            holder[name] = value


def _holders(model: PreTrainedModel) -> Iterator[tuple[dict[str, Any], tuple[str, ...]]]:
    """Attributes of modules and configs, each once, and the names to look for among them."""
    configs: list[Any] = [model.config, model.config.get_text_config()]
    configs += [module.config for module in model.modules() if hasattr(module, "config")]
    for config in {id(config): config for config in configs}.values():
        yield vars(config), _THRESHOLDS
        rope = getattr(config, "rope_parameters", None) or {}
        if "llama_4_scaling_beta" in rope:  # a temperature from there on
            yield rope, ("original_max_position_embeddings",)
    for module in model.modules():
        yield vars(module), _THRESHOLDS


@contextmanager
def computing_in_float32(model: nn.Module) -> Iterator[None]:
    """A context in which every module's weights are float32 while it computes.

    Half precision hides errors that a check must find: its rounding errors are larger than that of
    a lost state.  This takes the memory of one module instead of a second model, unless the model
    has mixers.
    """
    handles = []
    # Models with mixers read weights, and their dtypes, of modules that they do not call.
    is_one = bool(mixing_modules(model))
    for module in [model] if is_one else model.modules():
        narrow = [
            parameter
            for parameter in module.parameters(recurse=is_one)
            if parameter.is_floating_point() and parameter.dtype != torch.float32
        ]
        if narrow:
            stack: list[list[Tensor]] = []  # a module may be called recursively
            handles += [
                module.register_forward_pre_hook(partial(_widen, narrow, stack)),
                module.register_forward_hook(partial(_restore, narrow, stack), always_call=True),
            ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _widen(parameters: list[nn.Parameter], stack: list[list[Tensor]], *_: Any) -> None:
    stack.append([parameter.data for parameter in parameters])
    for parameter in parameters:
        parameter.data = parameter.data.float()


def _restore(parameters: list[nn.Parameter], stack: list[list[Tensor]], *_: Any) -> None:
    for parameter, data in zip(parameters, stack.pop(), strict=True):
        parameter.data = data
