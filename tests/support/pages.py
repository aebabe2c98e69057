"""Writes the tables of options into the pages under docs: ``make options``."""

from pathlib import Path
from typing import Final

from pagedserve.config import EngineArgs
from pagedserve.config.speculative import SpeculativeConfig
from pagedserve.deploy.options import DeployArgs
from pagedserve.sampling_params.options import SamplingOptions
from pagedserve.server.http.bounds import BOUNDS
from pagedserve.server.options import ServerArgs
from tests.support.option_tables import with_table

DOCS: Final = Path(__file__).parents[2] / "docs"
# The pages and whose options they list.
PAGES: Final[dict[str, type]] = {
    "options.md": EngineArgs,
    "sampling.md": SamplingOptions,
    "serving.md": ServerArgs,
    "speculation.md": SpeculativeConfig,
    "deploy.md": DeployArgs,
}

# The page of bounds, and what is around its table.
LIMITS: Final = DOCS / "limits.md"
_BEGIN: Final = "<!-- made by `make options` from python/pagedserve/server/http/bounds.py -->\n"
_END: Final = "<!-- end of the table -->"


def with_bounds(page: str) -> str:
    """The page with the table of bounds as they are."""
    before, _, rest = page.partition(_BEGIN)
    lines = ["| field | at most | of what |", "|---|---|---|"]
    for bound in BOUNDS:
        most = bound.most if isinstance(bound.most, str) else f"{bound.most:,}"
        lines.append(f"| `{bound.path}` | {most} | {bound.unit} |")
    return before + _BEGIN + "\n" + "\n".join(lines) + "\n\n" + _END + rest.partition(_END)[2]


def main() -> None:
    """Bring every table up to date."""
    LIMITS.write_text(with_bounds(LIMITS.read_text(encoding="utf-8")), encoding="utf-8")
    for name, arguments in PAGES.items():
        page = (DOCS / name).read_text(encoding="utf-8")
        (DOCS / name).write_text(with_table(page, arguments), encoding="utf-8")


if __name__ == "__main__":
    main()
