"""Conversion of a prompt and parameters to a request that can be run.

Checks everything that is known before the first step.  A request that passes can run alone; the
scheduler may still end it ("ignored") if its output outgrows the KV pool.  Nothing here accesses
the scheduler's state, so any thread may call it during a step.
"""

import copy
import itertools
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field, replace
from typing import Final, Self

from pagedserve._core import Scheduler, SchedulerConfig
from pagedserve.config import EngineArgs
from pagedserve.engine.continuation import continue_behind
from pagedserve.engine.grammars import LazyGrammarCompiler, grammar_of
from pagedserve.engine.pooling_inputs import PoolingProcessor
from pagedserve.engine.processors import ProcessorFactory, with_processors
from pagedserve.engine.prompt_length import check_length
from pagedserve.engine.request import Request, start_search
from pagedserve.engine.row_sampler import OWN_DRAWS, DrawKey, RowSampler
from pagedserve.engine.stats import request_time
from pagedserve.engine.thinking import Thinking, ThinkingTags
from pagedserve.errors import RequestError
from pagedserve.executor.protocol import Adapter, Executor, ModelInfo
from pagedserve.inputs.audio import AudioFeatures
from pagedserve.inputs.branches import check_read_params
from pagedserve.inputs.encoder_prompts import split_prompt
from pagedserve.inputs.prompt_images import ImagePlacer, PromptImages
from pagedserve.inputs.prompts import (
    ParsedPrompt,
    TokenizedPrompt,
    check_priority,
    check_range,
    tokenize_prompt,
)
from pagedserve.lora.request import LoRARequest
from pagedserve.output.detokenizer import Detokenizer
from pagedserve.output.stop import StopRule
from pagedserve.outputs import RequestMetrics
from pagedserve.pooling_params import PoolingParams
from pagedserve.sampling.bad_words import BadWords
from pagedserve.sampling.grammar import GrammarStates
from pagedserve.sampling_params import RequestOutputKind, SamplingParams
from pagedserve.tokenizer import Tokenizer

# Added to a request's number: the salt of a prompt that must miss the prefix cache.
_PRIVATE_SALT: Final = 1 << 63


@dataclass(slots=True, kw_only=True)
class InputProcessor:
    """Checks requests against the limits of one engine.

    Attributes:
        tokenizer: Tokenizer of the model.
        model: Properties of the model.
        scheduler: Knows which prompts can never run.
        max_num_seqs: Maximum sequences per step.
        max_model_len: Maximum tokens of a sequence.
        args: Options of the engine.
        images: Image placer; None if the model does not accept images.
        audio: Computes features of audio; None if the model does not accept audio.
        processors: Create the logits processors of each request.
        grammars: Grammar compiler.
    """

    tokenizer: Tokenizer
    model: ModelInfo
    scheduler: Scheduler
    max_num_seqs: int
    max_model_len: int
    args: EngineArgs
    images: ImagePlacer | None = None
    audio: AudioFeatures | None = None
    processors: tuple[ProcessorFactory, ...] = ()
    grammars: LazyGrammarCompiler = field(init=False)
    _pooling: PoolingProcessor | None = field(init=False, default=None)
    _numbers: "itertools.count[int]" = field(default_factory=itertools.count)
    _detokenizers: dict[bool, Detokenizer] = field(default_factory=dict)
    _tags: ThinkingTags | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        model = self.model
        self.grammars = LazyGrammarCompiler(self.tokenizer, model)
        if model.pooling is not None:
            self._pooling = PoolingProcessor(
                tokenizer=copy.deepcopy(self.tokenizer),
                rules=model.pooling,
                vocab_size=model.vocab_size,
                scheduler=self.scheduler,
                max_model_len=self.max_model_len,
            )

    @classmethod
    def of(
        cls,
        args: EngineArgs,
        tokenizer: Tokenizer,
        executor: Executor,
        scheduler: Scheduler,
        config: SchedulerConfig,
        *,
        processors: tuple[ProcessorFactory, ...],
    ) -> Self:
        """Create the input processor of an engine.

        Raises:
            ModelLoadError: The model's image or audio processor cannot be loaded.
        """
        return cls(
            tokenizer=tokenizer,
            model=executor.model_info,
            scheduler=scheduler,
            max_num_seqs=config.max_num_seqs,
            max_model_len=config.max_model_len,
            args=args,
            images=_image_placer(args, tokenizer, executor),
            audio=_audio_features(args, executor.model_info),
            processors=processors,
        )

    def process(
        self,
        request_id: str,
        prompt: ParsedPrompt,
        params: SamplingParams | PoolingParams,
        *,
        arrival_time: float | None = None,
        priority: int = 0,
        lora_request: LoRARequest | None = None,
        adapter: Adapter | None = None,
        output_kind: RequestOutputKind | None = None,
        output_token_ids: SequenceOf[int] = (),
        draws: DrawKey = OWN_DRAWS,
        name: str = "the prompt",
    ) -> Request:
        """Tokenize a prompt, check that the request can be run, and create it.

        Args:
            request_id: Request id.
            prompt: Prompt parsed by ``pagedserve.inputs.prompts``.
            params: Sampling parameters, or pooling parameters.
            arrival_time: Seconds of the wall clock; None is now.
            priority: Priority; the lowest is served first, with ``scheduling_policy="priority"``.
            lora_request: Adapter to use.
            adapter: The loaded adapter.
            output_kind: Overrides that of the parameters.
            output_token_ids: Tokens generated by another engine, after which generation resumes.
            draws: Selects its random numbers.
            name: Name of the prompt in errors.

        Raises:
            RequestError: The prompt or a parameter is invalid; the message lists what is accepted.
        """
        priority = check_priority("priority", priority)
        metrics = RequestMetrics(request_time() if arrival_time is None else arrival_time)
        prompt, encoder, rules = split_prompt(
            prompt,
            self.model.encoder_decoder,
            name,
            vocab_size=self.model.vocab_size,
            encode=self._encode,
            encode_bare=self._encode_word,
            audio=self.audio,
        )
        if isinstance(params, PoolingParams):
            if self._pooling is None:
                raise RequestError(
                    f"the model was loaded to generate (runner={self.args.runner!r}); accepted are "
                    "completions and chats, or a model that is loaded with runner='pooling'"
                )
            return self._pooling.process(
                request_id, prompt, params, metrics=metrics, priority=priority, name=name
            )
        self._check_generates(prompt, name)
        if prompt.branches:
            self._check_branches(prompt, params, name)
        vocab_size = self.model.vocab_size
        params = params.resolved(max_model_len=self.max_model_len, vocab_size=vocab_size)
        params = with_processors(params, self.processors)
        tokenized, images = self._tokenized(prompt, params, lora_request, name)
        token_ids = tokenized.token_ids
        self._check_params(params)
        if rules is not None:
            rules.check(params, name)
        grammar = grammar_of(params, self.grammars, num_drafts=self.args.num_drafts)
        params = params.with_prompt(token_ids)
        detokenizer = self._detokenizer(params) if params.detokenize else None
        rule = StopRule.from_params(
            params,
            eos_token_ids=self.model.eos_token_ids,
            max_new_tokens=max(1, self.max_model_len - len(token_ids)),
            hidden_tokens=None if detokenizer is None else detokenizer.hidden_tokens,
        )
        words = params.bad_words
        bad_words = BadWords.from_words(words, self._encode_word, vocab_size) if words else None
        number = next(self._numbers)
        search = start_search(params, rule, detokenizer) if params.use_beam_search else None
        # Cached tokens are not computed, so they get no log-probabilities.
        salt = tokenized.salt if params.prompt_logprobs is None else _PRIVATE_SALT + number
        if params.use_beam_search or params.chooses_best:  # the best is not known before the end
            output_kind = RequestOutputKind.FINAL_ONLY
        request = Request(
            request_id=request_id,
            prompt=tokenized.text,
            prompt_token_ids=token_ids,
            params=params,
            rule=rule,
            row_sampler=RowSampler(
                params,
                prompt_token_ids=token_ids,
                bad_words=bad_words,
                banned_at_first=rule.banned_at_first,
                rules=rules,
                grammar=grammar,
                thinking=self._thinking(params, token_ids, grammar),
                num_candidates=max(search.num_candidates, params.logprobs or 0) if search else 0,
                key=draws.key(params.seed, self.args.seed, number),
                choice=draws.choice,
            ),
            detokenizer=detokenizer,
            output_kind=params.output_kind if output_kind is None else output_kind,
            metrics=metrics,
            salt=salt,
            priority=priority,
            search=search,
            prompt_logprobs=None if params.prompt_logprobs is None else [],
            lora_request=lora_request,
            adapter=adapter,
            images=images,
            encoder=encoder,
            branches=prompt.branches,
            prediction=self._predicted(params.prediction),
        )
        if len(output_token_ids):
            continue_behind(
                request, output_token_ids, vocab_size=vocab_size, scheduler=self.scheduler
            )
        return request

    def _tokenized(
        self,
        prompt: ParsedPrompt,
        params: SamplingParams,
        lora_request: LoRARequest | None,
        name: str,
    ) -> tuple[TokenizedPrompt, PromptImages | None]:
        """Tokenize a prompt, place its images and truncate it.

        Raises:
            RequestError: It is invalid, or can never run.
        """
        tokenized = tokenize_prompt(
            prompt, name, encode=self._encode, vocab_size=self.model.vocab_size
        )
        images = None
        if prompt.images:
            self._check_images(params, lora_request, name)
        if self.images is not None and self.images.has_any(tokenized, prompt.images):
            tokenized, images = self.images.place(tokenized, prompt.images, name)
        token_ids = tokenized.token_ids
        if params.truncate_prompt_tokens is not None:
            token_ids = token_ids[-params.truncate_prompt_tokens :]
        num_tokens = len(token_ids) - self._is_scored(token_ids, params)
        num_tokens += max((len(branch.token_ids) for branch in prompt.branches), default=0)
        check_length(self.scheduler, num_tokens, self.max_model_len, name)
        return replace(tokenized, token_ids=token_ids), images

    def _check_generates(self, prompt: ParsedPrompt, name: str) -> None:
        """Refuse a prompt that a pooling model cannot continue, or that is for a pooling model.

        Raises:
            RequestError: The model and the prompt do not match.
        """
        if self.model.pooling is not None:
            raise RequestError(
                f"the model was loaded to pool (runner={self.args.runner!r}), and makes no tokens; "
                "accepted are embeddings and scores, or a model that is loaded with "
                "runner='generate'"
            )
        if prompt.text_pair is not None:
            raise RequestError(f"{name} has text_pair, which is for models that compare two texts")

    def _check_branches(self, prompt: ParsedPrompt, params: SamplingParams, name: str) -> None:
        """Refuse branches that cannot be read, and other parameters than theirs.

        Raises:
            RequestError: As ``check_read_params``; tokens outside the vocabulary, a branch without
                labels, or more branches than sequences that run together.
        """
        check_read_params(params, name)
        if self.model.encoder_decoder is not None:
            raise RequestError(f"{name} has branches, which models with an encoder do not take")
        if len(prompt.branches) > self.max_num_seqs:
            raise RequestError(
                f"{name} has {len(prompt.branches)} branches; max_num_seqs is "
                f"{self.max_num_seqs}, and the branches of a prompt run together"
            )
        for index, branch in enumerate(prompt.branches):
            place, size = f"branch {index} of {name}", self.model.vocab_size
            check_range(branch.token_ids, place, size)
            check_range(branch.label_token_ids, f"the labels of {place}", size)
            if not branch.label_token_ids:
                raise RequestError(f"{place} has no labels; it must have at least one")

    def _check_images(
        self, params: SamplingParams, lora_request: LoRARequest | None, name: str
    ) -> None:
        """Refuse a prompt with images where it cannot have them.

        Raises:
            RequestError: Images are not supported with the other arguments.
        """
        reason = self.model.images if isinstance(self.model.images, str) else None
        if reason is None and lora_request is not None:
            reason = "adapters are for prompts of text alone"
        if reason is None and params.truncate_prompt_tokens is not None:
            reason = "truncate_prompt_tokens would cut them: leave it out"
        if reason is not None:
            raise RequestError(f"{name} has images, and {reason}")

    def _is_scored(self, token_ids: list[int], params: SamplingParams) -> bool:
        """Whether a prompt may have ``max_model_len`` tokens: its one new token is not computed."""
        fills = len(token_ids) == self.max_model_len
        return fills and params.max_tokens == 1 and params.prompt_logprobs is not None

    def _thinking(
        self, params: SamplingParams, token_ids: list[int], grammar: GrammarStates | None
    ) -> Thinking | None:
        """The reasoning of a request after its prompt.

        None without a budget, unless a grammar follows reasoning whose tags an option gives.

        Raises:
            RequestError: A budget, and the tags of the model are unknown.
        """
        budget, known = params.thinking_token_budget, self.args.reasoning_config
        if budget is None and (known is None or grammar is None or params.use_beam_search):
            return None
        if self._tags is None:
            self._tags = ThinkingTags.of(known, self.tokenizer)
        return Thinking(
            self._tags,
            budget,
            prompt_token_ids=token_ids,
            num_drafts=self.args.num_drafts,
            grammar=grammar,
        )

    def _predicted(self, text: str | None) -> list[int]:
        """Tokens of a prediction up to one that the model lacks; none without draft tokens."""
        token_ids = self._encode_word(text) if text is not None and self.args.num_drafts else []
        return list(itertools.takewhile(lambda token: token < self.model.vocab_size, token_ids))

    def _detokenizer(self, params: SamplingParams) -> Detokenizer:
        skip = params.skip_special_tokens
        if skip not in self._detokenizers:
            self._detokenizers[skip] = Detokenizer(self.tokenizer, skip_special_tokens=skip)
        return self._detokenizers[skip]

    def _check_params(self, params: SamplingParams) -> None:
        num_seqs, vocab_size = params.max_num_running_seqs, self.model.vocab_size
        if num_seqs > self.max_num_seqs:
            name = "n" if params.best_of is None else "best_of"
            raise RequestError(
                f"{name} is {num_seqs}; max_num_seqs is {self.max_num_seqs}, and the sequences of "
                "a request run together",
                param=name,
            )
        if self.model.encoder_decoder is not None and params.truncate_prompt_tokens is not None:
            raise RequestError(
                f"truncate_prompt_tokens is {params.truncate_prompt_tokens}, and the prompt of an "
                "encoder is not truncated: leave it out",
                param="truncate_prompt_tokens",
            )
        most = self.args.max_logprobs
        for name in ("logprobs", "prompt_logprobs"):
            number = getattr(params, name)
            if number is not None and number > vocab_size:
                raise RequestError(
                    f"{name} is {number}; it must be at most {vocab_size}, the size of the "
                    "vocabulary",
                    param=name,
                )
            if number is not None and number > most >= 0:
                raise RequestError(f"{name} is {number}; max_logprobs is {most}", param=name)
        biased = [token for token, _ in params.logit_bias]
        for name, tokens in (
            ("stop_token_ids", params.stop_token_ids),
            ("allowed_token_ids", params.allowed_token_ids or ()),
            ("logit_bias", biased),
        ):
            if any(token >= vocab_size for token in tokens):
                raise RequestError(
                    f"{name} has {max(tokens)}; token ids must be from 0 to {vocab_size - 1}, the "
                    "last of the vocabulary",
                    param=name,
                )

    def _encode_word(self, text: str) -> list[int]:
        token_ids: list[int] = self.tokenizer(text, add_special_tokens=False).input_ids
        return token_ids

    def _encode(self, text: str) -> list[int]:
        # verbose: the length is checked here, against the limit of this engine.
        token_ids: list[int] = self.tokenizer(text, verbose=False).input_ids
        return token_ids


def _image_placer(args: EngineArgs, tokenizer: Tokenizer, executor: Executor) -> ImagePlacer | None:
    """Create the image placer; None if the model does not accept images.

    Raises:
        ModelLoadError: The model's image processor cannot be loaded.
    """
    rules = executor.model_info.images
    if isinstance(rules, str):
        return None
    from pagedserve.models.image_processor import load_image_processor

    processor = load_image_processor(args, tokenizer)
    return ImagePlacer(
        token_id=processor.token_id,
        rules=rules,
        preprocess=processor.place,
        positions=executor.image_positions,
    )


def _audio_features(args: EngineArgs, model: ModelInfo) -> AudioFeatures | None:
    """Load the audio processor; None if the model does not accept audio.

    Raises:
        ModelLoadError: It cannot be loaded.
    """
    if model.encoder_decoder is None or model.encoder_decoder.speech is None:
        return None
    from pagedserve.models.audio_processor import load_audio_processor

    return load_audio_processor(args).features
