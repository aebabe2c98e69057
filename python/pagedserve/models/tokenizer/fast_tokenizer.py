"""``FastTokenizer``: a model's tokenizer over the ``tokenizers`` library, without transformers.

Invariants:

1. Ids, texts and renderings equal those of transformers' ``TokenizersBackend`` over the same
   ``tokenizers.Tokenizer``.
2. The backend never truncates or pads, so that threads may share a tokenizer.
3. Options that transformers' tokenizers have and this one lacks are refused by name.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, Literal, TypeAlias

from tokenizers import AddedToken, Encoding, Tokenizer
from tokenizers.models import BPE

from pagedserve.errors import extra_needed
from pagedserve.vllm_names import is_neutral

ChatTemplate: TypeAlias = str | dict[str, str]

# Spaces that WordPiece tokenizers remove from decoded text, in transformers' order.
_CLEAN_UPS: Final = (
    *((f" {mark}", mark) for mark in ".?!,"),
    (" ' ", "'"),
    *((f" {ending}", ending) for ending in ("n't", "'m", "'s", "'ve", "'re")),
)
# Limits above it are none, in transformers too.
_MAX_LIMIT: Final = 10**20
# Values of transformers' options that change nothing, for those without other values here.
_NEUTRAL: Final[dict[str, tuple[object, ...]]] = {
    **dict.fromkeys(("text_target", "text_pair_target", "tokenizer_kwargs"), (None,)),
    **dict.fromkeys(("pad_to_multiple_of", "padding_side", "return_tensors"), (None,)),
    **dict.fromkeys(("is_split_into_words", "split_special_tokens"), (False, None)),
    **dict.fromkeys(("return_overflowing_tokens", "return_special_tokens_mask"), (False, None)),
    **dict.fromkeys(("return_offsets_mapping", "return_length"), (False, None)),
    **dict.fromkeys(("return_assistant_tokens_mask", "sanitize_control_tokens"), (False, None)),
    "stride": (0,),
}
# Options of transformers' ``apply_chat_template``: unsupported ones, and those of ``__call__``.
_OF_CHATS: Final = frozenset({"return_assistant_tokens_mask", "sanitize_control_tokens"})
_OF_CALLS: Final = frozenset({"padding", "truncation", "max_length", "return_tensors"})


class Encoded(dict[str, Any]):
    """Encoded text or batch of texts.

    ``token_type_ids`` number the texts of a pair.  Of a batch, each value is a list of lists.
    """

    @property
    def input_ids(self) -> Any:
        """Token ids."""
        return self["input_ids"]

    @property
    def attention_mask(self) -> Any:
        """1 for each token, 0 for padding."""
        return self["attention_mask"]


class _NamedToken:
    """Attribute with the text of a named token; None without one."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, tokenizer: "FastTokenizer", owner: type | None = None) -> str | None:
        return tokenizer.special_tokens_map.get(self._name)

    def __set__(self, tokenizer: "FastTokenizer", token: str | None) -> None:
        if token is None:
            tokenizer.special_tokens_map.pop(self._name, None)
        else:
            tokenizer.special_tokens_map[self._name] = str(token)


class _NamedId:
    """Attribute with the id of a named token; None without one."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._token = name.removesuffix("_id")

    def __get__(self, tokenizer: "FastTokenizer", owner: type | None = None) -> int | None:
        token = tokenizer.special_tokens_map.get(self._token)
        return None if token is None else tokenizer.backend_tokenizer.token_to_id(token)

    def __set__(self, tokenizer: "FastTokenizer", token_id: int | None) -> None:
        token = None if token_id is None else tokenizer.convert_ids_to_tokens(token_id)
        setattr(tokenizer, self._token, token)


@dataclass(slots=True)
class FastTokenizer:
    """Tokenizer of a model.

    Attributes:
        backend_tokenizer: Encodes and decodes.
        special_tokens_map: Texts of named tokens such as ``bos_token``: variables of templates.
        chat_template: Chat template, or several by name; None if the model has none.
        clean_up_tokenization_spaces: Whether `decode` removes spaces before punctuation by default.
        truncation_side: Side on which long texts are truncated.
        padding_side: Side on which short texts of a batch are padded.
        extra_special_tokens: Texts of special tokens without a name.
        model_max_length: Maximum tokens of a text that is truncated without ``max_length``.
        name_or_path: Path of the files.
    """

    backend_tokenizer: Tokenizer
    special_tokens_map: dict[str, str] = field(default_factory=dict)
    chat_template: ChatTemplate | None = None
    clean_up_tokenization_spaces: bool = False
    truncation_side: Literal["left", "right"] = "right"
    padding_side: Literal["left", "right"] = "right"
    extra_special_tokens: list[str] = field(default_factory=list)
    model_max_length: int = int(1e30)  # of transformers, where files have none
    name_or_path: str = ""

    bos_token, bos_token_id = _NamedToken(), _NamedId()
    eos_token, eos_token_id = _NamedToken(), _NamedId()
    unk_token, unk_token_id = _NamedToken(), _NamedId()
    sep_token, sep_token_id = _NamedToken(), _NamedId()
    pad_token, pad_token_id = _NamedToken(), _NamedId()
    cls_token, cls_token_id = _NamedToken(), _NamedId()
    mask_token, mask_token_id = _NamedToken(), _NamedId()
    is_fast = True

    def __post_init__(self) -> None:
        """Turn off truncation and padding, which tokenizer.json may set."""
        self.backend_tokenizer.no_truncation()
        self.backend_tokenizer.no_padding()

    @property
    def added_tokens_decoder(self) -> dict[int, AddedToken]:
        """Added tokens by id."""
        return self.backend_tokenizer.get_added_tokens_decoder()

    @property
    def all_special_tokens(self) -> list[str]:
        """Texts of the special tokens, named ones first."""
        return list(dict.fromkeys([*self.special_tokens_map.values(), *self.extra_special_tokens]))

    @property
    def all_special_ids(self) -> list[int]:
        """Ids of the special tokens."""
        ids: list[int] = self.convert_tokens_to_ids(self.all_special_tokens)
        return ids

    @property
    def vocab_size(self) -> int:
        """Number of tokens without added ones."""
        return self.backend_tokenizer.get_vocab_size(with_added_tokens=False)

    def __len__(self) -> int:
        return self.backend_tokenizer.get_vocab_size(with_added_tokens=True)

    def __call__(
        self,
        text: Any,
        text_pair: Any = None,
        *,
        add_special_tokens: bool = True,
        padding: bool | str = False,
        truncation: bool | str | None = None,
        max_length: int | None = None,
        return_token_type_ids: bool | None = None,
        return_attention_mask: bool | None = None,
        verbose: bool = False,  # noqa: ARG002  # of transformers: no length is warned about here
        **options: Any,
    ) -> Encoded:
        """Encode a text, a pair of texts, or a batch of them.

        Args:
            text: A text, or a list of texts and pairs of texts.
            text_pair: Second text of a pair; of a batch, a list of them.
            add_special_tokens: Add the special tokens that the model expects around a text.
            padding: Pad the texts of a batch: to the longest one, or with "max_length" to
                ``max_length`` tokens.
            truncation: Truncate to ``max_length`` tokens, a pair from its longer text; None does so
                where ``max_length`` is given without ``padding``.
            max_length: Maximum tokens, special ones included; None is ``model_max_length``.
            return_token_type_ids: Whether the result has them; None is True.
            return_attention_mask: Whether the result has it; None is True.
            verbose: Without effect.
            **options: Further options of transformers, with values that change nothing.

        Raises:
            ValueError: Another value of an option, or padding without ``pad_token``.
            TypeError: An unknown option, or what is no text.
        """
        _refuse(options)
        pads = _is_on("padding", padding, (True, "longest", "max_length"), (False, "do_not_pad"))
        if truncation is None:
            truncation = max_length is not None and not pads
        truncates = _is_on(
            "truncation", truncation, (True, "longest_first"), (False, "do_not_truncate")
        )
        limit = self.model_max_length if max_length is None else max_length
        found = self._encoded(
            _batch(text, text_pair),
            limit if truncates and limit <= _MAX_LIMIT else None,
            add_special_tokens=add_special_tokens,
        )
        if pads:
            self._pad(found, limit if padding == "max_length" else None)
        encoded = {"input_ids": [encoding.ids for encoding in found]}
        if return_token_type_ids is not False:
            encoded["token_type_ids"] = [encoding.type_ids for encoding in found]
        if return_attention_mask is not False:
            encoded["attention_mask"] = [encoding.attention_mask for encoding in found]
        if isinstance(text, list | tuple):
            return Encoded(encoded)
        return Encoded({name: value for name, (value,) in encoded.items()})

    def encode(self, text: Any, text_pair: Any = None, **options: Any) -> Any:
        """Encode to ids; see `__call__`."""
        return self(text, text_pair, **options).input_ids

    def tokenize(
        self, text: str, pair: str | None = None, *, add_special_tokens: bool = False
    ) -> list[str]:
        """Encode a text or a pair of texts to the vocabulary's strings."""
        (found,) = self._encoded(_batch(text, pair), None, add_special_tokens=add_special_tokens)
        return found.tokens

    def decode(
        self,
        token_ids: Any,
        skip_special_tokens: bool = False,
        clean_up_tokenization_spaces: bool | None = None,
    ) -> Any:
        """Decode ids to text, or each list of ids.

        Args:
            token_ids: One id, several, or lists of them, also as arrays; ids without a token have
                no text.
            skip_special_tokens: Leave special tokens out.
            clean_up_tokenization_spaces: Remove spaces before punctuation, except from texts of
                BPE; None is the attribute.
        """
        ids = _plain_ids(token_ids)
        if isinstance(ids, int):
            ids = [ids]
        elif ids and isinstance(ids[0], list):
            return [
                self.decode(each, skip_special_tokens, clean_up_tokenization_spaces) for each in ids
            ]
        text = self.backend_tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
        if clean_up_tokenization_spaces is None:
            clean_up_tokenization_spaces = self.clean_up_tokenization_spaces
        if clean_up_tokenization_spaces and not isinstance(self.backend_tokenizer.model, BPE):
            for written, clean in _CLEAN_UPS:
                text = text.replace(written, clean)
        return text

    def batch_decode(
        self,
        sequences: Any,
        skip_special_tokens: bool = False,
        clean_up_tokenization_spaces: bool | None = None,
    ) -> list[str]:
        """Decode each list of ids; see `decode`."""
        texts = self.decode(sequences, skip_special_tokens, clean_up_tokenization_spaces)
        return [texts] if isinstance(texts, str) else texts

    def convert_ids_to_tokens(self, ids: Any, skip_special_tokens: bool = False) -> Any:
        """Look up the vocabulary's string of one id or each id; None for an id without a token."""
        if isinstance(ids, int):
            return self.backend_tokenizer.id_to_token(ids)
        skipped = self.all_special_ids if skip_special_tokens else ()
        return [self.backend_tokenizer.id_to_token(each) for each in ids if each not in skipped]

    def convert_tokens_to_ids(self, tokens: Any) -> Any:
        """Look up the id of one token or each; that of ``unk_token`` for an unknown one."""
        if not isinstance(tokens, str):
            return [self.convert_tokens_to_ids(token) for token in tokens]
        token_id = self.backend_tokenizer.token_to_id(tokens)
        return self.unk_token_id if token_id is None else token_id

    def convert_tokens_to_string(self, tokens: Sequence[str]) -> str:
        """Join the vocabulary's strings to the text that they encode."""
        decoder = self.backend_tokenizer.decoder
        return " ".join(tokens) if decoder is None else decoder.decode(list(tokens))

    def get_vocab(self) -> dict[str, int]:
        """Ids by token, added tokens included."""
        return self.backend_tokenizer.get_vocab(with_added_tokens=True)

    def get_added_vocab(self) -> dict[str, int]:
        """Ids of the added tokens."""
        return {token.content: index for index, token in sorted(self.added_tokens_decoder.items())}

    def num_special_tokens_to_add(self, pair: bool = False) -> int:
        """Number of special tokens around a text, or around a pair."""
        return self.backend_tokenizer.num_special_tokens_to_add(pair)

    def apply_chat_template(
        self,
        conversation: Sequence[Any],
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        *,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        tokenize: bool = True,
        return_dict: bool = True,
        tokenizer_kwargs: Mapping[str, Any] | None = None,
        **variables: Any,
    ) -> Any:
        """Render a conversation, or each of a list, by a chat template.

        Args:
            conversation: Messages, each with a role, or conversations.
            tools: Tool definitions for the template.
            documents: Documents for the template.
            chat_template: Template, or the name of one of the model's; None is the model's.
            add_generation_prompt: Append the prompt that starts the assistant's reply.
            continue_final_message: Leave the last message open.
            tokenize: Return the encoded text instead of the text.
            return_dict: Return `Encoded` instead of the ids alone.
            tokenizer_kwargs: Options of `__call__`.
            **variables: Further variables of the template; with ``tokenize``, ``padding``,
                ``truncation`` and ``max_length`` are options of `__call__`.

        Raises:
            ValueError: No template, messages that cannot be rendered, or an unsupported option.
            jinja2.TemplateError: An error of the template.
            ImportError: jinja2 is not installed.
        """
        _refuse({name: variables.pop(name) for name in _OF_CHATS & variables.keys()})
        options = {name: variables.pop(name) for name in _OF_CALLS & variables.keys() if tokenize}
        with extra_needed("a chat template", "cpu"):
            from pagedserve.inputs.chat_renderer import render_chat
        render = partial(
            render_chat,
            self.get_chat_template(chat_template, tools),
            tools=tools,
            documents=documents,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            variables=self.special_tokens_map | variables,
        )
        is_batch = bool(conversation) and isinstance(conversation[0], list | tuple)
        text = [render(each) for each in conversation] if is_batch else render(conversation)
        if not tokenize:
            return text
        options = {"truncation": False} | options
        encoded = self(text, add_special_tokens=False, **options, **(tokenizer_kwargs or {}))
        return encoded if return_dict else encoded.input_ids

    def get_chat_template(
        self,
        chat_template: str | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """Choose the template as transformers does.

        Raises:
            ValueError: There is none, or none of several is the default.
        """
        known, template = self.chat_template, chat_template
        if isinstance(known, dict):
            preferred = (*("tool_use",) * (tools is not None), "default")
            names = preferred if template is None else (template,)
            template = next((known[name] for name in names if name in known), template)
        elif template is None:
            template = known
        if template is None:
            raise ValueError("the tokenizer has no default chat template")
        return template

    def _encoded(
        self, batch: Sequence[Any], limit: int | None, *, add_special_tokens: bool
    ) -> list[Encoding]:
        """Encode a batch of texts or pairs, each truncated to a limit."""
        if limit is None:
            return self.backend_tokenizer.encode_batch(batch, add_special_tokens=add_special_tokens)
        return [
            self._truncated(
                [each] if isinstance(each, str) else each,
                limit,
                add_special_tokens=add_special_tokens,
            )
            for each in batch
        ]

    def _truncated(
        self, texts: Sequence[str], max_length: int, *, add_special_tokens: bool
    ) -> Encoding:
        """Encode one text or two, truncated before special tokens are added."""
        backend, num_special = self.backend_tokenizer, 0
        if add_special_tokens:
            num_special = backend.num_special_tokens_to_add(len(texts) > 1)
        encodings = backend.encode_batch(list(texts), add_special_tokens=False)
        lengths = [len(encoding.ids) for encoding in encodings]
        limits = _limits(lengths, max(0, max_length - num_special))
        for encoding, limit in zip(encodings, limits, strict=True):
            encoding.truncate(limit, direction=self.truncation_side)
        pair = encodings[1] if len(encodings) > 1 else None
        return backend.post_process(encodings[0], pair, add_special_tokens=add_special_tokens)

    def _pad(self, found: Sequence[Encoding], length: int | None) -> None:
        """Pad a batch to a length, or without one to that of the longest text."""
        if self.pad_token is None or self.pad_token_id is None:
            raise ValueError("padding needs pad_token; set it: tokenizer.pad_token = ...")
        longest = max((len(encoding.ids) for encoding in found), default=0)
        length = longest if length is None else length
        for encoding in found if length <= _MAX_LIMIT else ():
            encoding.pad(
                length,
                direction=self.padding_side,
                pad_id=self.pad_token_id,
                pad_token=self.pad_token,
            )


def _batch(text: Any, text_pair: Any) -> list[Any]:
    """Texts and pairs of texts, of one text or a list."""
    if not isinstance(text, list | tuple):
        return [(text, text_pair) if text_pair else text]
    if text_pair is None:
        return list(text)
    if isinstance(text_pair, str):
        raise TypeError("text is a list and text_pair a text; it must be a list too")
    return list(zip(text, text_pair, strict=True))


def _plain_ids(given: Any) -> Any:
    """An id, a list of ids or lists of them, of arrays and encoded texts too."""
    if isinstance(given, Mapping):
        given = given["input_ids"]
    if hasattr(given, "tolist"):
        return given.tolist()
    if isinstance(given, int):
        return given
    return [each if isinstance(each, int) else _plain_ids(each) for each in given]


def _is_on(name: str, value: Any, on: Sequence[object], off: Sequence[object]) -> bool:
    """Whether an option with these values is on.

    Raises:
        ValueError: Another value.
    """
    if value not in (*on, *off):
        accepted = ", ".join(map(repr, (*on, *off)))
        raise ValueError(f"{name} is {value!r}; it must be one of {accepted}")
    return value in on


def _refuse(options: Mapping[str, Any]) -> None:
    """Refuse options with another value than one that changes nothing."""
    for name, value in options.items():
        if name not in _NEUTRAL:
            raise TypeError(f"unexpected keyword argument {name!r}")
        if not is_neutral(value, _NEUTRAL[name]):
            raise ValueError(
                f"{name} is {value!r}, which this tokenizer does not support; leave it out or give "
                f"{_NEUTRAL[name][0]!r}"
            )


def _limits(lengths: Sequence[int], most: int) -> Sequence[int]:
    """Tokens of each of one or two texts so that all have at most ``most``, longest text first."""
    if sum(lengths) <= most or len(lengths) == 1:
        return [min(length, most) for length in lengths]
    shorter = min(lengths)
    longer = shorter if shorter > most else max(shorter, most - shorter)
    if shorter + longer > most:
        shorter, longer = most // 2, most // 2 + most % 2
    return (longer, shorter) if lengths[0] > lengths[1] else (shorter, longer)
