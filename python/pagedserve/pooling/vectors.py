"""What a caller gets of a prompt that was pooled, and what comes before the prompt."""

from dataclasses import replace

import numpy as np

from pagedserve.errors import RequestError
from pagedserve.inputs import ParsedPrompt
from pagedserve.outputs import (
    EmbeddingOutput,
    EmbeddingRequestOutput,
    RequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
)
from pagedserve.pooling.rules import PoolingRules
from pagedserve.pooling_params import PoolingParams

# Of a vector of zeros, as torch has it.
_LEAST_LENGTH = 1e-12


def with_prompt(
    prompt: ParsedPrompt, rules: PoolingRules | None, prompt_name: str | None
) -> ParsedPrompt:
    """A text with the text of the model's own before it; token ids stay as they are.

    Raises:
        RequestError: The model has no text of that name.
    """
    known = {} if rules is None else rules.prompts
    name = prompt_name if rules is None or prompt_name else rules.default_prompt_name
    if name is not None and name not in known:
        raise RequestError(
            f"prompt_name is {name!r}; the model has {', '.join(known) or 'none'}",
            param="prompt_name",
        )
    if name is None or prompt.text is None or prompt.token_ids is not None:
        return prompt
    return replace(prompt, text=known[name] + prompt.text)


def embedding_output(
    output: RequestOutput, rules: PoolingRules | None, params: PoolingParams
) -> EmbeddingRequestOutput:
    """The first ``dimensions`` of what was pooled, of length 1 where that is wanted.

    Raises:
        RequestError: The request was ended before it was pooled, or has fewer dimensions.
    """
    vector = output.pooled
    if vector is None or rules is None:
        raise RequestError(f"request {output.request_id} ended: {output.outputs[0].stop_reason}")
    if params.dimensions is not None and params.dimensions > len(vector):
        raise RequestError(
            f"dimensions is {params.dimensions}; the model's vectors have {len(vector)}",
            param="dimensions",
        )
    vector = vector[: params.dimensions].astype(np.float64)
    is_normalized = rules.normalize if params.use_activation is None else params.use_activation
    if is_normalized:
        vector = vector / max(float(np.linalg.norm(vector)), _LEAST_LENGTH)
    return EmbeddingRequestOutput(
        request_id=output.request_id,
        outputs=EmbeddingOutput(vector.tolist()),
        prompt_token_ids=output.prompt_token_ids,
        num_cached_tokens=output.num_cached_tokens or 0,
    )


def scoring_output(
    first: EmbeddingRequestOutput, second: EmbeddingRequestOutput
) -> ScoringRequestOutput:
    """The cosine of the angle between two embeddings."""
    left, right = (np.array(embedded.outputs.embedding) for embedded in (first, second))
    lengths = max(float(np.linalg.norm(left) * np.linalg.norm(right)), _LEAST_LENGTH)
    return ScoringRequestOutput(
        request_id=f"{first.request_id}_{second.request_id}",
        outputs=ScoringOutput(float(left @ right) / lengths),
        prompt_token_ids=[*first.prompt_token_ids, *second.prompt_token_ids],
        num_cached_tokens=first.num_cached_tokens + second.num_cached_tokens,
    )
