"""Reasoning formats of model families, one table row each, by the names of vLLM's parsers.

The server separates the reasoning of a response by its format.
"""

from dataclasses import dataclass
from typing import Final


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


REASONING_FORMATS: Final[dict[str, ReasoningFormat]] = {
    "deepseek_r1": ReasoningFormat(start="<think>", end="</think>", begins=True),
    "qwen3": ReasoningFormat(start="<think>", end="</think>"),
    "glm45": ReasoningFormat(start="<think>", end="</think>"),
    "mistral": ReasoningFormat(start="[THINK]", end="[/THINK]"),
    "granite": ReasoningFormat(start="Here is my thought process:", end="Here is my response:"),
    "kimi": ReasoningFormat(start="◁think▷", end="◁/think▷"),
    "seed_oss": ReasoningFormat(start="<seed:think>", end="</seed:think>"),
}
