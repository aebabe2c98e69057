"""Draw docs/images/throughput.svg from benches/results/chart.csv: `make chart`."""

import csv
from itertools import groupby
from pathlib import Path
from typing import Final
from xml.sax.saxutils import escape

ROOT: Final = Path(__file__).parents[2]
TABLE: Final = ROOT / "benches" / "results" / "chart.csv"
CHART: Final = ROOT / "docs" / "images" / "throughput.svg"

WIDTH: Final = 720
BAR_LEFT, BAR_WIDTH, BAR_HEIGHT = 170, 470, 18
TITLE: Final = "Generated tokens per second on 2 CPU cores, SmolLM2-135M (more is better)"
# Colours that hold on a light and on a dark page.
OURS, OTHERS, TEXT = "#d9632a", "#8a94a3", "#7b8491"


def draw(table: str) -> str:
    """Return the chart of a table in CSV as SVG.

    Args:
        table: Rows with the columns of benches/results/chart.csv; equal groups are adjacent.
    """
    rows = list(csv.DictReader(table.splitlines()))
    most = max(float(row["tokens_per_second"]) for row in rows)
    parts = [_text(0, 18, TITLE, size=15, weight=600)]
    y = 34
    for (group, note), bars in groupby(rows, key=lambda row: (row["group"], row["note"])):
        y += 22
        parts.append(_text(0, y, f"{group} ({note})", size=13, weight=600))
        y += 8
        for row in bars:
            parts += _bar(y, row["name"], float(row["tokens_per_second"]), most)
            y += BAR_HEIGHT + 5
    height = y + 6
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        f'width="{WIDTH}" height="{height}" font-family="system-ui, sans-serif" role="img">\n'
        f"<title>{escape(TITLE)}</title>\n" + "\n".join(parts) + "\n</svg>\n"
    )


def _bar(y: int, name: str, value: float, most: float) -> list[str]:
    length = round(BAR_WIDTH * value / most, 1)
    colour = OURS if name.startswith("pagedserve") else OTHERS
    middle = y + BAR_HEIGHT - 5
    size = f'width="{length}" height="{BAR_HEIGHT}"'
    return [
        _text(BAR_LEFT - 8, middle, name, anchor="end"),
        f'<rect x="{BAR_LEFT}" y="{y}" {size} rx="2" fill="{colour}"/>',
        _text(BAR_LEFT + length + 6, middle, f"{value:g}"),
    ]


def _text(
    x: float, y: int, text: str, *, size: int = 12, weight: int = 400, anchor: str = "start"
) -> str:
    return (
        f'<text x="{x:g}" y="{y}" font-size="{size}" font-weight="{weight}" '
        f'text-anchor="{anchor}" fill="{TEXT}">{escape(text)}</text>'
    )


def main() -> None:
    """Write the chart."""
    CHART.write_text(draw(TABLE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
