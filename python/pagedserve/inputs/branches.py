"""Prompts with branches: continuations of one prompt, after each of which labels are read.

The sequences of such a request share the blocks of the prompt, which is computed once, and run in
one step.  Nothing is generated: each branch gets the log-probabilities of its labels.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NotRequired, SupportsIndex, TypedDict

from pagedserve.errors import RequestError
from pagedserve.sampling_params import SamplingParams

# The only sampling parameters of a prompt with branches: the most likely token, once.
READ_PARAMS: Final = SamplingParams(temperature=0, max_tokens=1, detokenize=False)


class Branch(TypedDict):
    """A continuation of a prompt.

    Attributes:
        prompt_token_ids: Token ids after those of the prompt.
        label_token_ids: Token ids of the labels, whose log-probabilities as the next token are
            returned.
    """

    prompt_token_ids: Sequence[SupportsIndex]
    label_token_ids: Sequence[SupportsIndex]


class BranchedPrompt(TypedDict):
    """A prompt with branches, each of them a sequence of the request.

    Attributes:
        prompt_token_ids: Token ids that all branches begin with.
        branches: At least one branch.
        cache_salt: As in ``TextPrompt``.
    """

    prompt_token_ids: Sequence[SupportsIndex]
    branches: Sequence[Branch]
    cache_salt: NotRequired[str]


@dataclass(frozen=True, slots=True)
class ParsedBranch:
    """A branch of a prompt, after its form was checked.

    Attributes:
        token_ids: Token ids after those of the prompt.
        label_token_ids: Token ids of its labels, at least one.
    """

    token_ids: list[int]
    label_token_ids: list[int]


def check_read_params(params: SamplingParams, name: str) -> None:
    """Refuse sampling parameters other than those of a prompt with branches.

    Args:
        params: Sampling parameters of the request.
        name: Name of the prompt in errors.

    Raises:
        RequestError: They differ from ``READ_PARAMS``.
    """
    if params != READ_PARAMS:
        raise RequestError(
            f"{name} has branches, after which one token is read: the sampling parameters must be "
            "those of temperature=0, max_tokens=1, detokenize=False"
        )
