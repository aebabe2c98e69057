"""Token rules of a model: which new tokens are allowed, independent of the logits."""

from dataclasses import dataclass

from pagedserve.errors import RequestError
from pagedserve.sampling.rows import LogitsEdits, RowSampling
from pagedserve.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRules:
    """Token rules of one request.

    Attributes:
        first: Candidates for each of the first new tokens, of which the most likely is taken; a
            request with any has one sequence.
        suppressed: Tokens that are never sampled after ``first``.
        suppressed_first: Tokens that are not sampled directly after ``first``.
    """

    first: tuple[tuple[int, ...], ...] = ()
    suppressed: tuple[int, ...] = ()
    suppressed_first: tuple[int, ...] = ()

    def check(self, params: SamplingParams, name: str) -> None:
        """Check that a request is compatible with the rules.

        Raises:
            RequestError: It has several sequences or structured outputs, and its first tokens are
                to be detected.
        """
        if self.first and params.structured_outputs is not None:
            raise RequestError(
                f"{name} names no language, which would be the first token of structured_outputs: "
                "give the decoder a prompt that names it",
                param="structured_outputs",
            )
        if self.first and params.max_num_running_seqs > 1:
            raise RequestError(
                f"{name} names no language, which is detected for one sequence alone: give the "
                "decoder a prompt that names it"
            )

    def banned(self, num_tokens: int) -> tuple[int, ...]:
        """Tokens that must not be sampled after this many new tokens, including ``first``."""
        first = self.suppressed_first if num_tokens == len(self.first) else ()
        return (*self.suppressed, *first)

    def row(self, num_tokens: int, num_logprobs: int | None) -> RowSampling:
        """Sampler row after this many tokens, while ``first`` is not complete."""
        edits = LogitsEdits(allowed_token_ids=self.first[num_tokens])
        return RowSampling(temperature=0, edits=edits, num_logprobs=num_logprobs)
