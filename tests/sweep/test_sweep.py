"""A few architectures of `make sweep`: a kind of attention each, and a kind of refusal each."""

import pytest

from tests.sweep.outcome import Kind, Outcome, run_architecture


@pytest.mark.parametrize(
    ("model_type", "kind", "reason"),
    [
        ("llama", "exact", ""),
        ("gemma3_text", "exact", ""),  # windows in some of the layers
        ("deepseek_v3", "exact", ""),  # latent attention, experts
        ("gpt_oss", "exact", ""),  # sinks
        ("longcat_flash", "exact", ""),  # two attentions a layer, and a router that is read
        ("whisper", "exact", ""),  # gives the logits of all tokens
        ("zaya", "exact", ""),  # a convolution makes its queries, keys and values
        ("gemma4_unified", "refused", "the rule of a mask reads the tokens of a batch"),
        ("blt", "refused", "num_hidden_layers"),  # several models in one
        ("recurrent_gemma", "refused", "'linear_attention'"),
        ("xlnet", "refused", "XLNetLMHeadModel"),  # says that it has -1 positions
        ("bert", "exact", ""),  # a decoder here
    ],
)
def test_an_architecture_is_exact_or_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, model_type: str, kind: Kind, reason: str
) -> None:
    monkeypatch.setenv("PAGEDSERVE_CACHE", "")  # put back what the run sets
    found = run_architecture(model_type)
    assert found.kind == kind
    assert reason in found.reason


def test_what_cannot_be_built_is_not_called_refused() -> None:
    assert run_architecture("musicgen") == Outcome(
        "musicgen", "not built", "'MusicgenConfig' object has no attribute 'dropout'"
    )
