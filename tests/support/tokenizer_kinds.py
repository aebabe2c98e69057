"""Tokenizers of every kind, trained on the spot, and GGUF files with such vocabularies."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from gguf import GGUFWriter
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import PreTrainedTokenizerFast

from pagedserve.models.tokenizer.fast_tokenizer import FastTokenizer

# Ours, and that of transformers.
Pair = tuple[FastTokenizer, Any]

LICENSE = (Path(__file__).parents[2] / "LICENSE").read_text(encoding="utf-8")
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<{{ message.role }}>{{ message.content }}"
    "{% generation %}{% if loop.last %}{{ eos_token }}{% endif %}{% endgeneration %}"
    "{% endfor %}{% if tools %}{{ tools | tojson(indent=1) }}{% endif %}"
    "{% if documents %}{{ documents | tojson }}{% endif %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
SPECIAL = ["<unk>", "<s>", "</s>", "<|user|>"]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
# One character of each plane of Unicode that has any, marks, controls, and spaces of all kinds.
PLANES = "a\u00e9\u0301\u4e2d\u0627\u200d\ufeff\U0001f642\U00020000\U0003134a\U000e0041\U0010fffd"
TEXTS = [
    "",
    " ",
    "  ",
    "\n",
    "\n\n\n",
    "\t \r\n \u00a0\u2003\u3000x",
    "Hello  world, it's 12345 o'clock. They'll WON'T stop ...  ",
    " leading and trailing ",
    "line one\nline two\n\n  indented\n",
    "<s>hello</s> <|user|>x<|user|><s><s>",
    "<unk> <0x0A> <0xE2><0x82> \u2581under\u2581score",
    PLANES,
    " ".join(PLANES),
    "\U0001f468\u200d\U0001f469\u200d\U0001f467 \u0928\u092e\u0938\u094d\u0924\u0947",
    "e\u0301 \u1e9b\u0323 \ufb01 \u2460 \u00c5ngstr\u00f6m \ud55c\uad6d\uc5b4 \u65e5\u672c\u8a9e",
    "\x00\x01\x7f\x80",
    "def f(x):\n    return {'a': [1, 2.50], \"b\": None}  # comment\n",
    LICENSE[:600],
]


def byte_level() -> Tokenizer:
    """Llama 3's kind."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(LICENSE.splitlines(), trainer)
    return tokenizer


def byte_fallback() -> Tokenizer:
    """Mistral's kind: SentencePiece's BPE, whose unknown characters are bytes."""
    trained = Tokenizer(models.BPE(unk_token="<unk>"))
    trained.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=SPECIAL, show_progress=False)
    trained.train_from_iterator(LICENSE.splitlines(), trainer)
    learned = trained.get_vocab()
    tokens = [*SPECIAL, *BYTES, *sorted(learned.keys() - {*SPECIAL}, key=learned.__getitem__)]
    vocab = {token: index for index, token in enumerate(tokens)}
    merges = [
        (token[:cut], token[cut:])
        for token in tokens[len(SPECIAL) + len(BYTES) :]
        for cut in range(len(token) - 1, 0, -1)
        if token[:cut] in vocab and token[cut:] in vocab
    ]
    tokenizer = Tokenizer(
        models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])
    return tokenizer


def unigram() -> Tokenizer:
    """T5's kind."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=400, special_tokens=SPECIAL, unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(LICENSE.splitlines(), trainer)
    return tokenizer


def word_piece() -> Tokenizer:
    """BERT's kind."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="<unk>"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    trainer = trainers.WordPieceTrainer(vocab_size=500, special_tokens=SPECIAL, show_progress=False)
    tokenizer.train_from_iterator(LICENSE.splitlines(), trainer)
    return tokenizer


KINDS: dict[str, Callable[[], Tokenizer]] = {
    "byte_level": byte_level,
    "byte_fallback": byte_fallback,
    "unigram": unigram,
    "word_piece": word_piece,
}


def save(kind: str, directory: Path, **options: Any) -> PreTrainedTokenizerFast:
    """Save a tokenizer of a kind with special tokens around each text; returns transformers'."""
    backend = KINDS[kind]()
    ids = [(token, backend.token_to_id(token)) for token in ("<s>", "</s>")]
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A </s>:0 $B:1 </s>:1", special_tokens=ids
    )
    backend.add_tokens([AddedToken("<tool>", special=False), AddedToken("<b>", lstrip=True)])
    named = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, chat_template=TEMPLATE, **(named | options)
    )
    tokenizer.save_pretrained(directory)
    loaded: PreTrainedTokenizerFast = PreTrainedTokenizerFast.from_pretrained(directory)
    return loaded


def write_gguf(path: Path, architecture: str, kind: str, **fields: Any) -> None:
    """Write a GGUF file that is nothing but a tokenizer.

    Args:
        path: The file.
        architecture: ``general.architecture``.
        kind: ``tokenizer.ggml.model``.
        **fields: Further fields, by the names of `GGUFWriter`'s methods without ``add_``.
    """
    writer = GGUFWriter(path, architecture)
    writer.add_tokenizer_model(kind)
    for name, value in fields.items():
        getattr(writer, f"add_{name}")(value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()


def assert_same(pair: Pair, text: str) -> list[int]:
    """Check that ours gives the ids of transformers' and the texts of them; return the ids."""
    ours, theirs = pair
    for adds in (True, False):
        expected: list[int] = theirs(text, add_special_tokens=adds, verbose=False).input_ids
        assert ours(text, add_special_tokens=adds).input_ids == expected
        assert ours.encode(text, add_special_tokens=adds) == expected
    for skip in (True, False):
        shown = theirs.decode(expected, skip_special_tokens=skip)
        assert ours.decode(expected, skip_special_tokens=skip) == shown
    return expected
