"""Which requests are taken up: everything that can be known before the first step is checked here.

A request that passes can be run alone; what the scheduler may still end it for ("ignored") is a
KV pool that its output outgrows.
"""

from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from pagedserve._core import CacheConfig
from pagedserve.errors import RequestError
from pagedserve.inputs import ParsedPrompt, TokenizedPrompt, tokenize_prompt
from pagedserve.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class CheckedRequest:
    """A request found good, not yet taken up."""

    prompt: TokenizedPrompt
    params: SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """The limits of one engine.

    Attributes:
        tokenizer: The model's.
        vocab_size: Token ids are below it.
        max_model_len: Tokens of a sequence, prompt and output together.
        max_num_batched_tokens: Tokens of a step; a prompt is computed in one.
        cache: The KV pool.
    """

    tokenizer: PreTrainedTokenizerBase
    vocab_size: int
    max_model_len: int
    max_num_batched_tokens: int
    cache: CacheConfig

    def check(self, prompt: ParsedPrompt, params: SamplingParams, *, name: str) -> CheckedRequest:
        """Tokenise a prompt and check that the request can be run.

        Args:
            prompt: As ``pagedserve.inputs`` parsed it.
            params: How to continue it.
            name: What an error calls the prompt.

        Raises:
            RequestError: What is wrong, and what is accepted.
        """
        tokenized = tokenize_prompt(prompt, name, encode=self._encode, vocab_size=self.vocab_size)
        self._check_length(len(tokenized.token_ids), name)
        for token in params.stop_token_ids:
            if token >= self.vocab_size:
                raise RequestError(
                    f"stop_token_ids has {token}; token ids must be from 0 to "
                    f"{self.vocab_size - 1}, the last of the vocabulary"
                )
        return CheckedRequest(tokenized, params)

    def _encode(self, text: str) -> list[int]:
        # verbose: the length is checked here, against the limit of this engine.
        token_ids: list[int] = self.tokenizer(text, verbose=False).input_ids
        return token_ids

    def _check_length(self, num_tokens: int, name: str) -> None:
        if num_tokens >= self.max_model_len:
            raise RequestError(
                f"{name} has {num_tokens} tokens; max_model_len is {self.max_model_len}, so at "
                f"most {self.max_model_len - 1} leave room for a new one"
            )
        if num_tokens > self.max_num_batched_tokens:
            raise RequestError(
                f"{name} has {num_tokens} tokens; a prompt is computed in one step, and "
                f"max_num_batched_tokens is {self.max_num_batched_tokens}"
            )
        cache = self.cache
        needed = -(-num_tokens // cache.block_size)
        # The share that the scheduler keeps free when it admits, rounded down as it does.
        usable = cache.num_gpu_blocks - int(cache.watermark * cache.num_gpu_blocks)
        if needed > usable:
            raise RequestError(
                f"{name} has {num_tokens} tokens and needs {needed} KV blocks of "
                f"{cache.block_size}; the engine has {cache.num_gpu_blocks}, of which a prompt "
                f"may use {usable}: raise num_gpu_blocks or kv_cache_memory"
            )
