"""Log-probabilities in the two formats of OpenAI's, and those of prompts in vLLM's."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from pagedserve.output.detokenizer import Detokenizer
from pagedserve.outputs import Logprob

# JSON has no infinity.
_LEAST: Final = -9999.0

Entry = dict[int, Logprob] | None


def finite(logprob: float) -> float:
    """A log-probability that JSON can say."""
    return logprob if math.isfinite(logprob) else _LEAST


@dataclass(frozen=True, slots=True)
class TokenNames:
    """How tokens are written.

    Attributes:
        detokenizer: Knows their texts and bytes.
        as_ids: As ``token_id:7`` instead of their texts, which several may share.
    """

    detokenizer: Detokenizer
    as_ids: bool

    def __call__(self, token_id: int) -> str:
        """The name of a token."""
        return f"token_id:{token_id}" if self.as_ids else self.detokenizer.token_text(token_id)

    def bytes_of(self, token_id: int) -> list[int]:
        """The bytes of a token, which may be a part of a character."""
        return list(self.detokenizer.token_bytes(token_id))


@dataclass(slots=True)
class CompletionLogprobs:
    """The ``logprobs`` of a completion's choice, over all its chunks.

    Attributes:
        names: How tokens are written.
        num_top: The likeliest tokens of each position that are shown; -1 is all.
        offset: Characters shown before the next token.
    """

    names: TokenNames
    num_top: int
    offset: int = 0

    def shown(self, token_ids: Sequence[int], entries: Sequence[Entry]) -> dict[str, Any]:
        """The object for the next tokens; of a first token of a prompt nothing is known."""
        offsets: list[int] = []
        values: list[float | None] = []
        tops: list[dict[str, float] | None] = []
        for token_id, entry in zip(token_ids, entries, strict=True):
            offsets.append(self.offset)
            self.offset += len(self.names.detokenizer.token_text(token_id))
            if entry is None:
                values.append(None)
                tops.append(None)
                continue
            values.append(finite(entry[token_id].logprob))
            # The chosen token is there too, where it is not among the likeliest.
            tops.append(
                {
                    self.names(token): finite(known.logprob)
                    for token, known in entry.items()
                    if self.num_top < 0 or known.rank <= self.num_top or token == token_id
                }
            )
        return {
            "tokens": [self.names(token_id) for token_id in token_ids],
            "token_logprobs": values,
            "top_logprobs": tops,
            "text_offset": offsets,
        }


def chat_logprobs(
    names: TokenNames, num_top: int, token_ids: Sequence[int], entries: Sequence[Entry]
) -> dict[str, Any]:
    """The ``logprobs`` of a chat choice, for some of its tokens; ``num_top`` -1 is all."""

    def described(token_id: int, logprob: float) -> dict[str, Any]:
        return {
            "token": names(token_id),
            "logprob": finite(logprob),
            "bytes": names.bytes_of(token_id),
        }

    content = []
    for token_id, entry in zip(token_ids, entries, strict=True):
        known = entry or {}
        top = [
            described(token, logprob.logprob)
            for token, logprob in known.items()
            if num_top < 0 or logprob.rank <= num_top
        ]
        chosen = known[token_id].logprob if token_id in known else _LEAST
        content.append({**described(token_id, chosen), "top_logprobs": top})
    return {"content": content}


def prompt_logprobs(entries: Sequence[Entry]) -> list[dict[str, Any] | None]:
    """The ``prompt_logprobs`` of a choice, as vLLM has them."""
    return [
        None
        if entry is None
        else {
            str(token_id): {
                "logprob": finite(known.logprob),
                "rank": known.rank,
                "decoded_token": known.decoded_token,
            }
            for token_id, known in entry.items()
        }
        for entry in entries
    ]
