"""Reasoning formats of model families, one table row each, by the names of vLLM's parsers.

The server separates the reasoning of a response by its format.  The engine closes it by the end tag
at a ``thinking_token_budget``, and holds by a grammar only what follows it.
"""

from dataclasses import dataclass
from typing import Final, Self

import pagedserve.checks as checks
from pagedserve.errors import RequestError

# Keys of vLLM's ``reasoning_config``: the start tag and the end tag.
_KEYS: Final = ("reasoning_start_str", "reasoning_end_str")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningFormat:
    """Reasoning format of a model family.

    Attributes:
        start: Start tag.
        end: End tag.
        begins: Whether texts start with reasoning even without the start tag.
    """

    start: str
    end: str
    begins: bool = False

    @classmethod
    def of(cls, name: str, value: object) -> Self:
        """Check an option: a ``ReasoningFormat``, or a mapping as vLLM accepts it.

        Raises:
            RequestError: Another type, a missing or unknown key, or an empty tag.
        """
        if isinstance(value, cls):
            return value
        given = checks.mapping(name, value)
        if given.keys() != {*_KEYS}:
            raise RequestError(
                f"{name} has {', '.join(map(repr, given)) or 'no keys'}; it must have "
                f"{' and '.join(_KEYS)}",
                param=name,
            )
        start, end = (checks.text(f"{name}.{key}", given[key]) for key in _KEYS)
        return cls(start=start, end=end)

    def is_open_after(self, prompt: str, *, may_begin: bool) -> bool | None:
        """Whether the text after a prompt starts within reasoning; None if it may start it.

        Args:
            prompt: Text of the prompt, or its last characters.
            may_begin: Whether reasoning may start without the start tag, if texts of the format do.
        """
        tail = prompt.rstrip()
        if tail.endswith(self.end):
            return False
        return True if tail.endswith(self.start) or (may_begin and self.begins) else None

    def is_open_in(self, text: str) -> bool:
        """Whether reasoning starts in a text and does not end there."""
        _, start, rest = text.rpartition(self.start)
        return bool(start) and self.end not in rest


REASONING_FORMATS: Final[dict[str, ReasoningFormat]] = {
    "deepseek_r1": ReasoningFormat(start="<think>", end="</think>", begins=True),
    "qwen3": ReasoningFormat(start="<think>", end="</think>"),
    "glm45": ReasoningFormat(start="<think>", end="</think>"),
    "mistral": ReasoningFormat(start="[THINK]", end="[/THINK]"),
    "granite": ReasoningFormat(start="Here is my thought process:", end="Here is my response:"),
    "kimi": ReasoningFormat(start="◁think▷", end="◁/think▷"),
    "seed_oss": ReasoningFormat(start="<seed:think>", end="</seed:think>"),
}


def reasoning_format_of(chat_template: str) -> ReasoningFormat | None:
    """Reasoning format whose end tag a chat template has; None if it has none of the table's.

    Texts of such a format start with reasoning only where the prompt or the text has the start tag.
    """
    known = (entry for entry in REASONING_FORMATS.values() if not entry.begins)
    return next((entry for entry in known if entry.end in chat_template), None)
