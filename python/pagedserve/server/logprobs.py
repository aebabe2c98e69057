"""Log-probabilities in OpenAI's two formats, and those of prompts in vLLM's."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from pagedserve.output.detokenizer import Detokenizer, TextStream
from pagedserve.outputs import Logprob

# JSON has no infinity.
_LEAST: Final = -9999.0

Entry = dict[int, Logprob] | None


def finite(logprob: float) -> float:
    """Clamp a log-probability to the range of JSON."""
    return logprob if math.isfinite(logprob) else _LEAST


@dataclass(frozen=True, slots=True)
class TokenNames:
    """Format of tokens in log-probabilities.

    Attributes:
        detokenizer: Returns their texts and bytes.
        as_ids: As ``token_id:7`` instead of their texts, which are not unique.
    """

    detokenizer: Detokenizer
    as_ids: bool

    def __call__(self, token_id: int) -> str:
        """Name of a token."""
        return f"token_id:{token_id}" if self.as_ids else self.detokenizer.token_text(token_id)

    def bytes_of(self, token_id: int) -> list[int]:
        """Bytes of a token, which may be a part of a character."""
        return list(self.detokenizer.token_bytes(token_id))


@dataclass(slots=True)
class TextOffsets:
    """Start of each token's text: text before the next token's start belongs to it.

    A character of several tokens belongs to the last; the others have no text.

    Attributes:
        stream: Incremental detokenizer; text is dropped once counted.
        num_chars: Characters before the next token.
    """

    stream: TextStream
    num_chars: int = 0

    def take(self, token_ids: Sequence[int]) -> list[int]:
        """Offsets of the next tokens."""
        offsets = []
        for token_id in token_ids:
            offsets.append(self.num_chars)
            self.stream = self.stream.advanced([token_id])
            num_new = len(self.stream.text)
            self.stream = self.stream.without(num_new)
            self.num_chars += num_new
        return offsets


def prompt_offsets(detokenizer: Detokenizer, token_ids: Sequence[int], text: str) -> list[int]:
    """Offset of each token in the text of a prompt.

    A token that the tokenizer added to the text has no length.

    Args:
        detokenizer: Detokenizer that keeps special tokens, which the text may contain.
        token_ids: Token ids of the prompt.
        text: Text as returned.
    """
    start = max(0, detokenizer.decode(token_ids).find(text))
    offsets = TextOffsets(detokenizer.stream()).take(token_ids)
    return [min(max(0, offset - start), len(text)) for offset in offsets]


def completion_logprobs(
    names: TokenNames, num_top: int, token_ids: Sequence[int], entries: Sequence[Entry]
) -> dict[str, Any]:
    """Build the ``logprobs`` of a completion's choice except ``text_offset``, for some tokens.

    Args:
        names: Format of tokens.
        num_top: Number of most likely tokens to return per position; -1 is all.
        token_ids: New tokens, or those of a prompt.
        entries: One per token; None for the first of a prompt, which has no prediction.
    """
    values: list[float | None] = []
    tops: list[dict[str, float] | None] = []
    for token_id, entry in zip(token_ids, entries, strict=True):
        if entry is None:
            values.append(None)
            tops.append(None)
            continue
        values.append(finite(entry[token_id].logprob))
        # The chosen token comes first, even if it is not among the most likely.  Of tokens with one
        # name the most likely counts: clients take the chosen one for it if no value is larger.
        top: dict[str, float] = {}
        for token, known in ((token_id, entry[token_id]), *_top(entry, num_top)):
            name, value = names(token), finite(known.logprob)
            top[name] = max(value, top.get(name, value))
        tops.append(top)
    return {
        "tokens": [names(token_id) for token_id in token_ids],
        "token_logprobs": values,
        "top_logprobs": tops,
    }


def chat_logprobs(
    names: TokenNames, num_top: int, token_ids: Sequence[int], entries: Sequence[Entry]
) -> dict[str, Any]:
    """Build the ``logprobs`` of a chat choice, for some tokens; ``num_top`` -1 is all."""

    def described(token_id: int, logprob: float) -> dict[str, Any]:
        return {
            "token": names(token_id),
            "logprob": finite(logprob),
            "bytes": names.bytes_of(token_id),
        }

    content = []
    for token_id, entry in zip(token_ids, entries, strict=True):
        known = entry or {}
        top = [described(token, logprob.logprob) for token, logprob in _top(known, num_top)]
        chosen = known[token_id].logprob if token_id in known else _LEAST
        content.append({**described(token_id, chosen), "top_logprobs": top})
    return {"content": content}


def _top(entry: Mapping[int, Logprob], num_top: int) -> list[tuple[int, Logprob]]:
    """The most likely tokens of a position, at most ``num_top``; -1 is all.

    The most likely comes first, of equals the smaller id, as the sampler has them.
    """
    likely = sorted(entry.items(), key=lambda each: (-each[1].logprob, each[0]))
    return likely if num_top < 0 else likely[:num_top]


def prompt_logprobs(entries: Sequence[Entry]) -> list[dict[str, Any] | None]:
    """Build the ``prompt_logprobs`` of a choice in vLLM's format."""
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
