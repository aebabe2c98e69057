"""From what a caller gives to a tokenized prompt: text, conversations, images and audio.

Knows no model and no executor: their parts in it are functions that are passed in.
"""

from typing import TypeAlias

from pagedserve.inputs.branches import Branch, BranchedPrompt
from pagedserve.inputs.prompts import (
    ExplicitEncoderDecoderPrompt,
    Prompt,
    TextPrompt,
    TokensPrompt,
)

# vLLM's name.
PromptType: TypeAlias = Prompt

__all__ = [
    "Branch",
    "BranchedPrompt",
    "ExplicitEncoderDecoderPrompt",
    "Prompt",
    "PromptType",
    "TextPrompt",
    "TokensPrompt",
]
