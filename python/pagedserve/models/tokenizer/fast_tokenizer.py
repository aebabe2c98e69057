"""``FastTokenizer``: a model's tokenizer over the ``tokenizers`` library, without transformers.

Invariants:

1. Ids, texts and renderings equal those of transformers' ``TokenizersBackend`` over the same
   ``tokenizers.Tokenizer``.
2. The backend never truncates or pads, so that threads may share a tokenizer.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, TypeAlias

from tokenizers import AddedToken, Encoding, Tokenizer
from tokenizers.models import BPE

from pagedserve.errors import extra_needed

ChatTemplate: TypeAlias = str | dict[str, str]

# Spaces that WordPiece tokenizers remove from decoded text, in transformers' order.
_CLEAN_UPS: Final = (
    *((f" {mark}", mark) for mark in ".?!,"),
    (" ' ", "'"),
    *((f" {ending}", ending) for ending in ("n't", "'m", "'s", "'ve", "'re")),
)


class Encoded(dict[str, list[int]]):
    """Encoded text: ``input_ids`` and ``token_type_ids``, which number the texts of a pair."""

    @property
    def input_ids(self) -> list[int]:
        """Token ids."""
        return self["input_ids"]


@dataclass(slots=True)
class FastTokenizer:
    """Tokenizer of a model.

    Attributes:
        backend_tokenizer: Encodes and decodes.
        special_tokens_map: Texts of named tokens such as ``bos_token``: variables of templates.
        chat_template: Chat template, or several by name; None if the model has none.
        clean_up_tokenization_spaces: Whether `decode` removes spaces before punctuation by default.
        truncation_side: Side on which long texts are truncated.
    """

    backend_tokenizer: Tokenizer
    special_tokens_map: dict[str, str] = field(default_factory=dict)
    chat_template: ChatTemplate | None = None
    clean_up_tokenization_spaces: bool = False
    truncation_side: Literal["left", "right"] = "right"

    def __post_init__(self) -> None:
        """Turn off truncation and padding, which tokenizer.json may set."""
        self.backend_tokenizer.no_truncation()
        self.backend_tokenizer.no_padding()

    @property
    def added_tokens_decoder(self) -> dict[int, AddedToken]:
        """Added tokens by id."""
        return self.backend_tokenizer.get_added_tokens_decoder()

    @property
    def bos_token_id(self) -> int | None:
        """Token that starts a text; None without one."""
        return self._named_id("bos_token")

    @property
    def eos_token_id(self) -> int | None:
        """Token that ends a text; None without one."""
        return self._named_id("eos_token")

    @property
    def pad_token_id(self) -> int | None:
        """Token that pads batches; None without one."""
        return self._named_id("pad_token")

    def __call__(
        self,
        text: str,
        text_pair: str | None = None,
        *,
        add_special_tokens: bool = True,
        truncation: bool = False,
        max_length: int | None = None,
        verbose: bool = False,  # noqa: ARG002  # of transformers: no length is warned about here
    ) -> Encoded:
        """Encode a text or a pair of texts.

        Args:
            text: The text.
            text_pair: Second text of a pair.
            add_special_tokens: Add the special tokens that the model expects around a text.
            truncation: Truncate to ``max_length`` tokens, a pair from its longer text.
            max_length: Maximum tokens, special ones included.
            verbose: Without effect.
        """
        texts = [text, text_pair] if text_pair else [text]
        if truncation and max_length is not None:
            found = self._truncated(texts, max_length, add_special_tokens=add_special_tokens)
        else:
            batch: list[Any] = [(text, text_pair) if text_pair else text]
            (found,) = self._encoded(batch, add_special_tokens=add_special_tokens)
        return Encoded(input_ids=found.ids, token_type_ids=found.type_ids)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Encode a text to ids; see `__call__`."""
        return self(text, add_special_tokens=add_special_tokens).input_ids

    def decode(
        self,
        token_ids: int | Sequence[int],
        *,
        skip_special_tokens: bool = False,
        clean_up_tokenization_spaces: bool | None = None,
    ) -> str:
        """Decode ids to text.

        Args:
            token_ids: One id or several; ids without a token have no text.
            skip_special_tokens: Leave special tokens out.
            clean_up_tokenization_spaces: Remove spaces before punctuation, except from texts of
                BPE; None is the attribute.
        """
        ids = [token_ids] if isinstance(token_ids, int) else list(token_ids)
        text = self.backend_tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
        if clean_up_tokenization_spaces is None:
            clean_up_tokenization_spaces = self.clean_up_tokenization_spaces
        if clean_up_tokenization_spaces and not isinstance(self.backend_tokenizer.model, BPE):
            for written, clean in _CLEAN_UPS:
                text = text.replace(written, clean)
        return text

    def convert_ids_to_tokens(self, ids: Sequence[int]) -> list[str | None]:
        """Look up the vocabulary's string of each id; None for an id without a token."""
        return [self.backend_tokenizer.id_to_token(token_id) for token_id in ids]

    def get_vocab(self) -> dict[str, int]:
        """Ids by token, added tokens included."""
        return self.backend_tokenizer.get_vocab(with_added_tokens=True)

    def apply_chat_template(
        self,
        conversation: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        *,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        tokenize: bool = True,
        **variables: Any,
    ) -> str | Encoded:
        """Render a conversation by a chat template.

        Args:
            conversation: Messages, each with a role.
            tools: Tool definitions for the template.
            documents: Documents for the template.
            chat_template: Template, or the name of one of the model's; None is the model's.
            add_generation_prompt: Append the prompt that starts the assistant's reply.
            continue_final_message: Leave the last message open.
            tokenize: Return the encoded text instead of the text.
            **variables: Further variables of the template.

        Raises:
            ValueError: No template, or messages that cannot be rendered.
            jinja2.TemplateError: An error of the template.
            ImportError: jinja2 is not installed.
        """
        with extra_needed("a chat template", "cpu"):
            from pagedserve.inputs.chat_renderer import render_chat
        text = render_chat(
            self._template(chat_template, has_tools=tools is not None),
            conversation,
            tools=tools,
            documents=documents,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            variables=self.special_tokens_map | variables,
        )
        return self(text, add_special_tokens=False) if tokenize else text

    def _template(self, given: str | None, *, has_tools: bool) -> str:
        """Choose the template as transformers does.

        Raises:
            ValueError: There is none, or none of several is the default.
        """
        known, template = self.chat_template, given
        if isinstance(known, dict):
            names = (given,) if given is not None else (*("tool_use",) * has_tools, "default")
            template = next((known[name] for name in names if name in known), given)
        elif given is None:
            template = known
        if template is None:
            raise ValueError("the tokenizer has no default chat template")
        return template

    def _named_id(self, name: str) -> int | None:
        token = self.special_tokens_map.get(name)
        return None if token is None else self.backend_tokenizer.token_to_id(token)

    def _encoded(self, batch: list[Any], *, add_special_tokens: bool) -> list[Encoding]:
        """Encode a batch of texts or pairs."""
        return self.backend_tokenizer.encode_batch(batch, add_special_tokens=add_special_tokens)

    def _truncated(
        self, texts: list[str], max_length: int, *, add_special_tokens: bool
    ) -> Encoding:
        """Encode one text or two, truncated before special tokens are added."""
        backend, num_special = self.backend_tokenizer, 0
        if add_special_tokens:
            num_special = backend.num_special_tokens_to_add(len(texts) > 1)
        encodings = self._encoded(texts, add_special_tokens=False)
        lengths = [len(encoding.ids) for encoding in encodings]
        limits = _limits(lengths, max(0, max_length - num_special))
        for encoding, limit in zip(encodings, limits, strict=True):
            encoding.truncate(limit, direction=self.truncation_side)
        pair = encodings[1] if len(encodings) > 1 else None
        return backend.post_process(encodings[0], pair, add_special_tokens=add_special_tokens)


def _limits(lengths: Sequence[int], most: int) -> Sequence[int]:
    """Tokens of each of one or two texts so that all have at most ``most``, longest text first."""
    if sum(lengths) <= most or len(lengths) == 1:
        return [min(length, most) for length in lengths]
    shorter = min(lengths)
    longer = shorter if shorter > most else max(shorter, most - shorter)
    if shorter + longer > most:
        shorter, longer = most // 2, most // 2 + most % 2
    return (longer, shorter) if lengths[0] > lengths[1] else (shorter, longer)
