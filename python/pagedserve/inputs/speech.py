"""Speech models: special tokens of the decoder, and rules for the tokens that follow them."""

import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal, Self, TypeAlias, get_args

from pagedserve.errors import RequestError
from pagedserve.inputs.timestamps import TimeTokens
from pagedserve.sampling_params import SamplingParams

if TYPE_CHECKING:
    from torch import Tensor

# Task: text in the spoken language, or in English.
SpeechTask: TypeAlias = Literal["transcribe", "translate"]
TASKS: Final[tuple[SpeechTask, ...]] = get_args(SpeechTask)
# Languages of a model without codes: that of Whisper's models of one language.
_ONE_LANGUAGE: Final = ("en",)


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestedSpeech:
    """What a prompt requests beside its decoder prompt, which then ends with the start token.

    Attributes:
        language: Code of the spoken language; None lets the model detect it.
        task: Task of the model; None is "transcribe".
        has_timestamps: Whether the transcript has timestamps.
    """

    language: str | None = None
    task: SpeechTask | None = None
    has_timestamps: bool = False

    @property
    def keys(self) -> list[str]:
        """Keys of the prompt that request something."""
        given = {
            "speech_language": self.language,
            "speech_task": self.task,
            "speech_timestamps": self.has_timestamps or None,
        }
        return [key for key, value in given.items() if value is not None]

    @classmethod
    def of(cls, prompt: Mapping[str, Any], name: str) -> Self:
        """Read the keys of a prompt.

        Args:
            prompt: Prompt as given.
            name: Name of the prompt in errors.

        Raises:
            RequestError: A value that is not accepted.
        """
        language = prompt.get("speech_language")
        if not isinstance(language, str | None):
            raise RequestError(
                f"speech_language of {name} is {reprlib.repr(language)}; it must be a code such as "
                "'en'"
            )
        task = prompt.get("speech_task")
        if task not in (None, *TASKS):
            raise RequestError(
                f"speech_task of {name} is {reprlib.repr(task)}; accepted are {list(TASKS)}"
            )
        has_timestamps = prompt.get("speech_timestamps", False)
        if not isinstance(has_timestamps, bool):
            raise RequestError(
                f"speech_timestamps of {name} is {reprlib.repr(has_timestamps)}; it must be True "
                "or False"
            )
        return cls(language=language, task=task, has_timestamps=has_timestamps)


NOTHING_REQUESTED: Final = RequestedSpeech()


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeechRules:
    """Limits and special tokens of a speech model, from its generation config.

    Attributes:
        max_seconds: Maximum duration of a prompt's audio, in seconds.
        start: Token that starts the decoder's output; those of a higher id are special too.
        ends: Tokens that end a sequence.
        languages: Token of each language by its code, such as "en"; empty for a model of one
            language.
        tasks: Token of each task by its name; empty for a model of one language.
        no_timestamps: Token that disables timestamps; None if it does not exist.
        times: Tokens of timestamps; None if the vocabulary has none.
        previous: Token that starts the previous transcript; None if it does not exist.
        suppressed: Tokens that are never generated.
        suppressed_first: Tokens that are not generated first.
    """

    max_seconds: float
    start: int
    ends: tuple[int, ...]
    languages: Mapping[str, int]
    tasks: Mapping[str, int]
    no_timestamps: int | None
    times: TimeTokens | None
    previous: int | None
    suppressed: tuple[int, ...]
    suppressed_first: tuple[int, ...]

    @classmethod
    def of(
        cls,
        start: int,
        config: Any,
        *,
        ends: tuple[int, ...],
        vocab_size: int,
        max_seconds: float,
        num_times: int,
    ) -> Self:
        """Read the tokens from transformers' generation config; None if it has no such tokens.

        Args:
            start: Token that starts the decoder's output.
            config: The generation config.
            ends: Tokens that end a sequence.
            vocab_size: Vocabulary size; tokens beyond it are left out.
            max_seconds: Maximum duration of a prompt's audio, in seconds.
            num_times: Number of steps between timestamps in so much audio.
        """

        def known(name: str) -> tuple[int, ...]:
            return tuple(
                token for token in getattr(config, name, None) or () if 0 <= token < vocab_size
            )

        languages = getattr(config, "lang_to_id", None) or {}
        no_timestamps = getattr(config, "no_timestamps_token_id", None)
        times = None
        if no_timestamps is not None and no_timestamps + 1 < vocab_size:
            times = TimeTokens(
                first=no_timestamps + 1,
                step=max_seconds / num_times,
                disabled=no_timestamps,
                no_speech=no_timestamps - 1,
                end=min(ends),
                latest_start=getattr(config, "max_initial_timestamp_index", None),
            )
        return cls(
            max_seconds=max_seconds,
            start=start,
            ends=ends,
            languages={
                name.strip("<|>"): token for name, token in languages.items() if token < vocab_size
            },
            tasks=dict(getattr(config, "task_to_id", None) or {}),
            no_timestamps=no_timestamps,
            times=times,
            previous=getattr(config, "prev_sot_token_id", None),
            suppressed=known("suppress_tokens"),
            suppressed_first=known("begin_suppress_tokens"),
        )

    def choices(self, requested: RequestedSpeech) -> list[tuple[int, ...]]:
        """Allowed tokens for each position between the start token and the text.

        Raises:
            RequestError: A language, a task or timestamps that the model does not support.
        """
        language, task = requested.language, requested.task or "transcribe"
        if requested.has_timestamps and self.times is None:
            raise RequestError("the model has no timestamps: its vocabulary names no times")
        choices: list[tuple[int, ...]] = []
        accepted = self.languages or _ONE_LANGUAGE
        if language is not None and language not in accepted:
            raise RequestError(
                f"language is {language!r}; accepted are {', '.join(accepted)}", param="language"
            )
        if self.languages:
            names = self.languages if language is None else (language,)
            choices.append(tuple(self.languages[name] for name in names))
        if task in self.tasks:
            choices.append((self.tasks[task],))
        elif task != "transcribe":
            raise RequestError(f"the model does not {task}: it supports one language")
        if self.no_timestamps is not None and not requested.has_timestamps:
            choices.append((self.no_timestamps,))
        return choices

    def behind(self, said: Sequence[int]) -> list[int]:
        """Return a decoder prompt that ends with the start token, after a previous transcript.

        Raises:
            RequestError: Special tokens in the transcript, or a model that takes none.
        """
        if not said:
            return [self.start]
        is_special = any(token >= self.start or token in self.ends for token in said)
        if self.previous is None or is_special:
            raise RequestError(
                "prompt must be text without special tokens, for a model that takes previous "
                "transcripts",
                param="prompt",
            )
        return [self.previous, *said, self.start]

    def rules_after(
        self, prompt: Sequence[int], first: tuple[tuple[int, ...], ...]
    ) -> "TokenRules":
        """Rules of the tokens that follow a decoder prompt, which ``first`` begins with."""
        special = range(self.start, 1 + (self.no_timestamps or self.start))
        disabled = self.no_timestamps in (*prompt, *(token for (token, *_) in first))
        has_task = bool(first) or not self.tasks or bool({*self.tasks.values()} & {*prompt})
        times = self.times if has_task and not disabled else None
        num_special = 1 + max(place for place, token in enumerate(prompt) if token in special)
        return TokenRules(
            first=first,
            suppressed=self.suppressed,
            suppressed_first=self.suppressed_first,
            times=times,
            written=tuple(prompt[num_special:]),
            no_speech=times.no_speech if times and prompt[-1] == self.start else None,
        )

    def language_of(self, token_ids: Sequence[int]) -> str:
        """Language code of a decoder's prompt; English for a model of one language."""
        names = {token: name for name, token in self.languages.items()}
        return next((names[token] for token in token_ids if token in names), "en")


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRules:
    """Token rules of one request.

    Attributes:
        first: Candidates for each of the first new tokens, of which the most likely is taken; a
            request with any has one sequence.
        suppressed: Tokens that are never sampled after ``first``.
        suppressed_first: Tokens that are not sampled directly after ``first``.
        times: Tokens of timestamps, whose rules what follows ``first`` keeps; None without them.
        written: Transcript with timestamps that the prompt ends with.
        no_speech: Token of audio without speech, whose log-probability as the first new token is
            returned with those of the tokens; None without timestamps, or if it cannot be first.
    """

    first: tuple[tuple[int, ...], ...] = ()
    suppressed: tuple[int, ...] = ()
    suppressed_first: tuple[int, ...] = ()
    times: TimeTokens | None = None
    written: tuple[int, ...] = ()
    no_speech: int | None = None

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

    def keep_times(self, token_ids: list[int], logits: "Tensor") -> "Tensor":
        """Keep the rules of timestamps, as a logits processor of a request that has them."""
        if self.times is None:
            return logits
        logits[list(self.suppressed)] = -float("inf")
        return self.times.keep_rules([*self.written, *token_ids[len(self.first) :]], logits)
