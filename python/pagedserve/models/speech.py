"""How the decoder of a model that writes down speech is told what to do: by tokens of its own."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Self

from pagedserve.errors import RequestError

# What is done with speech if nobody says: it is written in its own language.
TRANSCRIBE: Final = "transcribe"


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeechTokens:
    """Tokens that a model's generation config names.

    Attributes:
        start: begins what the decoder writes.
        languages: the token of each language by its code, such as "en"; none where the model knows
            one.
        tasks: likewise of "transcribe" and "translate".
        no_timestamps: says that no times are wanted; None where there is no such token.
        suppressed: never come.
        suppressed_first: do not come first.
    """

    start: int
    languages: Mapping[str, int]
    tasks: Mapping[str, int]
    no_timestamps: int | None
    suppressed: tuple[int, ...]
    suppressed_first: tuple[int, ...]

    @classmethod
    def of(cls, start: int, config: Any) -> Self:
        """Read them from transformers' generation config."""
        languages = getattr(config, "lang_to_id", None) or {}
        return cls(
            start=start,
            languages={name.strip("<|>"): token for name, token in languages.items()},
            tasks=dict(getattr(config, "task_to_id", None) or {}),
            no_timestamps=getattr(config, "no_timestamps_token_id", None),
            suppressed=tuple(getattr(config, "suppress_tokens", None) or ()),
            suppressed_first=tuple(getattr(config, "begin_suppress_tokens", None) or ()),
        )

    def choices(self, language: str | None = None, task: str = TRANSCRIBE) -> list[tuple[int, ...]]:
        """What may come behind the start, one token after another, before the text.

        Args:
            language: that is spoken; None leaves it to the model.
            task: what is done with it.

        Raises:
            RequestError: a language or a task that the model does not know.
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
        elif task != TRANSCRIBE:
            raise RequestError(f"the model does not {task}; accepted is {TRANSCRIBE!r}")
        if self.no_timestamps is not None:
            choices.append((self.no_timestamps,))
        return choices
