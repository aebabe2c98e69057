"""``LLM``: offline inference; one call takes prompts and returns outputs."""

import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Final, Literal, NoReturn, Self, SupportsIndex, Unpack

import pagedserve.checks as checks
import pagedserve.output.pooling as vectors
from pagedserve.config import EngineArgs
from pagedserve.config.engine_args import takes_engine_options
from pagedserve.config.engine_options import EngineOptions
from pagedserve.engine.batches import Batches, PoolingOptions, UseTqdm
from pagedserve.engine.calls import Calls, in_turn
from pagedserve.engine.defaults import default_sampling_params
from pagedserve.engine.engine_metrics import EngineMetrics
from pagedserve.engine.guard import ModelOwner
from pagedserve.engine.llm_engine import LLMEngine
from pagedserve.engine.metric_families import engine_labels
from pagedserve.engine.request_metrics import RequestCounts
from pagedserve.errors import EngineDeadError
from pagedserve.inputs import TextPrompt
from pagedserve.inputs.branches import READ_PARAMS
from pagedserve.inputs.chat import Conversation, chat_prompt, conversations_of, read_chat_template
from pagedserve.inputs.prompts import (
    Prompts,
    match_params,
    match_pooling_params,
    match_priorities,
    parse_prompt,
    parse_prompts,
    truncation_of,
)
from pagedserve.lora.request import LoRARequest, match_lora_requests
from pagedserve.outputs import (
    BeamSearchOutput,
    ClassificationRequestOutput,
    EmbeddingRequestOutput,
    PoolingRequestOutput,
    RequestOutput,
    ScoringRequestOutput,
)
from pagedserve.pooling_params import PoolingParams, PoolingTask
from pagedserve.sampling_params import BeamSearchParams, RequestOutputKind, SamplingParams
from pagedserve.tokenizer import Tokenizer
from pagedserve.vllm_names import (
    ABSENT_METHODS,
    AbsentArguments,
    AbsentPoolingArguments,
    refuse_arguments,
)

if TYPE_CHECKING:  # what a method alone uses is imported when it is called
    from pagedserve.decisions.answers import Decision
    from pagedserve.decisions.calibration import Calibration
    from pagedserve.decisions.prompts import DecisionPrompts
    from pagedserve.decisions.questions import Question
    from pagedserve.metrics import Metric

_CONTENT_FORMAT: Final = checks.choice(("auto", "string", "openai"))


class LLM(ModelOwner):
    """A model that generates from batches of prompts; a context manager that shuts it down.

    Thread-safe: calls run one at a time, in the order of arrival.  A call made during a call, from
    a logits processor for example, raises ``ConcurrentCallError``; one after ``shutdown``, or in a
    forked child, raises ``EngineDeadError``.

    Attributes:
        llm_engine: The engine.  Do not call ``generate`` while you drive it step by step.
        calls: Lock that serves calls in the order of arrival.
    """

    @takes_engine_options
    def __init__(self, model: str, **options: Unpack[EngineOptions]) -> None:
        """Load a model and allocate its KV cache; print the chosen settings to stderr.

        Args:
            model: "smollm2", a local directory in Hugging Face format, a .gguf file or a hub id.
            **options: The other fields of ``EngineArgs``; ``help(pagedserve.EngineArgs)`` and
                docs/options.md list them.

        Raises:
            ConfigError: Arguments that contradict each other, the model or the available memory.
            ModelLoadError: The model cannot be found, read or run.
        """
        self._args = EngineArgs(model, **options)
        self._default_params: SamplingParams | None = None
        self.llm_engine = LLMEngine(self._args)
        self.calls, self._num_calls = Calls(self.llm_engine.guard), 0
        labels = engine_labels(model)
        self._batches = Batches(self.llm_engine, RequestCounts(labels))
        self._metrics = EngineMetrics(labels)
        if self._args.use_tqdm_on_load:
            for line in (self.llm_engine.memory.describe(), self.llm_engine.model_info.backends):
                print(line, file=sys.stderr)  # noqa: T201  # for the user

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs) -> Self:
        """Create an LLM from ``engine_args``; the same as calling the class with its values."""
        return cls(**engine_args.llm_options)

    @cached_property
    def _decisions(self) -> "DecisionPrompts":
        from pagedserve.decisions.prompts import DecisionPrompts

        return DecisionPrompts(self.llm_engine.input_processor.tokenizer)

    def shutdown(self) -> None:
        """Free the memory and stop the ranks of the model.

        Waits for earlier calls; later ones raise ``EngineDeadError``.  Does nothing if already shut
        down, or in a forked child.
        """
        with suppress(EngineDeadError):
            self.calls.run("shutdown", self.llm_engine.shutdown)

    def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer: that of transformers, imported here, where torch may run it."""
        return self.llm_engine.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """Default sampling parameters; ``generation_config`` selects their source.

        Raises:
            ConfigError: ``generation_config`` cannot be read, or has an invalid value.
        """
        if self._default_params is None:
            self._default_params = default_sampling_params(self._args)
        return self._default_params.clone()

    @in_turn
    def reset_prefix_cache(
        self,
        reset_running_requests: bool | None = False,  # noqa: ARG002  # no request is running
        reset_connector: bool = False,  # noqa: ARG002  # no connector exists
    ) -> bool:
        """Drop every cached prefix.

        Returns:
            Whether the cache was reset; between two ``generate`` calls it always is.
        """
        return self.llm_engine.reset_prefix_cache()

    @in_turn
    def generate(
        self,
        prompts: Prompts | None = None,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        prompt_token_ids: Sequence[SupportsIndex] | Sequence[Sequence[SupportsIndex]] | None = None,
        use_tqdm: UseTqdm = True,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        *,
        priority: int | Sequence[int] | None = None,
        **absent: Unpack[AbsentArguments],
    ) -> list[RequestOutput]:
        """Generate completions of prompts, in one batch.

        All requests are checked before the first is added.  After any exception, including
        ``KeyboardInterrupt``, all of them are aborted and the engine stays usable.

        Args:
            prompts: One prompt or several: strings, lists of token ids, ``TextPrompt`` or
                ``TokensPrompt``.
            sampling_params: One for all or one per prompt; None is
                ``get_default_sampling_params()``.
            prompt_token_ids: Token ids of one prompt or of several, instead of ``prompts``.
            use_tqdm: Show a progress bar on stderr, with the engine's statistics every few seconds;
                or a callable that creates the bar, with the signature of ``tqdm.tqdm``.
            lora_request: Adapter to use: one for all, or one or None per prompt; requires
                ``enable_lora``.
            priority: One for all or one per prompt; the lowest number is served first, with
                ``scheduling_policy="priority"``.
            **absent: Arguments of vLLM without effect here, such as
                ``prompt_adapter_request=None``.

        Returns:
            The finished outputs in the order of the prompts.

        Raises:
            RequestError: A prompt, parameter or adapter is not accepted; the message names it and
                the reason.
            ConcurrentCallError: It is called during another call of the same thread.
            EngineDeadError: After ``shutdown``, or in a forked child.
        """
        refuse_arguments(absent)
        parsed = parse_prompts(prompts, prompt_token_ids)
        if sampling_params is None:
            sampling_params = self.get_default_sampling_params()
        params = match_params(sampling_params, len(parsed))
        priorities = match_priorities(priority, len(parsed))
        lora_requests = match_lora_requests(lora_request, len(parsed))
        engine = self.llm_engine
        adapters = {
            wanted: None if wanted is None else engine.adapters.load(wanted)
            for wanted in dict.fromkeys(lora_requests)
        }
        call, single = self._num_calls, len(parsed) == 1
        self._num_calls += 1
        requests = [
            engine.input_processor.process(
                f"generate-{call}-{index}",
                prompt,
                own,
                priority=priorities[index],
                lora_request=lora_requests[index],
                adapter=adapters[lora_requests[index]],
                output_kind=RequestOutputKind.FINAL_ONLY,
                name="the prompt" if single else f"prompt {index}",
            )
            for index, (prompt, own) in enumerate(zip(parsed, params, strict=True))
        ]
        return self._batches.run(requests, use_tqdm=use_tqdm)

    def chat(  # noqa: PLR0917  # in vLLM's order
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: UseTqdm = True,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        chat_template: str | None = None,
        chat_template_content_format: Literal["auto", "string", "openai"] = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **absent: Unpack[AbsentArguments],
    ) -> list[RequestOutput]:
        """Generate the assistant's reply to one or more conversations.

        Args:
            messages: Messages with "role" and "content", or a list of such lists.  Images, for
                models that accept them, are content parts as in OpenAI's API, or Pillow images.
            sampling_params: As in ``generate``.
            use_tqdm: As in ``generate``.
            lora_request: As in ``generate``.
            chat_template: Template to use instead of the model's: a file, or the template itself.
            chat_template_content_format: "auto" or "string": text parts are joined to one string;
                "openai": the template gets a list of parts.
            add_generation_prompt: Append the prompt that starts the assistant's reply.
            continue_final_message: Leave the last message open, so that generation continues it.
            tools: Tool definitions passed to the template.
            chat_template_kwargs: Further variables of the template.
            **absent: As in ``generate``.

        Returns:
            The finished outputs in the order of the conversations.

        Raises:
            RequestError: Messages or parameters are invalid.
            ConfigError: The template file cannot be read.
        """
        chat_template = read_chat_template(chat_template)
        _CONTENT_FORMAT("chat_template_content_format", chat_template_content_format)
        prompts = [
            chat_prompt(
                self.llm_engine.input_processor.tokenizer,
                conversation,
                chat_template=chat_template,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tools=tools,
                chat_template_kwargs=chat_template_kwargs,
                images=self.llm_engine.model_info.images,
                keeps_parts=chat_template_content_format == "openai",
            )
            for conversation in conversations_of(messages)
        ]
        return self.generate(
            prompts, sampling_params, use_tqdm=use_tqdm, lora_request=lora_request, **absent
        )

    def beam_search(
        self,
        prompts: Prompts,
        params: BeamSearchParams,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        *,
        use_tqdm: UseTqdm = False,
        concurrency_limit: int | None = None,  # noqa: ARG002  # the scheduler's
        **absent: Unpack[AbsentArguments],
    ) -> list[BeamSearchOutput]:
        """Run beam search on prompts.

        Args:
            prompts: As in ``generate``.
            params: Beam width, length limit and other parameters of the search.
            lora_request: As in ``generate``.
            use_tqdm: As in ``generate``.
            concurrency_limit: Without effect: the scheduler runs as many as memory allows.
            **absent: As in ``generate``.

        Returns:
            The beams of each prompt, best first.

        Raises:
            RequestError: A prompt or parameter is not accepted; the message names it and the
                reason.
        """
        if not isinstance(params, BeamSearchParams):
            checks.refuse("params", params, "BeamSearchParams")
        outputs = self.generate(
            prompts,
            params.sampling_params(),
            use_tqdm=use_tqdm,
            lora_request=lora_request,
            **absent,
        )
        tokenizer = self.llm_engine.input_processor.tokenizer
        of = partial(
            BeamSearchOutput.of,
            decode=lambda ids: str(tokenizer.decode(ids)),
            keeps_end=params.include_stop_str_in_output,
        )
        return list(map(of, outputs))

    @in_turn
    def decide(
        self,
        state: object,
        questions: "Mapping[str, Question]",
        *,
        instructions: str | None = None,
        calibration: "Calibration | None" = None,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        lora_request: LoRARequest | None = None,
    ) -> "Decision":
        """Answer typed questions about a state, with probabilities.

        The state is computed once, and all questions are read in one step.  The probabilities of a
        question are those that it has alone, to the last bit.

        Args:
            state: What the questions are about: a text, or a JSON value.
            questions: Questions by id, each with "type", "instructions" and "criteria".
            instructions: System message before the state.
            calibration: Temperature of each type of questions; None is 1 for all.
            chat_template: As in ``chat``.
            chat_template_kwargs: As in ``chat``; ``enable_thinking`` is False.
            lora_request: Adapter to use.

        Returns:
            The answers and their diagnostics, by the ids of the questions.

        Raises:
            RequestError: A question is not accepted, or a label is not one token of the model.
            ConfigError: The template file cannot be read.
        """
        from pagedserve.decisions.answers import make_decision
        from pagedserve.decisions.calibration import Calibration
        from pagedserve.decisions.prompts import Asked, num_prompt_tokens
        from pagedserve.decisions.questions import parse_questions
        from pagedserve.decisions.reads import reads_of

        if not isinstance(calibration, Calibration | None):
            checks.refuse("calibration", calibration, "a Calibration or None")
        asked = Asked(
            state=state,
            questions=parse_questions(questions),
            instructions=instructions,
            chat_template=read_chat_template(chat_template),
            chat_template_kwargs=chat_template_kwargs,
        )
        prompt, call = self._decisions.make(asked), self._num_calls
        self._num_calls += 1
        request = self.llm_engine.input_processor.process(
            f"decide-{call}",
            parse_prompt(prompt, "the decision"),
            READ_PARAMS,
            lora_request=lora_request,
            adapter=None if lora_request is None else self.llm_engine.adapters.load(lora_request),
        )
        (output,) = self._batches.run([request], use_tqdm=False)
        num_tokens = num_prompt_tokens(prompt)
        return make_decision(asked.questions, reads_of(output, prompt), num_tokens, calibration)

    @in_turn
    def encode(
        self,
        prompts: Prompts,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        *,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: UseTqdm = True,
        pooling_task: PoolingTask = "encode",
        **absent: Unpack[AbsentPoolingArguments],
    ) -> list[PoolingRequestOutput]:
        """Compute one pooled vector per prompt, with a pooling model.

        Args:
            prompts: As in ``generate``.
            pooling_params: For all prompts, or a list with one a prompt; None is
                ``PoolingParams()``.
            truncate_prompt_tokens: In place of that of ``pooling_params``, unless it is None.
            use_tqdm: As in ``generate``.
            pooling_task: Task of the vectors; "encode" is the model's default.
            **absent: As in ``generate``; ``tokenization_kwargs`` may have
                ``truncate_prompt_tokens``.

        Returns:
            The vectors in the order of the prompts.

        Raises:
            RequestError: A prompt or parameter is not accepted, or the model is a generative one;
                the message names it and the reason.
        """
        kwargs_truncation = truncation_of(absent.pop("tokenization_kwargs", None))
        refuse_arguments(absent)
        parsed = parse_prompts(prompts)
        matched = match_pooling_params(pooling_params, len(parsed))
        if truncate_prompt_tokens is None:
            truncate_prompt_tokens = kwargs_truncation
        if truncate_prompt_tokens is not None:
            matched = [
                replace(params, truncate_prompt_tokens=truncate_prompt_tokens) for params in matched
            ]
        rules, engine = self.llm_engine.model_info.pooling, self.llm_engine
        if rules is not None:
            rules.check_task(pooling_task)
        call = self._num_calls
        self._num_calls += 1
        requests = [
            engine.input_processor.process(
                f"pool-{call}-{index}", prompt, params, name=f"prompt {index}"
            )
            for index, (prompt, params) in enumerate(zip(parsed, matched, strict=True))
        ]
        outputs = self._batches.run(requests, use_tqdm=use_tqdm)
        return [
            vectors.pooling_output(output, rules, params)
            for output, params in zip(outputs, matched, strict=True)
        ]

    def embed(
        self, prompts: Prompts, **options: Unpack[PoolingOptions]
    ) -> list[EmbeddingRequestOutput]:
        """Compute an embedding of each prompt.

        Args:
            prompts: As in ``generate``.
            **options: As in ``encode``.

        Returns:
            The embeddings in the order of the prompts.

        Raises:
            RequestError: As in ``encode``.
        """
        pooled = self.encode(prompts, pooling_task="embed", **options)
        return [vectors.embedding_output(output) for output in pooled]

    def classify(
        self, prompts: Prompts, **options: Unpack[PoolingOptions]
    ) -> list[ClassificationRequestOutput]:
        """Compute the class probabilities of each prompt, with a classification model.

        Args:
            prompts: As in ``generate``; also ``{"prompt": ..., "text_pair": ...}``.
            **options: As in ``encode``.

        Returns:
            The probabilities in the order of the prompts.

        Raises:
            RequestError: As in ``encode``.
        """
        pooled = self.encode(prompts, pooling_task="classify", **options)
        return [vectors.classification_output(output) for output in pooled]

    def score(
        self,
        data_1: str | Sequence[str],
        data_2: str | Sequence[str],
        **options: Unpack[PoolingOptions],
    ) -> list[ScoringRequestOutput]:
        """Score pairs of texts: cosine of their embeddings, or the output of a cross-encoder.

        Args:
            data_1: One text, paired with each of ``data_2``, or as many texts as ``data_2``.
            data_2: Texts.
            **options: As in ``encode``.

        Returns:
            One score per pair.

        Raises:
            RequestError: As in ``encode``; also lists of different lengths.
        """
        pairs = vectors.match_pairs("data_1", data_1, data_2)
        rules = self.llm_engine.model_info.pooling
        if rules is not None and rules.takes_pairs:
            both = [TextPrompt(prompt=left, text_pair=right) for left, right in pairs]
            scored = self.encode(both, pooling_task="score", **options)
            return [vectors.pair_output(output) for output in scored]
        texts = list(dict.fromkeys(text for pair in pairs for text in pair))
        embedded = self.encode(texts, pooling_task="score", **options)
        pooled = dict(zip(texts, embedded, strict=True))
        return [vectors.scoring_output(pooled[left], pooled[right]) for left, right in pairs]

    def get_metrics(self) -> "list[Metric]":
        """Metrics of the engine and of finished requests, with the names of ``/metrics``."""
        from pagedserve.metrics import metrics_of

        snapshot = self.llm_engine.snapshot()
        families = [*self._batches.counts.families(), *self._metrics.families(snapshot)]
        return list(metrics_of(families))

    if not TYPE_CHECKING:  # which would accept any name

        def __getattr__(self, name: str) -> NoReturn:
            reason = ABSENT_METHODS.get(name)
            said = f"{type(self).__name__!r} object has no attribute {name!r}"
            raise AttributeError(said if reason is None else f"{said}: {reason}")
