"""The tokenizer of a model without one, for ``load_format="dummy"``."""

from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit


def number_tokenizer(vocab_size: int) -> Tokenizer:
    """Create a tokenizer whose words are token ids: "5 17" is [5, 17]; other words are 0."""
    words = {str(token): token for token in range(vocab_size)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="0"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    return tokenizer
