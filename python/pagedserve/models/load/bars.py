"""Progress bars over tqdm, whose import takes a tenth of a start that shows none."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any, TypeVar, cast

from tqdm import tqdm

from pagedserve.models.load.progress import are_bars_shown

T = TypeVar("T")


class Bar(tqdm):  # type: ignore[misc]  # tqdm has no types
    """A progress bar as wide as the terminal, if bars are shown."""

    def __init__(self, *positional: Any, is_shown: bool = True, **named: Any) -> None:
        """Create a bar as ``tqdm`` does; ``is_shown`` may hide it where others are shown."""
        settings = {"dynamic_ncols": True, "disable": not (is_shown and are_bars_shown())}
        super().__init__(*positional, **(named | settings))


class DownloadBar(Bar):
    """The bar of a download's bytes, one of three that huggingface_hub shows at a time."""

    def __init__(self, *positional: Any, **named: Any) -> None:
        """Create a bar as ``tqdm`` does; only bytes written are shown."""
        is_shown = named.get("unit") == "B" and named.get("desc") != "Downloading bytes"
        settings = {"desc": "downloading", "bar_format": None, "is_shown": is_shown}
        super().__init__(*positional, **(named | settings))

    def set_description(self, desc: str | None = None, *, refresh: bool | None = True) -> None:
        """Keep the description."""


@contextmanager
def bars_of(module: ModuleType) -> Iterator[None]:
    """A context in which a library's module uses our bars."""
    before = module.tqdm
    module.tqdm = Bar  # type: ignore[attr-defined]  # the library has no option for it
    try:
        yield
    finally:
        module.tqdm = before  # type: ignore[attr-defined]


def progress(items: Iterable[T], what: str) -> Iterator[T]:
    """Iterate over items, with a bar that shows how many of them are done."""
    return cast(Iterator[T], iter(Bar(items, desc=what)))
