"""Requests to a pooling model, made of a prompt and parameters; each ends with its prefill."""

from dataclasses import dataclass, replace
from functools import partial
from typing import Final

from pagedserve._core import Scheduler
from pagedserve.engine.prompt_length import check_length, too_long
from pagedserve.engine.request import Request
from pagedserve.engine.row_sampler import RowSampler
from pagedserve.errors import RequestError
from pagedserve.inputs.prompts import ParsedPrompt, TokenizedPrompt, check_unicode, tokenize_prompt
from pagedserve.output.stop import StopRule
from pagedserve.outputs import RequestMetrics
from pagedserve.pooling.rules import PoolingRules
from pagedserve.pooling_params import PoolingParams
from pagedserve.sampling_params import RequestOutputKind, SamplingParams
from pagedserve.tokenizer import Tokenizer

# Sampling parameters of a pooling request: one token, which is not returned.
_ONE_TOKEN: Final = SamplingParams(temperature=0, max_tokens=1, detokenize=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingProcessor:
    """Checks requests against the limits of one engine with a pooling model.

    Attributes:
        tokenizer: Copy of the model's tokenizer: truncation changes one of transformers, which
            other threads must not see.
        rules: Pooling configuration of the model.
        vocab_size: Vocabulary size; token ids must be below it.
        scheduler: Knows which prompts can never run.
        max_model_len: Maximum tokens of a sequence.
    """

    tokenizer: Tokenizer
    rules: PoolingRules
    vocab_size: int
    scheduler: Scheduler
    max_model_len: int

    def process(
        self,
        request_id: str,
        prompt: ParsedPrompt,
        params: PoolingParams,
        *,
        metrics: RequestMetrics,
        priority: int,
        name: str,
    ) -> Request:
        """Tokenize a prompt, check that it can be pooled, and create its request.

        Raises:
            RequestError: The prompt or a parameter is invalid; the message lists what is accepted.
        """
        self.rules.check(params)
        prompt = _with_prompt(prompt, self.rules, params.prompt_name)
        tokenized = self._tokenized(prompt, params.truncate_prompt_tokens, name)
        token_ids = tokenized.token_ids
        return Request(
            request_id=request_id,
            prompt=tokenized.text,
            prompt_token_ids=token_ids,
            params=_ONE_TOKEN,
            rule=StopRule.from_params(_ONE_TOKEN, eos_token_ids=(), max_new_tokens=1),
            row_sampler=RowSampler(
                _ONE_TOKEN,
                prompt_token_ids=token_ids,
                bad_words=None,
                banned_at_first=(),
                num_candidates=0,
                key=(0, 0),
                pair_start=tokenized.pair_start,
            ),
            detokenizer=None,
            output_kind=RequestOutputKind.FINAL_ONLY,
            metrics=metrics,
            salt=tokenized.salt,
            priority=priority,
            search=None,
            prompt_logprobs=None,
        )

    def _tokenized(self, prompt: ParsedPrompt, most: int | None, name: str) -> TokenizedPrompt:
        """Tokenize a prompt to be pooled, truncated to ``most`` tokens if that is not None."""
        if prompt.images:
            raise RequestError(f"{name} has images, and pooling models take text alone")
        if prompt.branches:
            raise RequestError(f"{name} has branches, and pooling models take none")
        most = self.max_model_len if most == -1 else most
        pair_start = None
        if prompt.text_pair is not None:
            prompt, pair_start = self._encoded_pair(prompt, most, name)
        encode = partial(self._encode, max_length=most)
        tokenized = tokenize_prompt(prompt, name, encode=encode, vocab_size=self.vocab_size)
        token_ids = tokenized.token_ids[:most]
        if len(token_ids) > self.max_model_len:
            why = (
                f"{name} has {len(token_ids)} tokens; it must have at most {self.max_model_len}, "
                "or truncate_prompt_tokens=-1 shortens it"
            )
            most = self.max_model_len
            raise too_long(len(token_ids), most=most, max_model_len=self.max_model_len, why=why)
        # No token follows it, so it may have max_model_len tokens.
        check_length(self.scheduler, max(1, len(token_ids) - 1), self.max_model_len, name)
        return replace(tokenized, token_ids=token_ids, pair_start=pair_start)

    def _encoded_pair(
        self, prompt: ParsedPrompt, most: int | None, name: str
    ) -> tuple[ParsedPrompt, int | None]:
        """Tokenize a pair of texts; return also the start of the second if the model needs it.

        Raises:
            RequestError: The model encodes each text separately.
        """
        classes = self.rules.classes
        if classes is None:
            raise RequestError(f"{name} has text_pair, and the model embeds each text separately")
        first, second = prompt.text or "", prompt.text_pair or ""
        check_unicode(first + second, name)
        encoded = self.tokenizer(
            first, second, verbose=False, truncation=most is not None, max_length=most
        )
        types = encoded.get("token_type_ids") if classes.has_token_types else None
        start = types.index(1) if types and 1 in types else None
        return replace(prompt, token_ids=encoded.input_ids), start

    def _encode(self, text: str, max_length: int | None) -> list[int]:
        # verbose: the length is checked here, against the limit of this engine.
        token_ids: list[int] = self.tokenizer(
            text.lower() if self.rules.lowercases else text,
            verbose=False,
            truncation=max_length is not None,
            max_length=max_length,
        ).input_ids
        return token_ids


def _with_prompt(
    prompt: ParsedPrompt, rules: PoolingRules, prompt_name: str | None
) -> ParsedPrompt:
    """Prepend a named prefix of the model to a text; token ids stay unchanged."""
    name = prompt_name or rules.default_prompt_name
    if name is None or prompt.text is None or prompt.token_ids is not None:
        return prompt
    return replace(prompt, text=rules.prompts[name] + prompt.text)
