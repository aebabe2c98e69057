"""The families of decoder models whose every layer Rust computes."""

from collections.abc import Mapping
from typing import Any

from pagedserve.models.families.record import DecoderFamily
from pagedserve.models.families.table import DECODERS, family_of
from pagedserve.native.choice import OTHER_BACKEND


class UnsupportedError(ValueError):
    """What the files describe is not supported by the native backend; says what is."""


def decoder_family(content: Mapping[str, Any]) -> DecoderFamily:
    """Family of a ``config.json``.

    Raises:
        UnsupportedError: It is another one; lists those that are supported.
    """
    model_type = content.get("model_type")
    found = family_of(model_type) if isinstance(model_type, str) else None
    family = found if isinstance(found, DecoderFamily) else None
    names = content.get("architectures") or [family and family.architecture]
    if family is None or family.architecture not in names:
        known = ", ".join(known.architecture for known in DECODERS)
        architectures = ", ".join(str(name)[:80] for name in names if name) or "unnamed"
        raise UnsupportedError(
            f"architecture {architectures} (model_type {str(model_type)[:80]!r}) is not supported "
            f"by the native backend, which has {known}: {OTHER_BACKEND}"
        )
    return family
