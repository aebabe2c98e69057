"""``LLM``: prompts in, outputs out, in one call."""

import inspect
import sys
from collections.abc import Sequence
from typing import Any, Final, SupportsIndex

from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from pagedserve.config import EngineArgs
from pagedserve.engine.admission import CheckedRequest
from pagedserve.engine.llm_engine import LLMEngine
from pagedserve.inputs import Prompt, match_params, parse_prompts
from pagedserve.outputs import RequestOutput
from pagedserve.sampling_params import SamplingParams

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
        args = EngineArgs(model, **options)
        self.llm_engine = LLMEngine(args)
        self._num_calls = 0
        for line in (self.llm_engine.memory.describe(), self.llm_engine.describe_backends()):
            print(line, file=sys.stderr)  # noqa: T201  # for the user

    def get_tokenizer(self) -> PreTrainedTokenizerBase:
        """The model's tokenizer."""
        return self.llm_engine.tokenizer

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
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Continue prompts, all of them together.

        All requests are checked before the first is taken up.  After any exception, an interrupt
        included, none of them is left in the engine, which stays usable.

        Args:
            prompts: One prompt or several: strings or ``{"prompt_token_ids": [...]}``.
            sampling_params: One for all or one a prompt; None is ``SamplingParams()``.
            prompt_token_ids: Instead of ``prompts``: token ids of one prompt or of several.
            use_tqdm: Show a progress bar on stderr, every few seconds with the engine's
                statistics.

        Returns:
            The finished outputs in the order of the prompts.

        Raises:
            RequestError: A prompt or parameter that cannot be accepted; it says which and why.
        """
        parsed = parse_prompts(prompts, prompt_token_ids)
        params = match_params(sampling_params, len(parsed))
        engine = self.llm_engine
        single = len(parsed) == 1
        checked = [
            engine.check_request(one, own, name="the prompt" if single else f"prompt {index}")
            for index, (one, own) in enumerate(zip(parsed, params, strict=True))
        ]
        request_ids = [f"generate-{self._num_calls}-{index}" for index in range(len(checked))]
        self._num_calls += 1
        try:
            return self._run(dict(zip(request_ids, checked, strict=True)), use_tqdm=use_tqdm)
        except BaseException:
            engine.abort_request(request_ids)
            raise

    def _run(self, requests: dict[str, CheckedRequest], *, use_tqdm: bool) -> list[RequestOutput]:
        for request_id, checked in requests.items():
            self.llm_engine.add_request(request_id, checked, final_only=True)
        finished: dict[str, RequestOutput] = {}
        with _progress(len(requests), use_tqdm=use_tqdm) as progress:
            while len(finished) < len(requests):
                outputs = [one for one in self.llm_engine.step() if one.request_id in requests]
                if outputs:
                    finished |= {one.request_id: one for one in outputs}
                    progress.update(len(outputs))
                if use_tqdm and self.llm_engine.seconds_since_stats > _STATS_INTERVAL:
                    progress.set_postfix_str(self.llm_engine.stats_line())
        return [finished[request_id] for request_id in requests]


def _progress(num_requests: int, *, use_tqdm: bool) -> Any:  # tqdm has no types
    return tqdm(total=num_requests, desc="prompts", dynamic_ncols=True, disable=not use_tqdm)


def _takes_options_of_engine_args() -> None:
    """Show what ``LLM`` takes to ``help`` and ``inspect``, from the one table of options."""
    own, options = inspect.signature(LLM.__init__), inspect.signature(EngineArgs)
    parameters = [own.parameters["self"], *options.parameters.values()]
    setattr(LLM.__init__, "__signature__", own.replace(parameters=parameters))  # noqa: B010  # mypy


_takes_options_of_engine_args()
