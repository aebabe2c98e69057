"""``MultimodalArgs``: options of images in prompts."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import pagedserve.checks as checks
from pagedserve.config.options import option, parse_mapping

# Default limit of images per prompt.
MAX_IMAGES: Final = 16


def _limit_of_images(name: str, value: object) -> dict[str, int]:
    """Check an option: a mapping of ``image`` to the maximum number of images per prompt.

    Those of audio, of which a prompt has one at most, and of videos, which no model accepts, have
    no effect; those of other kinds may be 0.
    """
    limits = checks.mapping(name, value)
    if any(limits[kind] != 0 for kind in set(limits) - {"image", "audio", "video"}):
        accepted = (
            'a mapping like {"image": 4}, in which "audio" and "video" have no effect and others '
            "may be 0"
        )
        checks.refuse(name, value, accepted)
    return {kind: checks.count(0)(name, most) for kind, most in limits.items()}


@dataclass(kw_only=True)
class MultimodalArgs:
    """The options of ``EngineArgs`` for images in prompts."""

    limit_mm_per_prompt: Mapping[str, int] | None = option(
        None,
        checks.optional(_limit_of_images),
        'Maximum number of images per prompt, as {"image": 4}; JSON on the command line.',
        concern="multimodal input",
        unset=f'{{"image": {MAX_IMAGES}}}',
        parse=parse_mapping,
    )
    mm_processor_cache_gb: float = option(
        1.0,
        checks.real("a number of GiB, at least 0", low=0),
        "Host memory for the features of images, in GiB, kept for later requests with the same "
        "images.",
        concern="multimodal input",
    )

    @property
    def max_images_per_prompt(self) -> int:
        """Maximum number of images per prompt."""
        return (self.limit_mm_per_prompt or {}).get("image", MAX_IMAGES)
