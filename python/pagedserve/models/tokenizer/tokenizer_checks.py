"""Checks of a tokenizer's files, which are untrusted."""

from contextlib import suppress
from typing import Final

from pagedserve.errors import ModelLoadError, panic_as_error
from pagedserve.tokenizer import Tokenizer

# Grammars and drafts build a table with a row for each token.
MAX_TOKEN_ID: Final = 1 << 24


def check_token_ids(tokenizer: Tokenizer) -> None:
    """Check the token ids of a tokenizer.

    Raises:
        ModelLoadError: A token id is too large.
    """
    last = max(tokenizer.get_vocab().values(), default=0)
    if last > MAX_TOKEN_ID:
        raise ModelLoadError(
            f"its tokenizer has the token {last}; accepted are up to {MAX_TOKEN_ID}"
        )


def check_chat_template(tokenizer: Tokenizer) -> None:
    """Check the chat templates of a tokenizer.

    Raises:
        ModelLoadError: A chat template is not text.
    """
    given: object = tokenizer.chat_template
    texts = list(given.values()) if isinstance(given, dict) else [given]
    if given is not None and not all(isinstance(text, str) for text in texts):
        raise ModelLoadError(f"chat_template is {str(given)[:80]!r}; it must be a text")


def check_texts(tokenizer: Tokenizer) -> None:
    """Check that a tokenizer encodes and decodes a text without a panic of its library.

    Raises:
        ModelLoadError: It panics.
    """
    try:
        # A text that it refuses is an error of a request.
        with panic_as_error(), suppress(Exception):
            tokenizer.decode(tokenizer("a b").input_ids)
    except RuntimeError as error:
        raise ModelLoadError(f"its tokenizer cannot be used: {error}") from error
