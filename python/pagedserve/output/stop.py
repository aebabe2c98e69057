"""Stop conditions: end-of-sequence and stop tokens, stop strings, and lengths."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from pagedserve.output.detokenizer import TextStream
from pagedserve.outputs import FinishReason
from pagedserve.sampling_params import SamplingParams


class StopMatch(NamedTuple):
    """``text[start:end]`` is ``string``."""

    string: str
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class StopStrings:
    """Stop strings of one request; without any, nothing matches and nothing is held back.

    Text arrives in chunks of any length, and a chunk may contain the end of one stop string and the
    start of another.  The result is the same as for text that arrives character by character.

    Invariant: ``visible`` of a text without a match is a prefix of that of any longer text, and of
    that text cut at its first match.

    Attributes:
        strings: Strings, not empty.
        include: Whether the output includes the string that ended it.
    """

    strings: tuple[str, ...]
    include: bool

    @property
    def max_length(self) -> int:
        """Length of the longest string, in characters."""
        return max(map(len, self.strings))

    @property
    def last_bytes(self) -> set[int]:
        """Last byte of each string in UTF-8."""
        return {string.encode(errors="surrogatepass")[-1] for string in self.strings}

    def find(self, text: str, num_old: int) -> StopMatch | None:
        """Find the match that ends first; of several that end together the longest.

        Each string costs a search through the new characters and its length.

        Args:
            text: All text so far.
            num_old: Number of characters that were searched before: a match must end after them.
        """
        found = (_first_ending_behind(num_old, text, string) for string in self.strings)
        matches = (match for match in found if match is not None)
        return min(matches, key=lambda match: (match.end, match.start), default=None)

    def cut(self, text: str, match: StopMatch) -> str:
        """The output of a text that ends with ``match``."""
        return text[: match.end if self.include else match.start]

    def visible(self, text: str) -> str:
        """The final part of a text without a match, whatever follows."""
        return text[: len(text) - self.num_held(text)]

    def num_held(self, text: str) -> int:
        """Number of characters at the end of ``text`` that may be the start of a stop string.

        0 with ``include``: they stay in the output either way.
        """
        if self.include:
            return 0
        return max((_num_begun(text, string) for string in self.strings), default=0)


def _first_ending_behind(num_old: int, text: str, string: str) -> StopMatch | None:
    start = text.find(string, max(0, num_old + 1 - len(string)))
    return None if start < 0 else StopMatch(string, start, start + len(string))


def _num_begun(text: str, string: str) -> int:
    """Length of the longest suffix of ``text`` that is a proper prefix of ``string``.

    Tries only the positions of its first character: most often there is none.
    """
    start = max(0, len(text) + 1 - len(string))
    while (start := text.find(string[0], start)) >= 0:
        if string.startswith(text[start:]):
            return len(text) - start
        start += 1
    return 0


class Finish(NamedTuple):
    """Why a sequence ended, in the terms of ``CompletionOutput``."""

    reason: FinishReason
    stop_reason: int | str | None = None


_LENGTH = Finish("length")


def is_by_token(finish: Finish | None) -> bool:
    """Whether an ending token ended a sequence, not a string or a length."""
    return (
        finish is not None and finish.reason == "stop" and not isinstance(finish.stop_reason, str)
    )


@dataclass(frozen=True, slots=True)
class StopRule:
    """Stop conditions of one request; without stop strings one lookup and one comparison per token.

    Attributes:
        endings: Finish of each ending token; includes stop strings that are the name of a special
            token that the detokenizer skips.
        min_tokens: Minimum new tokens before an ending token may be sampled, or a stop string
            counts.
        max_tokens: Maximum new tokens, limited by ``max_model_len``.
        strings: Stop strings; None for none.
        shows_ending: Whether the text includes the token that ended it; for strings see
            ``strings.include``.
    """

    endings: dict[int, Finish]
    min_tokens: int
    max_tokens: int
    strings: StopStrings | None = None
    shows_ending: bool = False

    @classmethod
    def from_params(
        cls,
        params: SamplingParams,
        *,
        eos_token_ids: Iterable[int],
        max_new_tokens: int,
        hidden_tokens: Mapping[str, int] | None = None,
    ) -> "StopRule":
        """Create the stop conditions of a request.

        Args:
            params: Sampling parameters.
            eos_token_ids: The model's end-of-sequence tokens.
            max_new_tokens: New tokens that ``max_model_len`` leaves after the prompt.
            hidden_tokens: Special tokens that the detokenizer skips, by their names.
        """
        hidden = hidden_tokens or {}
        endings = {hidden[text]: Finish("stop", text) for text in params.stop if text in hidden}
        endings |= {token: Finish("stop", token) for token in params.stop_token_ids}
        # Structured output ends where its grammar does.
        is_bound = params.structured_outputs is not None
        if is_bound or not params.ignore_eos:
            endings |= dict.fromkeys(eos_token_ids, Finish("stop"))
        strings = StopStrings(params.stop, params.include_stop_str_in_output)
        return cls(
            endings,
            0 if is_bound else params.min_tokens,
            min(params.max_tokens or max_new_tokens, max_new_tokens),
            strings if params.stop else None,
            params.include_stop_str_in_output,
        )

    @property
    def banned_at_first(self) -> tuple[int, ...]:
        """Tokens that must not be sampled before ``min_tokens`` new ones.

        Excludes those of stop strings: strings among the first tokens do not count.
        """
        if not self.min_tokens:
            return ()
        endings = self.endings.items()
        return tuple(token for token, end in endings if not isinstance(end.stop_reason, str))

    def check(self, token: int, num_tokens: int) -> Finish | None:
        """Whether ``token``, the ``num_tokens``-th new one, ends the sequence.

        A token that ends it is a "stop" even if the length is reached too.
        """
        if token in self.endings and num_tokens > self.min_tokens:
            return self.endings[token]
        return _LENGTH if num_tokens >= self.max_tokens else None


def find_stop(
    rule: StopRule, before: TextStream, text: TextStream, num_tokens: int
) -> StopMatch | None:
    """Find the stop string that the last of ``num_tokens`` tokens completes.

    A string that ends in the last byte of a character stops at once: the text ends there, so no
    later byte changes it.

    Args:
        rule: Stop conditions of the request.
        before: The text without the last token.
        text: The text with it.
        num_tokens: New tokens, the last one included.
    """
    if rule.strings is None or num_tokens <= rule.min_tokens:
        return None
    held = text.held_byte
    may_end = held is not None and held in rule.strings.last_bytes
    whole = text.text + (text.complete_rest() if may_end else "")
    if len(whole) == len(before.text):
        return None
    return rule.strings.find(whole, len(before.text + before.complete_rest()))
