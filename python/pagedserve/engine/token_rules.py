"""Which new tokens a model's own rules let come, whatever its logits say."""

from dataclasses import dataclass

from pagedserve.errors import RequestError
from pagedserve.sampling.rows import LogitsEdits, RowSampling
from pagedserve.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRules:
    """The rules for one request.

    Attributes:
        first: Of each of the first new tokens, those of which it is the likeliest; a
            request with some has one sequence.
        suppressed: Never come behind ``first``.
        suppressed_first: Do not come right behind it.
    """

    first: tuple[tuple[int, ...], ...] = ()
    suppressed: tuple[int, ...] = ()
    suppressed_first: tuple[int, ...] = ()

    def check(self, params: SamplingParams, name: str) -> None:
        """Check that a request may have these rules; ``name`` is what an error calls its prompt.

        Raises:
            RequestError: It has several sequences, or a text that must be something, and its first
                tokens are to be found.
        """
        if self.first and params.structured_outputs is not None:
            raise RequestError(
                f"{name} names no language, which would be the first of what structured_outputs "
                "says: give the decoder a prompt that names it",
                param="structured_outputs",
            )
        if self.first and params.max_num_running_seqs > 1:
            raise RequestError(
                f"{name} names no language, which is found for one sequence alone: give the "
                "decoder a prompt that names it"
            )

    def banned(self, num_tokens: int) -> tuple[int, ...]:
        """Tokens that must not follow so many new ones, of which ``first`` are there."""
        first = self.suppressed_first if num_tokens == len(self.first) else ()
        return (*self.suppressed, *first)

    def row(self, num_tokens: int, num_logprobs: int | None) -> RowSampling:
        """What the sampler is told behind so many tokens, while ``first`` are not all there."""
        edits = LogitsEdits(allowed_token_ids=self.first[num_tokens])
        return RowSampling(temperature=0, edits=edits, num_logprobs=num_logprobs)
