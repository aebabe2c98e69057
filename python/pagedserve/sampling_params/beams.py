"""``BeamSearchParams``: parameters of ``LLM.beam_search``."""

from dataclasses import dataclass
from typing import Any

import pagedserve.checks as checks
from pagedserve.sampling_params.params import SamplingParams


@dataclass(slots=True)
class BeamSearchParams:
    """Parameters of ``LLM.beam_search``.

    Attributes:
        beam_width: Number of beams, and of outputs per prompt; at least 1.
        max_tokens: Maximum new tokens of a beam.
        ignore_eos: Continue after the model's end-of-sequence token.
        temperature: Only 0 is accepted: beam search does not sample.
        length_penalty: The log-probability of a beam is divided by its length to this power.
        include_stop_str_in_output: Whether tokens and text include the token that ended the beam.
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False

    def sampling_params(self) -> SamplingParams:
        """Convert to sampling parameters; a single beam is greedy sampling.

        Raises:
            RequestError: A value is invalid.
        """
        if self.temperature != 0:
            checks.refuse("temperature", self.temperature, "0: beam search does not sample")
        beams: dict[str, Any] = {}
        if self.beam_width != 1:
            beams = {
                "use_beam_search": True,
                "length_penalty": self.length_penalty,
                "early_stopping": "never",
            }
        return SamplingParams(
            n=self.beam_width,
            max_tokens=self.max_tokens,
            ignore_eos=self.ignore_eos,
            temperature=0.0,
            logprobs=0,
            include_stop_str_in_output=self.include_stop_str_in_output,
            **beams,
        )
