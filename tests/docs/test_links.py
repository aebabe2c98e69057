"""Links of the README and the pages under docs lead somewhere, and to every page."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

ROOT: Final = Path(__file__).parents[2]
DOCS: Final = ROOT / "docs"
FRONT: Final = [ROOT / "README.md", ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md"]
PAGES: Final = [*FRONT, *sorted(DOCS.glob("**/*.md"))]
MOST_LINES: Final = {"README.md": 150, "CHANGELOG.md": 120}

_CODE: Final = re.compile(r"```.*?```|`[^`\n]*`", re.DOTALL)
_LINK: Final = re.compile(r"\]\(([^)\s]+)\)")
_HEADING: Final = re.compile(r"^#+ (.+)$", re.MULTILINE)


def links_of(page: Path) -> Iterator[tuple[Path, str]]:
    """The file and the anchor of each relative link, images among them."""
    text = _CODE.sub("", page.read_text(encoding="utf-8"))
    for link in _LINK.findall(text):
        if not re.match(r"[a-z]+:", link):
            target, _, anchor = link.partition("#")
            yield (page.parent / target).resolve() if target else page, anchor


def anchors_of(page: Path) -> set[str]:
    """The anchors that GitHub makes of a page's headings."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    return {
        re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        for heading in _HEADING.findall(text)
    }


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_resolve(page: Path) -> None:
    for target, anchor in links_of(page):
        assert target.exists(), f"{page.name} links to {target}"
        if anchor:
            assert anchor in anchors_of(target), f"{page.name} links to {target.name}#{anchor}"


def test_every_page_is_reachable_from_the_index() -> None:
    reached: set[Path] = set()
    waiting = [DOCS / "README.md"]
    while waiting:
        page = waiting.pop()
        if page not in reached and page.suffix == ".md":
            reached.add(page)
            waiting += [target for target, _ in links_of(page)]
    assert set(DOCS.glob("**/*.md")) <= reached


def test_every_picture_is_shown() -> None:
    shown = {target for page in PAGES for target, _ in links_of(page)}
    assert set((DOCS / "images").iterdir()) <= shown


@pytest.mark.parametrize("name", MOST_LINES)
def test_front_pages_are_short(name: str) -> None:
    assert len((ROOT / name).read_text(encoding="utf-8").splitlines()) <= MOST_LINES[name]


def test_chart_is_that_of_its_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "benches" / "python")
    from chart import CHART, TABLE, draw

    table = TABLE.read_text(encoding="utf-8")
    assert CHART.read_text(encoding="utf-8") == draw(table)
    sources = [line.rsplit(",", 1)[1] for line in table.splitlines()[1:]]
    assert all((TABLE.parent / source).is_file() for source in sources)
