"""Tokenizers of the three kinds of decoder, made on the spot, and the real one."""

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def byte_level() -> Tokenizer:
    """GPT-2's kind: all bytes, a few merges, special and ordinary added tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {character: index for index, character in enumerate(alphabet)}
    merges = [("Ġ", "t"), ("h", "e"), ("Ġt", "he"), ("ð", "Ł"), ("æ", "Ĺ"), ("â", "Ģ")]
    for left, right in merges:
        vocabulary[left + right] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    # Added tokens are written as they are, but for those that read as bytes: "é" is byte 0xE9.
    tokenizer.add_special_tokens(["<|end|>", "<fin de▁texte>", "é"])
    tokenizer.add_tokens([AddedToken("日本", special=False), AddedToken("<tool>", special=False)])
    return tokenizer


def byte_level_in_a_sequence() -> Tokenizer:
    """The same behind a decoder whose kind does not show."""
    tokenizer = byte_level()
    tokenizer.decoder = decoders.Sequence([decoders.ByteLevel()])
    return tokenizer


def byte_fallback() -> Tokenizer:
    """Llama 2's kind: words with a mark for the space, unknown characters as byte tokens."""
    words = ["▁a", "▁b", "▁", "c", "é", "日", ".", "\ufffd", "▁hello"]
    tokens = ["<unk>", "<s>", "</s>", *BYTES, *words]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(
        models.BPE(vocab=vocabulary, merges=[], byte_fallback=True, unk_token="<unk>")
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens(["<s>", "</s>", "▁<end> "])
    tokenizer.add_tokens([AddedToken("<tool>", special=False)])
    return tokenizer


def word_pieces() -> Tokenizer:
    """BERT's kind: a space before each word, none before what continues one."""
    tokens = ["[UNK]", "the", "##n", "##é", "day", ".", ",", "日", "n't", "do"]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    tokenizer.add_special_tokens(["[SEP]", "##[end]"])
    return tokenizer


TOYS = [byte_level, byte_level_in_a_sequence, byte_fallback, word_pieces]


@pytest.fixture(scope="session", params=TOYS)
def toy_tokenizer(request: pytest.FixtureRequest) -> PreTrainedTokenizerBase:
    return PreTrainedTokenizerFast(tokenizer_object=request.param())
