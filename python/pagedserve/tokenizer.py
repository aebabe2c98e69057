"""``Tokenizer``: the interface of a model's tokenizer that the engine and the server use.

Tokenizers of transformers satisfy it, and so does
`pagedserve.models.tokenizer.fast_tokenizer.FastTokenizer`, which needs neither transformers nor
torch.
"""

from collections.abc import Mapping
from typing import Any, Protocol


class TextTokenizer(Protocol):
    """The part that turns tokens into text."""

    @property
    def added_tokens_decoder(self) -> Mapping[int, Any]:
        """Added tokens by id, each with a flag ``special``."""

    def decode(
        self,
        token_ids: Any,
        *,
        skip_special_tokens: bool = False,
        clean_up_tokenization_spaces: bool | None = None,
    ) -> Any:
        """Decode ids to text."""

    def convert_ids_to_tokens(self, ids: Any) -> Any:
        """Look up the vocabulary's string of each id; None for an id without a token."""


class Tokenizer(TextTokenizer, Protocol):
    """Tokenizer of a model, with the names of transformers."""

    @property
    def chat_template(self) -> Any:
        """Chat template, or templates by name; None if the model has none."""

    @property
    def eos_token_id(self) -> Any:
        """Token that ends a text; None without one."""

    def __call__(
        self,
        text: str,
        text_pair: str | None = None,
        *,
        add_special_tokens: bool = True,
        truncation: bool = False,
        max_length: int | None = None,
        verbose: bool = True,
    ) -> Any:
        """Encode a text or a pair of texts; ``input_ids`` of the result has the ids."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Encode a text to ids, with the special tokens that the model expects around a text."""

    def get_vocab(self) -> dict[str, int]:
        """Ids by token, added tokens included."""

    def apply_chat_template(self, conversation: Any, **options: Any) -> Any:
        """Render a conversation: to a text with ``tokenize=False``, else to its ids."""
