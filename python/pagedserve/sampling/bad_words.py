"""Words that must not come, as the token sequences that would write them."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from pagedserve.errors import RequestError


@dataclass(frozen=True, slots=True)
class BadWords:
    """The bad words of one request.

    Only the sequences that the tokenizer itself makes of a word are known: a model that spells it
    with other tokens gets through.

    Attributes:
        sequences: Each not empty, no two equal.
    """

    sequences: tuple[tuple[int, ...], ...]

    @classmethod
    def from_words(cls, words: Iterable[str], encode: Callable[[str], list[int]]) -> "BadWords":
        """Encode each word as given and with a space before it.

        Byte-level and sentence-piece vocabularies write a word that follows a space differently
        from one that starts a text or goes on from a punctuation mark.

        Args:
            words: As in ``SamplingParams.bad_words``.
            encode: The tokenizer, without special tokens.

        Raises:
            RequestError: A word of which the tokenizer leaves no token.
        """
        sequences: dict[tuple[int, ...], None] = {}
        for word in words:
            for written in (word, f" {word}"):
                sequence = tuple(encode(written))
                if not sequence:
                    raise RequestError(
                        f"bad_words has {word!r}, for which the tokenizer has no token; each "
                        "word must be at least one token"
                    )
                sequences[sequence] = None
        return cls(tuple(sequences))

    def banned_after(self, output_token_ids: Sequence[int]) -> tuple[int, ...]:
        """Tokens that would complete a bad word now, each once.

        The prompt does not count: a word is only banned where the output holds all of it.  Cost:
        the sum of the sequences' lengths, however long the output is.

        Args:
            output_token_ids: The new tokens so far.
        """
        num_tokens = len(output_token_ids)
        banned: dict[int, None] = {}
        for *begun, last in self.sequences:
            start = num_tokens - len(begun)
            if start >= 0 and list(output_token_ids[start:]) == begun:
                banned[last] = None
        return tuple(banned)
