"""Bad words, as the token sequences that encode them."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from pagedserve.errors import RequestError


@dataclass(frozen=True, slots=True)
class BadWords:
    """Bad words of one request.

    Only the sequences that the tokenizer itself produces for a word are known: a model that spells
    it with other tokens is not stopped.

    Attributes:
        sequences: Token sequences, not empty and distinct.
    """

    sequences: tuple[tuple[int, ...], ...]

    @classmethod
    def from_words(
        cls, words: Iterable[str], encode: Callable[[str], list[int]], vocab_size: int
    ) -> "BadWords":
        """Encode each word as given and with a space before it.

        Byte-level and SentencePiece vocabularies encode a word after a space differently from one
        at the start of a text or after a punctuation mark.

        Args:
            words: As in ``SamplingParams.bad_words``.
            encode: Function of the tokenizer, without special tokens.
            vocab_size: Tokens of the model; sequences with others cannot be generated.

        Raises:
            RequestError: The tokenizer produces no token for a word.
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
                if max(sequence) < vocab_size:
                    sequences[sequence] = None
        return cls(tuple(sequences))

    def banned_after(self, output_token_ids: Sequence[int]) -> tuple[int, ...]:
        """Return the tokens that would complete a bad word, each once.

        The prompt does not count: a word is banned only if the output contains all of it.  Cost:
        the sum of the sequences' lengths, however long the output is.

        Args:
            output_token_ids: New tokens so far.
        """
        num_tokens = len(output_token_ids)
        banned: dict[int, None] = {}
        for *begun, last in self.sequences:
            start = num_tokens - len(begun)
            if start >= 0 and list(output_token_ids[start:]) == begun:
                banned[last] = None
        return tuple(banned)
