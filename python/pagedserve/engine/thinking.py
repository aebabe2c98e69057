"""Reasoning: closed by the model's end tag at its budget of tokens, and held by no grammar.

Where the reasoning of a sequence starts and ends is a function of its new tokens, as is the token
that a budget forces.  So recomputed, swapped, forked and resumed sequences need nothing else, and
neither do rows after draft tokens.

The tags are found as the server finds them (`pagedserve.server.tools.tag_stream`): at the
start of a text only, and once.  A model may encode a tag in other tokens than the tokenizer.

Costs: a lookup per token; some microseconds for a token that may complete a tag.  Nothing for
requests with neither a budget nor a grammar.
"""

import math
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple, Self

from pagedserve.config.reasoning import ReasoningFormat, reasoning_format_of
from pagedserve.errors import RequestError
from pagedserve.output.detokenizer import Detokenizer
from pagedserve.sampling.grammar import GrammarStates
from pagedserve.tokenizer import Tokenizer

_REPLACEMENT: Final = "\ufffd"
# Tokens of whitespace that may follow a start tag at the end of a prompt.
_NUM_SPACES: Final = 8


class ThinkingTags:
    """Start and end tag of a model's reasoning, in text and tokens; shared by all requests.

    Attributes:
        start_token_id: Token of the start tag; None if it has several.
        end_token_ids: Tokens of the end tag, at least one.
        num_tail: Maximum tokens of an end tag, however a model encodes it.
    """

    __slots__ = (
        "_completes",
        "_detokenizer",
        "_format",
        "end_token_ids",
        "num_tail",
        "start_token_id",
    )

    def __init__(
        self, known: ReasoningFormat, encode: Callable[[str], list[int]], detokenizer: Detokenizer
    ) -> None:
        """Encode the tags.

        Args:
            known: The tags.
            encode: Function of the tokenizer, without special tokens.
            detokenizer: Detokenizer that keeps special tokens.
        """
        self._format, self._detokenizer = known, detokenizer
        start = encode(known.start)
        self.start_token_id = start[0] if len(start) == 1 else None
        self.end_token_ids = tuple(encode(known.end))
        # A token of a text has at least one byte.
        self.num_tail = max(len(known.end.encode()), len(self.end_token_ids))
        # Whether a token may be the last of an end tag.
        self._completes: dict[int, bool] = {self.end_token_ids[-1]: True}

    @classmethod
    def of(cls, known: ReasoningFormat | None, tokenizer: Tokenizer) -> Self:
        """The tags of a format; None takes those of the tokenizer's chat template.

        Raises:
            RequestError: None, and the template has no known tags.
        """
        known = known or reasoning_format_of(str(tokenizer.chat_template or ""))
        if known is None:
            raise RequestError(
                "thinking_token_budget is given, and the model's chat template has no known tags "
                "of reasoning: give reasoning_config, or start the server with --reasoning-parser",
                param="thinking_token_budget",
            )

        def encode(text: str) -> list[int]:
            token_ids: list[int] = tokenizer(text, add_special_tokens=False).input_ids
            return token_ids

        return cls(known, encode, Detokenizer(tokenizer, skip_special_tokens=False))

    def is_open_after(self, prompt_token_ids: Sequence[int], *, may_begin: bool) -> bool | None:
        """See `pagedserve.config.reasoning.ReasoningFormat.is_open_after`."""
        num_tail = max(len(self._format.start.encode()), self.num_tail) + _NUM_SPACES
        tail = self._detokenizer.decode(prompt_token_ids[-num_tail:])
        return self._format.is_open_after(tail, may_begin=may_begin)

    def starts(self, token_ids: Sequence[int]) -> bool | None:
        """Whether a text starts with the start tag; None if that is not known yet."""
        text = self._detokenizer.decode(token_ids).lstrip().rstrip(_REPLACEMENT)
        if text.startswith(self._format.start):
            return True
        return None if self._format.start.startswith(text) else False

    def end_in(self, tail: Sequence[int]) -> bool:
        """Whether the last of up to ``num_tail`` tokens completes an end tag."""
        last = tail[-1]
        completes = self._completes.get(last)
        if completes is None:
            text = self._detokenizer.token_text(last)
            completes = self._format.end[-1] in text or _REPLACEMENT in text
            self._completes[last] = completes
        own = self.end_token_ids
        return completes and (
            tuple(tail[-len(own) :]) == own or self._format.end in self._detokenizer.decode(tail)
        )


class Extent(NamedTuple):
    """Extent of the reasoning in the new tokens of a sequence.

    Attributes:
        start: Number of tokens before the reasoning; None if it has not started.
        end: Number of tokens before the answer; None if that has not started, 0 without reasoning.
    """

    start: int | None = None
    end: int | None = None

    @property
    def is_open(self) -> bool:
        """Whether the next token belongs to the reasoning, or to its end tag."""
        return self.start is not None and self.end is None


class Thinking:
    """The reasoning of a request's sequences, and its budget.

    Attributes:
        opening: Token with which a text may start reasoning though the grammar does not admit it;
            None if the prompt opens or closes it, or if the start tag has several tokens.
    """

    __slots__ = ("_budget", "_first", "_known", "_num_drafts", "_tags", "opening")

    def __init__(
        self,
        tags: ThinkingTags,
        budget: int | None,
        *,
        prompt_token_ids: Sequence[int],
        num_drafts: int,
        grammar: GrammarStates | None,
    ) -> None:
        """Start before the first new token.

        Args:
            tags: Tags of the model.
            budget: Maximum tokens of the reasoning, without its tags; None if only its end counts.
                The prompt or ``opening`` starts it then: a grammar that admits the tag may describe
                all of the text.
            prompt_token_ids: Prompt, which may end with the start tag.
            num_drafts: Maximum draft tokens per step.
            grammar: Grammar of what follows the reasoning; None if any text may.
        """
        self._tags, self._num_drafts = tags, num_drafts
        self._budget = math.inf if budget is None else budget
        is_open = tags.is_open_after(prompt_token_ids, may_begin=budget is not None)
        self._first = Extent(0 if is_open else None)
        opening = tags.start_token_id if is_open is None else None
        is_admitted = grammar is None or opening is None or grammar.at(()).admits(opening)
        self.opening = None if is_admitted else opening
        # For each sequence, a number of tokens that are no drafts, and the extent after them.
        self._known: dict[int, tuple[int, Extent]] = {}

    def extent(self, token_ids: Sequence[int], index: int) -> Extent:
        """Extent after ``token_ids``: new tokens of sequence ``index``, then draft tokens."""
        num_known, extent = self._known.get(index, (0, self._first))
        num_sure = len(token_ids) - self._num_drafts
        for num_tokens in range(num_known + 1, len(token_ids) + 1):
            extent = self._advanced(extent, token_ids, num_tokens)
            if num_tokens == num_sure:
                self._known[index] = (num_tokens, extent)
        return extent

    def _advanced(self, extent: Extent, token_ids: Sequence[int], num_tokens: int) -> Extent:
        """Extent after ``num_tokens`` tokens, from the one before the last of them."""
        if extent.end is not None:
            return extent
        if extent.start is None:
            starts = self._starts(token_ids[:num_tokens])
            if starts is None:
                return extent
            return Extent(num_tokens) if starts else Extent(None, 0)
        tail = token_ids[max(extent.start, num_tokens - self._tags.num_tail) : num_tokens]
        return Extent(extent.start, num_tokens) if self._tags.end_in(tail) else extent

    def _starts(self, token_ids: Sequence[int]) -> bool | None:
        """Whether a text starts with reasoning; None if that is not known yet."""
        if self._budget == math.inf:
            return token_ids[0] == self.opening
        return self._tags.starts(token_ids)

    def closing(self, token_ids: Sequence[int], extent: Extent) -> tuple[int, ...]:
        """Tokens that must follow ``token_ids``: the rest of the end tag at the budget, or none.

        Args:
            token_ids: New tokens of a sequence.
            extent: Extent after them.
        """
        num_tokens = len(token_ids) - (extent.start or 0)
        if not extent.is_open or num_tokens < self._budget:
            return ()
        tag = self._tags.end_token_ids
        for length in range(min(len(tag) - 1, num_tokens), 0, -1):
            if tuple(token_ids[-length:]) == tag[:length]:
                return tag[length:]
        return tag

    def may_close(self, num_tokens: int, extent: Extent) -> bool:
        """Whether the tag may be forced directly after the next token.

        Args:
            num_tokens: New tokens of a sequence, which may be more than the known ones.
            extent: Extent after the known ones.
        """
        return extent.end is None and num_tokens + 1 >= self._budget
