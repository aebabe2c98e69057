"""``LLM``: prompts in, outputs out, in one call."""

import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final, Literal, NoReturn, SupportsIndex, TypeAlias

from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

import pagedserve.checks as checks
import pagedserve.executor.local  # noqa: F401  # who lacks torch is told when LLM is asked for
import pagedserve.pooling.vectors as vectors
from pagedserve.chat import Conversation, chat_prompt, conversations_of, read_chat_template
from pagedserve.config import EngineArgs
from pagedserve.engine.defaults import default_sampling_params
from pagedserve.engine.llm_engine import LLMEngine
from pagedserve.engine.request import Request
from pagedserve.engine.stats import StatsLine
from pagedserve.inputs import Prompt, match_params, match_priorities, parse_prompts
from pagedserve.lora.request import LoRARequest, match_lora_requests
from pagedserve.outputs import (
    BeamSearchOutput,
    ClassificationRequestOutput,
    EmbeddingRequestOutput,
    PoolingRequestOutput,
    RequestOutput,
    ScoringRequestOutput,
)
from pagedserve.pooling.rules import PoolingTask
from pagedserve.pooling_params import PoolingParams
from pagedserve.sampling_params import BeamSearchParams, RequestOutputKind, SamplingParams
from pagedserve.vllm_names import ABSENT_METHODS, refuse_arguments

# Whether a progress bar is shown, or what makes one.
UseTqdm: TypeAlias = bool | Callable[..., Any]

# Seconds between two looks at the engine's statistics.
_STATS_INTERVAL: Final = 2.0


class LLM:
    """A model that continues many prompts at once.

    Attributes:
        llm_engine: The engine; to drive it step by step, use no ``generate`` meanwhile.
    """

    def __init__(self, model: str, **options: Any) -> None:
        """Load a model and make its KV cache; says on stderr what was chosen.

        Args:
            model: "smollm2", a local directory in Hugging Face format, a .gguf file or a hub id.
            **options: The other fields of ``EngineArgs``; ``help(pagedserve.EngineArgs)`` and
                docs/options.md list them.

        Raises:
            ConfigError: Arguments that contradict each other, the model or the memory.
            ModelLoadError: The model cannot be found, read or run.
        """
        self._args = EngineArgs(model, **options)
        self._default_params: SamplingParams | None = None
        self.llm_engine = LLMEngine(self._args)
        self._num_calls = 0
        if self._args.use_tqdm_on_load:
            for line in (self.llm_engine.memory.describe(), self.llm_engine.model_info.backends):
                print(line, file=sys.stderr)  # noqa: T201  # for the user

    def get_tokenizer(self) -> PreTrainedTokenizerBase:
        """The model's tokenizer."""
        return self.llm_engine.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """The parameters of requests that bring none; ``generation_config`` says whose they are.

        Raises:
            ConfigError: ``generation_config`` cannot be read, or has a value that cannot be.
        """
        if self._default_params is None:
            self._default_params = default_sampling_params(self._args)
        return self._default_params.clone()

    def reset_prefix_cache(self) -> bool:
        """Forget every cached prefix, as if nothing had been computed yet.

        Returns:
            Whether it was done; between two ``generate`` calls it always is.
        """
        return self.llm_engine.reset_prefix_cache()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt] | None = None,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        prompt_token_ids: Sequence[SupportsIndex] | Sequence[Sequence[SupportsIndex]] | None = None,
        use_tqdm: UseTqdm = True,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        *,
        priority: int | Sequence[int] | None = None,
        **absent: None,
    ) -> list[RequestOutput]:
        """Continue prompts, all of them together.

        All requests are checked before the first is taken up.  After any exception, an interrupt
        included, none of them is left in the engine, which stays usable.

        Args:
            prompts: One prompt or several: strings, lists of token ids, ``TextPrompt`` or
                ``TokensPrompt``.
            sampling_params: One for all or one a prompt; None is
                ``get_default_sampling_params()``.
            prompt_token_ids: Instead of ``prompts``: token ids of one prompt or of several.
            use_tqdm: Show a progress bar on stderr, every few seconds with the engine's
                statistics; or what makes the bar, called as ``tqdm.tqdm`` is.
            lora_request: The adapter to answer with, one for all or one, or None, a prompt; with
                ``enable_lora``.
            priority: One for all or one a prompt; the lowest number goes first, with
                ``scheduling_policy="priority"``.
            **absent: ``prompt_adapter_request=None`` and its like, for the sake of vLLM's scripts.

        Returns:
            The finished outputs in the order of the prompts.

        Raises:
            RequestError: A prompt, parameter or adapter that cannot be accepted; it says which and
                why.
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
        return self._run_all(requests, use_tqdm=use_tqdm)

    def chat(  # noqa: PLR0917  # in vLLM's order
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: UseTqdm = True,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        chat_template: str | None = None,
        chat_template_content_format: Literal["auto", "string"] = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **absent: None,
    ) -> list[RequestOutput]:
        """Answer a conversation or several.

        Args:
            messages: Messages with "role" and "content", or a list of such lists; images of a
                model that takes them are parts of the content, as at OpenAI, or Pillow's.
            sampling_params: As of ``generate``, as the next two and ``absent`` are.
            use_tqdm: See there.
            lora_request: See there.
            chat_template: Instead of the model's own: a file, or the text itself.
            chat_template_content_format: Content that comes in parts is put together to one text.
            add_generation_prompt: End with what begins the assistant's answer.
            continue_final_message: Leave the last message open, so that it is continued.
            tools: Handed to the template.
            chat_template_kwargs: What else the template takes.
            **absent: See there.

        Returns:
            The finished outputs in the order of the conversations.

        Raises:
            RequestError: What is wrong with messages or parameters.
            ConfigError: A template's file that cannot be read.
        """
        chat_template = read_chat_template(chat_template)
        if chat_template_content_format not in ("auto", "string"):
            checks.refuse(
                "chat_template_content_format", chat_template_content_format, "auto or string"
            )
        prompts = [
            chat_prompt(
                self.get_tokenizer(),
                conversation,
                chat_template=chat_template,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tools=tools,
                chat_template_kwargs=chat_template_kwargs,
                images=self.llm_engine.model_info.images,
            )
            for conversation in conversations_of(messages)
        ]
        return self.generate(
            prompts, sampling_params, use_tqdm=use_tqdm, lora_request=lora_request, **absent
        )

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        *,
        use_tqdm: UseTqdm = False,
        **absent: None,
    ) -> list[BeamSearchOutput]:
        """Find the likeliest continuations of prompts.

        Args:
            prompts: As of ``generate``.
            params: The width of the search, and when it ends.
            lora_request: As of ``generate``.
            use_tqdm: As of ``generate``.
            **absent: As of ``generate``.

        Returns:
            The beams of each prompt, the best first.

        Raises:
            RequestError: A prompt or parameter that cannot be accepted; it says which and why.
        """
        outputs = self.generate(
            prompts,
            params.sampling_params(),
            use_tqdm=use_tqdm,
            lora_request=lora_request,
            **absent,
        )
        tokenizer = self.get_tokenizer()
        return [
            BeamSearchOutput.of(output, lambda ids: str(tokenizer.decode(ids)))
            for output in outputs
        ]

    def encode(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: PoolingParams | None = None,
        *,
        use_tqdm: UseTqdm = True,
        pooling_task: PoolingTask = "encode",
        **absent: None,
    ) -> list[PoolingRequestOutput]:
        """Make one vector of each prompt, with a model that pools.

        Args:
            prompts: As of ``generate``.
            pooling_params: For all prompts; None is ``PoolingParams()``.
            use_tqdm: As of ``generate``.
            pooling_task: What the vectors are to be; encode is what the model makes.
            **absent: As of ``generate``.

        Returns:
            The vectors in the order of the prompts.

        Raises:
            RequestError: A prompt or parameter that cannot be accepted, or a model that generates;
                it says which and why.
        """
        refuse_arguments(absent)
        params = PoolingParams() if pooling_params is None else pooling_params
        rules, engine = self.llm_engine.model_info.pooling, self.llm_engine
        if rules is not None:
            rules.check_task(pooling_task)
        call = self._num_calls
        self._num_calls += 1
        requests = [
            engine.input_processor.process(
                f"pool-{call}-{index}", prompt, params, name=f"prompt {index}"
            )
            for index, prompt in enumerate(parse_prompts(prompts))
        ]
        outputs = self._run_all(requests, use_tqdm=use_tqdm)
        return [vectors.pooling_output(output, rules, params) for output in outputs]

    def embed(
        self, prompts: Prompt | Sequence[Prompt], **options: Any
    ) -> list[EmbeddingRequestOutput]:
        """Make an embedding of each prompt.

        Args:
            prompts: As of ``generate``.
            **options: As of ``encode``.

        Returns:
            The embeddings in the order of the prompts.

        Raises:
            RequestError: As of ``encode``.
        """
        pooled = self.encode(prompts, pooling_task="embed", **options)
        return [vectors.embedding_output(output) for output in pooled]

    def classify(
        self, prompts: Prompt | Sequence[Prompt], **options: Any
    ) -> list[ClassificationRequestOutput]:
        """Say how likely each class is of each prompt, with a model that names classes.

        Args:
            prompts: As of ``generate``; also ``{"prompt": ..., "text_pair": ...}``.
            **options: As of ``encode``.

        Returns:
            The probabilities in the order of the prompts.

        Raises:
            RequestError: As of ``encode``.
        """
        pooled = self.encode(prompts, pooling_task="classify", **options)
        return [vectors.classification_output(output) for output in pooled]

    def score(
        self, data_1: str | Sequence[str], data_2: str | Sequence[str], **options: Any
    ) -> list[ScoringRequestOutput]:
        """Say how near texts are: the cosines of their embeddings, or what a cross-encoder says.

        Args:
            data_1: One text, for all of the others, or as many as those.
            data_2: Texts.
            **options: As of ``encode``.

        Returns:
            One score a pair.

        Raises:
            RequestError: As of ``encode``, and texts that are no pairs.
        """
        pairs = vectors.match_pairs("data_1", data_1, data_2)
        rules, options = self.llm_engine.model_info.pooling, {**options, "pooling_task": "score"}
        if rules is not None and rules.takes_pairs:
            both: Any = [{"prompt": left, "text_pair": right} for left, right in pairs]
            return [vectors.pair_output(output) for output in self.encode(both, **options)]
        texts = list(dict.fromkeys(text for pair in pairs for text in pair))
        pooled = dict(zip(texts, self.encode(texts, **options), strict=True))
        return [vectors.scoring_output(pooled[left], pooled[right]) for left, right in pairs]

    def __getattr__(self, name: str) -> NoReturn:
        reason = ABSENT_METHODS.get(name)
        said = f"{type(self).__name__!r} object has no attribute {name!r}"
        raise AttributeError(said if reason is None else f"{said}: {reason}")

    def _run_all(self, requests: list[Request], *, use_tqdm: UseTqdm) -> list[RequestOutput]:
        """Run requests to their ends; after an exception none of them is left."""
        try:
            return self._run(requests, use_tqdm=use_tqdm)
        except BaseException:
            self.llm_engine.abort_request([request.request_id for request in requests])
            raise

    def _run(self, requests: list[Request], *, use_tqdm: UseTqdm) -> list[RequestOutput]:
        for request in requests:
            self.llm_engine.add(request)
        finished: dict[str, RequestOutput | None] = dict.fromkeys(
            request.request_id for request in requests
        )
        num_left, line = len(requests), StatsLine()
        with _progress(len(requests), use_tqdm=use_tqdm) as progress:
            while num_left:
                outputs = [out for out in self.llm_engine.step() if out.request_id in finished]
                finished |= {output.request_id: output for output in outputs}
                num_left -= len(outputs)
                if outputs:
                    progress.update(len(outputs))
                if use_tqdm and line.age() > _STATS_INTERVAL:
                    progress.set_postfix_str(self.llm_engine.stats_line(line))
        return [output for output in finished.values() if output is not None]


def _progress(num_requests: int, *, use_tqdm: UseTqdm) -> Any:  # tqdm has no types
    make = use_tqdm if callable(use_tqdm) else partial(tqdm, disable=not use_tqdm)
    return make(total=num_requests, desc="prompts", dynamic_ncols=True)


def _takes_options_of_engine_args() -> None:
    """Show what ``LLM`` takes to ``help`` and ``inspect``, from the one table of options."""
    own, options = inspect.signature(LLM.__init__), inspect.signature(EngineArgs)
    parameters = [own.parameters["self"], *options.parameters.values()]
    setattr(LLM.__init__, "__signature__", own.replace(parameters=parameters))  # noqa: B010  # mypy


_takes_options_of_engine_args()
