"""Parsers of other packages, as further rows of the tables of tool call and reasoning formats.

A Python file has them in ``TOOL_PARSERS`` or ``REASONING_PARSERS``, a mapping of names to formats;
an installed package has each as an entry point of a group.  docs/plugins.md has an example, which
imports the types of rows from this module.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import pagedserve.checks as checks
from pagedserve.config.reasoning import REASONING_FORMATS, ReasoningFormat
from pagedserve.errors import ConfigError, RequestError
from pagedserve.plugins import has_entry_point, module_of_file, object_of
from pagedserve.server.tools.formats import TOOL_FORMATS, ToolFormat, tool_format_of
from pagedserve.server.tools.readers import Call, Schemas

__all__ = [
    "REASONING_PARSERS",
    "TOOL_PARSERS",
    "Call",
    "ParserTable",
    "ReasoningFormat",
    "Schemas",
    "ToolFormat",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class ParserTable:
    """A table of formats, and where further rows come from.

    Attributes:
        rows: Formats by name.
        kind: Type of a row.
        attribute: Name of the mapping in a plug-in file.
        group: Group of entry points.
    """

    rows: dict[str, Any]
    kind: type
    attribute: str
    group: str

    def add_file(self, option: str, path: str) -> None:
        """Add the rows of a plug-in file.

        Raises:
            ConfigError: The file cannot be imported, has no rows, or one of another type or name.
        """
        rows = getattr(module_of_file(option, path), self.attribute, None)
        if not isinstance(rows, Mapping) or not rows:
            raise ConfigError(
                f"{option} is {path!r}, whose {self.attribute} is {rows!r}; it must be a mapping "
                f"of names to {self.kind.__name__}"
            )
        for name, row in rows.items():
            self._add(f"{self.attribute} of {option}", name, row)

    def check(self, option: str, name: str | None) -> None:
        """Check that a row has the name of an option; add it if it is an entry point.

        Raises:
            ConfigError: There is none.
        """
        if name is None or name in self.rows:
            return
        if has_entry_point(name, self.group):
            self._add(option, name, object_of(option, name, self.group))
            return
        try:
            checks.choice((*self.rows, None))(option, name)
        except RequestError as error:
            raise ConfigError(str(error)) from None

    def _add(self, given: str, name: object, row: object) -> None:
        if not isinstance(name, str) or not isinstance(row, self.kind):
            raise ConfigError(
                f"{given} has {name!r}, a {type(row).__name__}; it must be a name and a "
                f"{self.kind.__name__}"
            )
        if self.rows.setdefault(name, row) is not row:
            raise ConfigError(f"{given} has {name!r}, which is taken: give another name")
        tool_format_of.cache_clear()


TOOL_PARSERS: Final = ParserTable(
    rows=TOOL_FORMATS,
    kind=ToolFormat,
    attribute="TOOL_PARSERS",
    group="pagedserve.tool_parsers",
)
REASONING_PARSERS: Final = ParserTable(
    rows=REASONING_FORMATS,
    kind=ReasoningFormat,
    attribute="REASONING_PARSERS",
    group="pagedserve.reasoning_parsers",
)
