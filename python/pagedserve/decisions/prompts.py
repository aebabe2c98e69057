"""Prompts of decisions: one conversation for each question, of which the engine shares the start.

Every question is the user's turn of a separate conversation, after the state, so that its
probabilities depend on no other question.  The first token of the reply is the label.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import pagedserve.checks as checks
from pagedserve.decisions.questions import ParsedQuestion
from pagedserve.errors import RequestError
from pagedserve.inputs import Branch, BranchedPrompt
from pagedserve.inputs.chat import chat_prompt
from pagedserve.tokenizer import Tokenizer

# Start of every question's turn.  It is before the state, where all questions share it.
_RULE: Final = "Reply with a label only: the letter or digit of an option, or yes or no."
# The last tokens of a prompt that decide what tokens the text after it has.
_TAIL_TOKENS: Final = 16
# Ends of prompts whose labels are kept.
_MAX_TAILS: Final = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """State and questions of a decision, after their form was checked.

    Attributes:
        state: What the questions are about: a text, or a JSON value.
        questions: The questions.
        instructions: System message; None for none.
        chat_template: Template to use instead of the model's.
        chat_template_kwargs: Further variables of the chat template.
        cache_salt: Salt of the prompt in the prefix cache.
    """

    state: Any
    questions: Sequence[ParsedQuestion]
    instructions: str | None = None
    chat_template: str | None = None
    chat_template_kwargs: Mapping[str, Any] | None = None
    cache_salt: str | None = None

    def __post_init__(self) -> None:
        variables = checks.optional(checks.mapping)(
            "chat_template_kwargs", self.chat_template_kwargs
        )
        if variables and variables.get("enable_thinking"):
            raise RequestError(
                "chat_template_kwargs has enable_thinking: a decision is the first token of the "
                "reply, so the model cannot think before it",
                param="chat_template_kwargs",
            )

    @property
    def state_text(self) -> str:
        """The state as the model reads it."""
        if isinstance(self.state, str):
            return self.state
        try:
            return json.dumps(self.state, ensure_ascii=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise RequestError(f"state is no JSON value: {error}", param="state") from error

    def conversation(self, question: ParsedQuestion) -> list[dict[str, str]]:
        """The conversation that ends with a question."""
        content = f"{_RULE}\n\n{self.state_text}\n\n{question.text}"
        system = {"role": "system", "content": self.instructions or ""}
        return [system] * bool(self.instructions) + [{"role": "user", "content": content}]


@dataclass(slots=True)
class DecisionPrompts:
    """Makes the prompts of decisions for one model; thread-safe.

    Attributes:
        tokenizer: Tokenizer of the model.
    """

    tokenizer: Tokenizer
    _labels: dict[tuple[tuple[int, ...], str], int] = field(default_factory=dict, repr=False)

    def make(self, asked: Asked) -> BranchedPrompt:
        """Make the prompt of a decision, with a branch for each question.

        Raises:
            RequestError: No chat template, messages that it does not take, or a label that is not
                one distinct token.
        """
        rendered = [self._rendered(asked, question) for question in asked.questions]
        num_common = _num_common([token_ids for _, token_ids in rendered])
        branches: list[Branch] = [
            {
                "prompt_token_ids": token_ids[num_common:],
                "label_token_ids": self._label_token_ids(question, text, token_ids),
            }
            for question, (text, token_ids) in zip(asked.questions, rendered, strict=True)
        ]
        first = rendered[0][1]
        prompt: BranchedPrompt = {"prompt_token_ids": first[:num_common], "branches": branches}
        if asked.cache_salt is not None:
            prompt["cache_salt"] = asked.cache_salt
        return prompt

    def _rendered(self, asked: Asked, question: ParsedQuestion) -> tuple[str, list[int]]:
        """Text and token ids of the conversation of a question."""
        variables = {"enable_thinking": False} | dict(asked.chat_template_kwargs or {})
        prompt = chat_prompt(
            self.tokenizer,
            asked.conversation(question),
            chat_template=asked.chat_template,
            chat_template_kwargs=variables,
        )
        return prompt.get("prompt") or "", [*map(int, prompt["prompt_token_ids"])]

    def _label_token_ids(
        self, question: ParsedQuestion, text: str, token_ids: list[int]
    ) -> list[int]:
        """Token of each label of a question as the first one of the reply.

        Raises:
            RequestError: A label is several tokens there, or changes those before it.
        """
        tail = tuple(token_ids[-_TAIL_TOKENS:])
        found = []
        for label in question.labels:
            token_id = self._labels.get((tail, label))
            if token_id is None:
                token_id = self._encoded_label(question, label, text, token_ids)
                if len(self._labels) >= _MAX_TAILS * len(question.labels):
                    self._labels.clear()
                self._labels[tail, label] = token_id
            found.append(token_id)
        if len(set(found)) < len(found):
            raise RequestError(
                f"two labels of question {question.question_id!r} are the same token of this "
                "model, so that they cannot be distinguished",
                param="questions",
            )
        return found

    def _encoded_label(
        self, question: ParsedQuestion, label: str, text: str, token_ids: list[int]
    ) -> int:
        tail, tail_ids = self._tail(text, token_ids)
        *before, last = self._encoded(tail + label)
        if before != tail_ids:
            raise RequestError(
                f"the label {label!r} of question {question.question_id!r} is not one token after "
                "the chat prompt of this model; a label must be one",
                param="questions",
            )
        return last

    def _tail(self, text: str, token_ids: list[int]) -> tuple[str, list[int]]:
        """The end of a prompt, so that a long state is not encoded again for each label.

        Its text has the same tokens alone; where no end of few tokens has, it is the whole prompt.
        """
        for size in range(_TAIL_TOKENS, 2 * _TAIL_TOKENS):  # some begin within a character
            tail_ids = token_ids[-size:]
            tail = str(self.tokenizer.decode(tail_ids, clean_up_tokenization_spaces=False))
            if text.endswith(tail) and self._encoded(tail) == tail_ids:
                return tail, tail_ids
        return text, token_ids

    def _encoded(self, text: str) -> list[int]:
        found = self.tokenizer(text, add_special_tokens=False, verbose=False).input_ids
        return [*map(int, found)]


def num_prompt_tokens(prompt: BranchedPrompt) -> int:
    """Tokens of the prompts of all branches; those that they have in common count in each."""
    num_common = len(prompt["prompt_token_ids"])
    return sum(num_common + len(branch["prompt_token_ids"]) for branch in prompt["branches"])


def _num_common(prompts: Sequence[list[int]]) -> int:
    """Leading tokens that all prompts have in common, the last token of each left out."""
    first, last = min(prompts), max(prompts)
    most = min(map(len, prompts)) - 1
    differ = (i for i, pair in enumerate(zip(first, last, strict=False)) if len(set(pair)) > 1)
    return min(most, next(differ, most))
