"""Log-probabilities in the two formats of OpenAI's, and those of prompts in vLLM's."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from pagedserve.output.detokenizer import Detokenizer, TextStream
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
class TextOffsets:
    """Where the text of each token begins: what lies before the next one's is its own.

    Of a character that several tokens make the last has the text, and the others none.

    Attributes:
        stream: The text so far, forgotten as far as it is counted.
        num_chars: Characters before the next token.
    """

    stream: TextStream
    num_chars: int = 0

    def take(self, token_ids: Sequence[int]) -> list[int]:
        """The offsets of the next tokens."""
        offsets = []
        for token_id in token_ids:
            offsets.append(self.num_chars)
            self.stream = self.stream.advanced([token_id])
            num_new = len(self.stream.text)
            self.stream = self.stream.without(num_new)
            self.num_chars += num_new
        return offsets


def prompt_offsets(detokenizer: Detokenizer, token_ids: Sequence[int], text: str) -> list[int]:
    """Where in the text of a prompt each of its tokens begins.

    A token that the tokenizer has added to the text has no place in it.

    Args:
        detokenizer: One that shows special tokens: the text may name some.
        token_ids: Of the prompt.
        text: As it is shown.
    """
    start = max(0, detokenizer.decode(token_ids).find(text))
    offsets = TextOffsets(detokenizer.stream()).take(token_ids)
    return [min(max(0, offset - start), len(text)) for offset in offsets]


def completion_logprobs(
    names: TokenNames, num_top: int, token_ids: Sequence[int], entries: Sequence[Entry]
) -> dict[str, Any]:
    """The ``logprobs`` of a completion's choice but for ``text_offset``, for some of its tokens.

    Args:
        names: How tokens are written.
        num_top: The likeliest tokens of each position that are shown; -1 is all.
        token_ids: New tokens, or those of a prompt.
        entries: One a token; None for the first of a prompt, of which nothing is known.
    """
    values: list[float | None] = []
    tops: list[dict[str, float] | None] = []
    for token_id, entry in zip(token_ids, entries, strict=True):
        if entry is None:
            values.append(None)
            tops.append(None)
            continue
        values.append(finite(entry[token_id].logprob))
        # The chosen token is there too, where it is not among the likeliest.
        tops.append(
            {
                names(token): finite(known.logprob)
                for token, known in entry.items()
                if num_top < 0 or known.rank <= num_top or token == token_id
            }
        )
    return {
        "tokens": [names(token_id) for token_id in token_ids],
        "token_logprobs": values,
        "top_logprobs": tops,
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
