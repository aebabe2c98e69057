"""Which requests are taken up, and what is made of them.

Everything that can be known before the first step is checked here.

A request that passes can be run alone; what the scheduler may still end it for ("ignored") is a
KV pool that its output outgrows.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from pagedserve._core import SchedulerConfig
from pagedserve.engine.rows import RowSource
from pagedserve.errors import RequestError
from pagedserve.inputs import ParsedPrompt, TokenizedPrompt, tokenize_prompt
from pagedserve.output.processor import OutputProcessor
from pagedserve.output.state import OutputState
from pagedserve.output.stop import StopRule
from pagedserve.sampling.bad_words import BadWords
from pagedserve.sampling_params import SamplingParams

# Added to a request's number: the salt of a prompt that must not be found in the prefix cache.
_PRIVATE_SALT: Final = 1 << 63


@dataclass(frozen=True, slots=True)
class CheckedRequest:
    """A request found good, not yet taken up; ``bad_words`` in the model's tokens."""

    prompt: TokenizedPrompt
    params: SamplingParams
    bad_words: BadWords | None


class NewRequest(NamedTuple):
    """A request about to be taken up.

    Attributes:
        token_ids: int32 [L], its prompt.
        salt: Under which its prefix may be shared.
        output: What its caller is told.
        rows: What the sampler is told.
    """

    token_ids: NDArray[np.int32]
    salt: int
    output: OutputState
    rows: RowSource


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """The limits of one engine.

    Attributes:
        tokenizer: The model's.
        vocab_size: Token ids are below it.
        eos_token_ids: The model's end-of-sequence tokens.
        scheduler: The limits of a step and of a sequence.
        prompt_refusal: The scheduler's answer to a prompt's length.
        processor: Opens the outputs of requests.
        seed: For the random numbers of requests that have no seed of their own.
    """

    tokenizer: PreTrainedTokenizerBase
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    scheduler: SchedulerConfig
    prompt_refusal: Callable[[int], str | None]
    processor: OutputProcessor
    seed: int

    def check(self, prompt: ParsedPrompt, params: SamplingParams, *, name: str) -> CheckedRequest:
        """Tokenise a prompt and check that the request can be run.

        Args:
            prompt: As ``pagedserve.inputs`` parsed it.
            params: How to continue it.
            name: What an error calls the prompt.

        Raises:
            RequestError: What is wrong, and what is accepted.
        """
        params = params.resolved(
            max_model_len=self.scheduler.max_model_len, vocab_size=self.vocab_size
        )
        tokenized = tokenize_prompt(prompt, name, encode=self._encode, vocab_size=self.vocab_size)
        if params.truncate_prompt_tokens is not None:
            kept = tokenized.token_ids[-params.truncate_prompt_tokens :]
            tokenized = replace(tokenized, token_ids=kept)
        self._check_length(len(tokenized.token_ids), name)
        self._check_params(params)
        bad_words = None
        if params.bad_words:
            bad_words = BadWords.from_words(params.bad_words, self._encode_word)
        return CheckedRequest(tokenized, params.with_prompt(tokenized.token_ids), bad_words)

    def open(
        self,
        request_id: str,
        checked: CheckedRequest,
        *,
        number: int,
        arrival_time: float,
        is_followed: bool,
    ) -> NewRequest:
        """Make what scheduler, sampler and caller need of a request.

        Args:
            request_id: The caller's name for it.
            checked: What ``check`` made.
            number: Its ordinal among all requests of the engine.
            arrival_time: Seconds of the engine's clock.
            is_followed: Whether the caller wants outputs before the last.
        """
        prompt, params = checked.prompt, checked.params
        rule = StopRule.from_params(
            params,
            eos_token_ids=self.eos_token_ids,
            max_new_tokens=self.scheduler.max_model_len - len(prompt.token_ids),
        )
        output = self.processor.open(
            request_id=request_id,
            prompt=prompt.text,
            prompt_token_ids=list(prompt.token_ids),  # the caller may change it
            params=params,
            rule=rule,
            arrival_time=arrival_time,
            is_followed=is_followed,
        )
        num_candidates = 0
        if output.search is not None:
            num_candidates = max(output.search.num_candidates, params.logprobs or 0)
        rows = RowSource(
            params,
            prompt_token_ids=prompt.token_ids,
            bad_words=checked.bad_words,
            banned_at_first=rule.banned_at_first,
            num_candidates=num_candidates,
            keeps_logprobs=output.search is None and output.keeps_logprobs,
            # The first number keeps the two kinds of keys apart.
            key=(1, self.seed, number) if params.seed is None else (0, params.seed),
        )
        # What the cache has is not computed, and so nothing is learnt about it.
        salt = prompt.salt if params.prompt_logprobs is None else _PRIVATE_SALT + number
        return NewRequest(np.array(prompt.token_ids, dtype=np.int32), salt, output, rows)

    def _check_params(self, params: SamplingParams) -> None:
        num_seqs, most = params.max_num_running_seqs, self.scheduler.max_num_seqs
        if num_seqs > most:
            name = "n" if params.best_of is None else "best_of"
            raise RequestError(
                f"{name} is {num_seqs}; max_num_seqs is {most}, and the sequences of a request run "
                "together"
            )
        for name in ("logprobs", "prompt_logprobs"):
            number = getattr(params, name)
            if number is not None and number > self.vocab_size:
                raise RequestError(
                    f"{name} is {number}; it must be at most {self.vocab_size}, the size of the "
                    "vocabulary"
                )
        biased = [token for token, _ in params.logit_bias]
        for name, tokens in (
            ("stop_token_ids", params.stop_token_ids),
            ("allowed_token_ids", params.allowed_token_ids or ()),
            ("logit_bias", biased),
        ):
            if any(token >= self.vocab_size for token in tokens):
                raise RequestError(
                    f"{name} has {max(tokens)}; token ids must be from 0 to "
                    f"{self.vocab_size - 1}, the last of the vocabulary"
                )

    def _encode_word(self, text: str) -> list[int]:
        token_ids: list[int] = self.tokenizer(text, add_special_tokens=False).input_ids
        return token_ids

    def _encode(self, text: str) -> list[int]:
        # verbose: the length is checked here, against the limit of this engine.
        token_ids: list[int] = self.tokenizer(text, verbose=False).input_ids
        return token_ids

    def _check_length(self, num_tokens: int, name: str) -> None:
        refusal = self.prompt_refusal(num_tokens)
        if refusal is not None:
            raise RequestError(f"{name} {refusal}")
