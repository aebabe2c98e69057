"""What the command lines of all benchmarks share: how options are added, read and checked."""

import argparse
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Self

from pagedserve.checks import Check, integer
from pagedserve.errors import ConfigError

COUNT = integer("1 or more", low=1)
COUNT_OR_ZERO = integer("0 or more", low=0)


def adder(group: argparse._ArgumentGroup) -> Callable[..., None]:
    """A function that adds an option to a group, and shows its default if it has one."""

    def add(name: str, text: str, *, default: object = None, **given: Any) -> None:
        shown = text if default in (None, (), {}) else f"{text} (%(default)s)"
        group.add_argument(f"--{name}", default=default, help=shown, **given)

    return add


def switch(group: argparse._ArgumentGroup, name: str, text: str) -> None:
    """Add an option without a value to a group."""
    group.add_argument(f"--{name}", action="store_true", help=text)


@dataclass(frozen=True, kw_only=True, slots=True)
class ParsedOptions:
    """Options of a command line; each field is the option of the same name.

    Attributes:
        checks: Checks by the name of a field.
    """

    checks: ClassVar[Mapping[str, Check[Any]]] = {}

    @classmethod
    def from_namespace(cls, namespace: argparse.Namespace) -> Self:
        """Convert the options of a parsed command line.

        Raises:
            ConfigError: Invalid options.
        """
        return cls(**{field.name: getattr(namespace, field.name) for field in fields(cls)})

    def __post_init__(self) -> None:
        """Check the options.

        Raises:
            ConfigError: A value out of range, or options that contradict each other.
        """
        for name, check in self.checks.items():
            try:
                check(f"--{name.replace('_', '-')}", getattr(self, name))
            except ValueError as error:
                raise ConfigError(str(error)) from error
