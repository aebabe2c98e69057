"""Tokenizers with only a SentencePiece model, as transformers converts them.

transformers merges by the order of ids, SentencePiece by scores, which is another order in Llama's
and Mistral's models; and it omits a space that SentencePiece prepends to a text that starts with
one.  So a converted tokenizer gets both from its model, and is compared with SentencePiece itself
on text for which conversions are often wrong.
"""

from pathlib import Path
from typing import Any, Final

from tokenizers.models import BPE
from tokenizers.normalizers import Prepend, Replace, Sequence
from transformers import PreTrainedTokenizerBase
from transformers.tokenization_utils_base import generate_merges

from pagedserve.errors import ModelLoadError, extra_needed

SAMPLES: Final = (
    "Hello  wörld, 你好!   two words\n\tTab 1234 🙂\n\nend. ",
    "  spaces in front",
    "\nno space",
)

_SPACE: Final = "▁"


def match_sentencepiece(tokenizer: PreTrainedTokenizerBase, model_file: Path) -> None:
    """Make a tokenizer split text as the SentencePiece model that it was converted from.

    Args:
        tokenizer: tokenizer, modified in place.
        model_file: SentencePiece model.

    Raises:
        ModelLoadError: it still splits text differently.
        ImportError: SentencePiece is not installed.
    """
    with extra_needed(f"{model_file.name} without tokenizer.json", "tokenizers"):
        from sentencepiece import SentencePieceProcessor
    exact = SentencePieceProcessor(model_file=str(model_file))
    backend: Any = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None and isinstance(backend.model, BPE):
        vocab = backend.get_vocab(with_added_tokens=False)
        scores = {
            exact.id_to_piece(token): exact.get_score(token) for token in range(exact.vocab_size())
        }
        backend.model = BPE(
            vocab=vocab,
            merges=generate_merges(vocab, scores),
            unk_token=backend.model.unk_token,
            fuse_unk=backend.model.fuse_unk,
            byte_fallback=backend.model.byte_fallback,
        )
        if exact.id_to_piece(exact.encode("a")[0]).startswith(_SPACE):
            backend.normalizer = Sequence([Prepend(_SPACE), Replace(" ", _SPACE)])
            backend.pre_tokenizer = None
    found = [tokenizer(text, add_special_tokens=False).input_ids for text in SAMPLES]
    texts = [tokenizer.decode(ids) for ids in found]
    if found != exact.encode(list(SAMPLES)) or texts != list(SAMPLES):
        raise ModelLoadError(
            f"what transformers makes of {model_file.name} splits text in another way than "
            "SentencePiece does; name its class in tokenizer_config.json, or give tokenizer.json"
        )
