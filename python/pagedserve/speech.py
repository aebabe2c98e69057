"""How the decoder of a model that writes down speech is told what to do: by tokens of its own."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, Self, TypeAlias, get_args

from pagedserve.errors import RequestError

# It is written in its own language, or in English.
SpeechTask: TypeAlias = Literal["transcribe", "translate"]
TASKS: Final[tuple[SpeechTask, ...]] = get_args(SpeechTask)


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeechRules:
    """What a model hears, and the tokens that its generation config names.

    Attributes:
        max_seconds: The longest audio of a prompt.
        start: Begins what the decoder writes.
        languages: The token of each language by its code, such as "en"; none where the model knows
            one.
        tasks: Likewise of tasks.
        no_timestamps: Says that no times are wanted; None where there is no such token.
        previous: Begins what was said before; None where there is no such token.
        suppressed: Never come.
        suppressed_first: Do not come first.
    """

    max_seconds: float
    start: int
    languages: Mapping[str, int]
    tasks: Mapping[str, int]
    no_timestamps: int | None
    previous: int | None
    suppressed: tuple[int, ...]
    suppressed_first: tuple[int, ...]

    @classmethod
    def of(cls, start: int, config: Any, *, vocab_size: int, max_seconds: float) -> Self:
        """Read the tokens from transformers' generation config; those of other models are not."""

        def known(name: str) -> tuple[int, ...]:
            return tuple(
                token for token in getattr(config, name, None) or () if 0 <= token < vocab_size
            )

        languages = getattr(config, "lang_to_id", None) or {}
        return cls(
            max_seconds=max_seconds,
            start=start,
            languages={
                name.strip("<|>"): token for name, token in languages.items() if token < vocab_size
            },
            tasks=dict(getattr(config, "task_to_id", None) or {}),
            no_timestamps=getattr(config, "no_timestamps_token_id", None),
            previous=getattr(config, "prev_sot_token_id", None),
            suppressed=known("suppress_tokens"),
            suppressed_first=known("begin_suppress_tokens"),
        )

    def choices(
        self, language: str | None = None, task: SpeechTask = "transcribe"
    ) -> list[tuple[int, ...]]:
        """What may come behind the start, one token after another, before the text.

        Args:
            language: That is spoken; None leaves it to the model.
            task: What is done with it.

        Raises:
            RequestError: A language or a task that the model does not know.
        """
        choices: list[tuple[int, ...]] = []
        if language is not None and language not in self.languages:
            known = ", ".join(self.languages) or "none, for the model knows one language"
            raise RequestError(f"language is {language!r}; accepted are {known}", param="language")
        if self.languages:
            names = self.languages if language is None else (language,)
            choices.append(tuple(self.languages[name] for name in names))
        if task in self.tasks:
            choices.append((self.tasks[task],))
        elif task != "transcribe":
            raise RequestError(f"the model does not {task}: it knows one language")
        if self.no_timestamps is not None:
            choices.append((self.no_timestamps,))
        return choices

    def behind(self, said: Sequence[int]) -> list[int]:
        """A decoder's prompt up to the start, behind tokens of what was said before.

        Raises:
            RequestError: Tokens that say more than a text, or a model that takes none.
        """
        if not said:
            return [self.start]
        telling = {self.start, self.previous, self.no_timestamps}
        telling |= {*self.languages.values(), *self.tasks.values()}
        if self.previous is None or telling.intersection(said):
            raise RequestError(
                "prompt must be a text without special tokens, of a model that takes what was said "
                "before",
                param="prompt",
            )
        return [self.previous, *said, self.start]

    def language_of(self, token_ids: Sequence[int]) -> str:
        """The code of the language that a decoder's tokens name; a model of one knows English."""
        names = {token: name for name, token in self.languages.items()}
        return next((names[token] for token in token_ids if token in names), "en")
