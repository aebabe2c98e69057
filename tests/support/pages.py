"""Writes the tables of options into the pages under docs: ``make options``."""

from pathlib import Path
from typing import Final

from pagedserve.config import EngineArgs
from pagedserve.deploy.options import DeployArgs
from pagedserve.options import with_table
from pagedserve.server.options import ServerArgs
from pagedserve.speculative_config import SpeculativeConfig

DOCS: Final = Path(__file__).parents[2] / "docs"
# The pages and whose options they list.
PAGES: Final[dict[str, type]] = {
    "options.md": EngineArgs,
    "serving.md": ServerArgs,
    "speculation.md": SpeculativeConfig,
    "deploy.md": DeployArgs,
}


def main() -> None:
    """Bring every table up to date."""
    for name, arguments in PAGES.items():
        page = (DOCS / name).read_text(encoding="utf-8")
        (DOCS / name).write_text(with_table(page, arguments), encoding="utf-8")


if __name__ == "__main__":
    main()
