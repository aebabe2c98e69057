"""Conversations in ShareGPT's format: prompts and output lengths of benchmarks."""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np

from pagedserve.bench.files import read_records
from pagedserve.errors import RequestError

# Conversations outside these bounds are left out, as vLLM does.
_MIN_LEN = 4
_MAX_INPUT_LEN = 1024
_MAX_TOTAL_LEN = 2048

Token = TypeVar("Token")


@dataclass(frozen=True, slots=True)
class Conversation(Generic[Token]):
    """A prompt, and how much is generated from it.

    Attributes:
        prompt: Text of the first turn.
        tokens: Its tokens.
        num_output_tokens: Tokens of the second turn, or the length that was given.
    """

    prompt: str
    tokens: Sequence[Token]
    num_output_tokens: int


def sample_conversations(
    path: Path,
    num_requests: int,
    *,
    encode: Callable[[str], Sequence[Token]],
    output_len: int | None,
    rng: np.random.Generator,
) -> Iterator[Conversation[Token]]:
    """Yield the first turns of conversations, in random order.

    Args:
        path: File of the conversations.
        num_requests: Maximum number of conversations.
        encode: Returns the tokens of a text.
        output_len: Tokens per output; None takes those of the second turn.
        rng: Random number generator.

    Raises:
        RequestError: The file is invalid.
    """
    conversations = [turns for record in _records(path) if (turns := _first_turns(record))]
    num_found = 0
    for index in rng.permutation(len(conversations)).tolist():
        if num_found == num_requests:
            return
        question, answer = conversations[index]
        tokens = encode(question)
        num_output = output_len or len(encode(answer))
        is_short = output_len is None and num_output < _MIN_LEN
        is_long = len(tokens) > _MAX_INPUT_LEN or len(tokens) + num_output > _MAX_TOTAL_LEN
        if len(tokens) >= _MIN_LEN and not (is_short or is_long):
            num_found += 1
            yield Conversation(question, tokens, num_output)
    if not num_found:
        raise RequestError(
            f"--dataset-path {path} has no conversation of {_MIN_LEN} tokens or more"
        )


def _records(path: Path) -> Sequence[Any]:
    """Records of JSON lines, or of a list in a file that ends in .json, as ShareGPT's is."""
    if path.suffix != ".json":
        return list(read_records(path))
    try:
        found = json.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise RequestError(f"cannot read --dataset-path {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise RequestError(f"--dataset-path {path} is no JSON: {error}") from error
    if not isinstance(found, list):
        raise RequestError(f"--dataset-path {path} is no list of conversations")
    return found


def _first_turns(record: Any) -> tuple[str, str] | None:
    """Texts of the first two turns of a conversation; None if it has fewer."""
    turns = record.get("conversations") if isinstance(record, dict) else None
    first = turns[:2] if isinstance(turns, list) else []
    texts = [turn.get("value") for turn in first if isinstance(turn, dict)]
    match texts:
        case [str(question), str(answer)]:
            return question, answer
    return None
