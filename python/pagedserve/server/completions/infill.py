"""``suffix`` of a completion: the text between a prompt and what follows it (fill-in-the-middle).

The format is found from the tokenizer, which has the tokens of its model's family.
"""

from collections.abc import Container
from dataclasses import dataclass
from typing import Final

from pagedserve.errors import RequestError
from pagedserve.server.completions.protocol import CompletionBody


@dataclass(frozen=True, slots=True)
class InfillFormat:
    """Fill-in-the-middle format of a model family.

    Attributes:
        prefix: Token before the prompt.
        suffix: Token before the suffix.
        middle: Token before the new text; empty if there is none.
        is_suffix_first: Whether the suffix comes before the prompt.
    """

    prefix: str
    suffix: str
    middle: str = ""
    is_suffix_first: bool = False

    def is_known_to(self, vocabulary: Container[str]) -> bool:
        """Whether a vocabulary has all of its tokens."""
        return all(
            token in vocabulary for token in (self.prefix, self.suffix, self.middle) if token
        )

    def rendered(self, prompt: str, suffix: str) -> str:
        """Return the prompt of a model for the text between."""
        parts = [self.prefix + prompt, self.suffix + suffix]
        return "".join(reversed(parts) if self.is_suffix_first else parts) + self.middle


INFILL_FORMATS: Final = (
    # Qwen2.5-Coder, CodeGemma
    InfillFormat("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    # StarCoder, StarCoder2, Granite Code
    InfillFormat("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    # DeepSeek-Coder, DeepSeek-V3
    InfillFormat("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
    # Code Llama
    InfillFormat("▁<PRE>", "▁<SUF>", "▁<MID>"),
    # Codestral
    InfillFormat("[PREFIX]", "[SUFFIX]", is_suffix_first=True),
)


def infill_format(vocabulary: Container[str]) -> InfillFormat:
    """Find the format of a model.

    Raises:
        RequestError: The vocabulary has the tokens of no format.
    """
    found = (known for known in INFILL_FORMATS if known.is_known_to(vocabulary))
    if (known := next(found, None)) is None:
        accepted = ", ".join(known.suffix for known in INFILL_FORMATS)
        raise RequestError(
            "suffix is given, and the model's tokenizer has no fill-in-the-middle tokens; "
            f"accepted are models with one of {accepted}",
            param="suffix",
        )
    return known


def check_infill(body: CompletionBody) -> None:
    """Refuse a suffix with fields that concern the prompt alone.

    Raises:
        RequestError: One of them, or prompts that are not texts.
    """
    prompts = [body.prompt] if isinstance(body.prompt, str) else body.prompt
    if not all(isinstance(prompt, str) for prompt in prompts):
        raise RequestError(
            "suffix is given with token ids; it needs prompts that are texts", param="suffix"
        )
    for name in ("echo", "truncate_prompt_tokens"):
        if value := getattr(body, name):
            raise RequestError(
                f"suffix is given with {name} {value}; leave one of them out", param="suffix"
            )
