"""Outputs of pooling requests."""

from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from pagedserve.errors import RequestError
from pagedserve.outputs import (
    ClassificationOutput,
    ClassificationRequestOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    PoolingOutput,
    PoolingRequestOutput,
    RequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
)
from pagedserve.pooling.rules import Activation, PoolingRules
from pagedserve.pooling_params import PoolingParams

Made = TypeVar("Made")

# Minimum norm, as in torch.
_LEAST_LENGTH = 1e-12


def pooling_output(
    output: RequestOutput, rules: PoolingRules | None, params: PoolingParams
) -> PoolingRequestOutput:
    """Build the output: an embedding, normalized if requested, or class probabilities.

    Raises:
        RequestError: The request ended before it was pooled.
    """
    vector = output.pooled
    if vector is None or rules is None:
        raise RequestError(f"request {output.request_id} ended: {output.outputs[0].stop_reason}")
    return PoolingRequestOutput(
        request_id=output.request_id,
        outputs=PoolingOutput(finished_vector(vector, rules, params)),
        prompt_token_ids=output.prompt_token_ids,
        num_cached_tokens=output.num_cached_tokens or 0,
    )


def finished_vector(
    vector: NDArray[np.float32], rules: PoolingRules, params: PoolingParams
) -> NDArray[np.float64]:
    """Convert a model's vector for the caller; see ``pooling_output``."""
    exact = vector[: params.dimensions].astype(np.float64)
    if rules.classes is not None:
        is_wanted = params.use_activation is not False
        return _activated(exact, rules.classes.activation) if is_wanted else exact
    is_normalized = rules.normalize if params.use_activation is None else params.use_activation
    if is_normalized:
        exact /= max(float(np.linalg.norm(exact)), _LEAST_LENGTH)
    return exact


def _activated(logits: NDArray[np.float64], activation: Activation) -> NDArray[np.float64]:
    if activation == "identity":
        return logits
    if activation == "softmax":
        powers = np.exp(logits - logits.max())
        return np.asarray(powers / powers.sum())
    powers = np.exp(-np.abs(logits))  # negative exponents cannot overflow
    return np.asarray(np.where(logits < 0, powers, 1.0) / (1.0 + powers))


def embedding_output(pooled: PoolingRequestOutput) -> EmbeddingRequestOutput:
    """Convert a vector to an embedding output."""
    return _made_of(pooled, EmbeddingRequestOutput, EmbeddingOutput(pooled.outputs.data.tolist()))


def classification_output(pooled: PoolingRequestOutput) -> ClassificationRequestOutput:
    """Convert a vector to a classification output."""
    probs = ClassificationOutput(pooled.outputs.data.tolist())
    return _made_of(pooled, ClassificationRequestOutput, probs)


def pair_output(pooled: PoolingRequestOutput) -> ScoringRequestOutput:
    """Convert a vector to the score of a pair."""
    return _made_of(pooled, ScoringRequestOutput, ScoringOutput(float(pooled.outputs.data[0])))


def _made_of(pooled: PoolingRequestOutput, kind: Callable[..., Made], outputs: object) -> Made:
    return kind(
        request_id=pooled.request_id,
        outputs=outputs,
        prompt_token_ids=pooled.prompt_token_ids,
        num_cached_tokens=pooled.num_cached_tokens,
    )


def cosine(left: NDArray[np.float64], right: NDArray[np.float64]) -> float:
    """Cosine of the angle between two vectors."""
    lengths = max(float(np.linalg.norm(left) * np.linalg.norm(right)), _LEAST_LENGTH)
    return float(left @ right) / lengths


def scoring_output(
    first: PoolingRequestOutput, second: PoolingRequestOutput
) -> ScoringRequestOutput:
    """Score two embeddings by the cosine of the angle between them."""
    return ScoringRequestOutput(
        request_id=f"{first.request_id}_{second.request_id}",
        outputs=ScoringOutput(cosine(first.outputs.data, second.outputs.data)),
        prompt_token_ids=[*first.prompt_token_ids, *second.prompt_token_ids],
        num_cached_tokens=first.num_cached_tokens + second.num_cached_tokens,
    )


def _texts(name: str, given: object) -> list[str]:
    texts = [given] if isinstance(given, str) else given
    if not isinstance(texts, Sequence) or not all(isinstance(text, str) for text in texts):
        raise RequestError(
            f"{name} and the others must each be a string or a list of strings; got {given!r:.60}",
            param=name,
        )
    return [str(text) for text in texts]


def match_pairs(
    name: str, first: str | Sequence[str], second: str | Sequence[str]
) -> list[tuple[str, str]]:
    """Pair texts: one first text with each of the second, or as many as those.

    Args:
        name: Name of the first texts in errors.
        first: One text or several.
        second: One text or several.

    Raises:
        RequestError: The numbers of texts do not match, or they are no strings.
    """
    firsts, seconds = (_texts(name, texts) for texts in (first, second))
    if not seconds or len(firsts) not in (1, len(seconds)):
        raise RequestError(
            f"{name} has {len(firsts)} texts and there are {len(seconds)} others; give at least "
            "one of each, and one for all of the others or as many",
            param=name,
        )
    return list(zip(firsts * (len(seconds) // len(firsts)), seconds, strict=True))
