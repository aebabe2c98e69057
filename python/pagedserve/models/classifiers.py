"""Classification models: their heads, and how they run on given hidden states.

The head of an encoder is run by the model's code, in which the encoder is replaced by a module that
returns given states.  A decoder's head is a linear layer over the last token's state, so it
replaces the LM head, and passes the check of all decoders there.
"""

from typing import Any, Final, cast

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.modeling_layers import GenericForSequenceClassification
from transformers.modeling_outputs import BaseModelOutputWithPooling

from pagedserve.attention.backend import AttentionBackend
from pagedserve.cache.layers import LayerShape
from pagedserve.errors import UnsupportedModelError
from pagedserve.models.check.numerics import TOLERANCE, compare, prompt_of, using_attention
from pagedserve.models.check.paged_logits import encoder_hidden_states
from pagedserve.models.check.probe import refusing_failures
from pagedserve.models.load.files import architecture_of
from pagedserve.pooling.pooler import pool_rows
from pagedserve.pooling.rules import PoolingType

# Tokens of the prompts of the check.
_LENGTHS: Final = (9, 23)


class EncoderHead(nn.Module):
    """From an encoder's pooled states to class logits, by the model's code.

    Attributes:
        encoder: Encoder below the head.
    """

    def __init__(self, model: PreTrainedModel, max_model_len: int) -> None:
        """Separate a model into encoder and head.

        Args:
            model: Whole model, with its original positions.
            max_model_len: Maximum tokens of a prompt.

        Raises:
            UnsupportedModelError: it cannot be run unchanged.
        """
        super().__init__()
        self._expected: dict[int, Tensor] = {}
        with refusing_failures(model), torch.inference_mode(), using_attention(model, "eager"):
            for length in (min(length, max_model_len) for length in _LENGTHS):
                logits = model(input_ids=prompt_of(model, length)[None]).logits
                self._expected[length] = logits[0].float()
        self.encoder = cast(PreTrainedModel, model.base_model)
        self._states = _GivenStates(getattr(self.encoder, "pooler", None))
        setattr(model, model.base_model_prefix, self._states)
        self._model = model

    @torch.inference_mode()
    def forward(self, pooled: Tensor) -> Tensor:
        """Logits, float32 ``[R, C]``, of ``[R, F]``."""
        states = self._states
        states.given = pooled[:, None].to(self._model.dtype)
        tokens = torch.zeros(len(pooled), 1, dtype=torch.long, device=pooled.device)
        try:
            return cast(Tensor, self._model(input_ids=tokens).logits).float()
        finally:
            states.given = None

    def check(
        self, layers: tuple[LayerShape, ...], backend: AttentionBackend, pooling_type: PoolingType
    ) -> None:
        """Check that encoder and head give the logits of the whole model, for a batch of prompts.

        Args:
            layers: Shapes that the encoder's attention calls use.
            backend: Attention backend.
            pooling_type: Input of the head.

        Raises:
            UnsupportedModelError: the logits differ.
        """
        with refusing_failures(self.encoder):
            prompts = [prompt_of(self.encoder, length) for length in self._expected]
            states = encoder_hidden_states(self.encoder, layers, prompts, backend)
            ends = np.cumsum([0, *self._expected]).astype(np.int32)
            pooled = pool_rows(torch.cat(states).float(), ends, pooling_type)
            found = self(torch.stack(pooled))
        expected = torch.stack(list(self._expected.values()))
        differ = "its logits of classes differ from its own"
        compare(self.encoder, [found], [expected], TOLERANCE[self.encoder.dtype], differ)


class _GivenStates(nn.Module):
    """Replaces an encoder: returns given states."""

    def __init__(self, pooler: nn.Module | None) -> None:
        super().__init__()
        self.pooler = pooler
        self.given: Tensor | None = None

    def forward(self, *_: object, **__: object) -> BaseModelOutputWithPooling:
        pooled = None if self.pooler is None else self.pooler(self.given)
        return BaseModelOutputWithPooling(
            last_hidden_state=cast(Any, self.given), pooler_output=pooled
        )


def with_class_head(model: PreTrainedModel) -> PreTrainedModel:
    """Convert a decoder for classification to a model with class logits for every token.

    Raises:
        UnsupportedModelError: its head is not known to be a linear layer over the last state.
    """
    if not isinstance(model, GenericForSequenceClassification):
        raise UnsupportedModelError(
            f"architecture {architecture_of(model.config)} cannot be run: its head is custom code; "
            "accepted are decoders whose classes are a linear layer over the last state"
        )
    with torch.device("meta"):
        whole: Any = AutoModelForCausalLM.from_config(
            model.config,
            dtype=model.dtype,
            attn_implementation=model.config._attn_implementation,  # noqa: SLF001  # as before
        )
    setattr(whole, whole.base_model_prefix, model.base_model)
    whole.set_output_embeddings(model.score)
    if any(parameter.is_meta for parameter in whole.parameters()):
        raise UnsupportedModelError(
            f"architecture {architecture_of(model.config)} cannot be run: more than a head stands "
            "beside its decoder"
        )
    return cast(PreTrainedModel, whole)
