"""What the command lines of all benchmarks share: how options are added and checked."""

import argparse
from collections.abc import Callable, Mapping
from typing import Any

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


def check_values(options: object, checks: Mapping[str, Check[Any]]) -> None:
    """Check the fields of options.

    Args:
        options: Object with a field for each check.
        checks: Checks by the name of a field, which is the option's with underscores.

    Raises:
        ConfigError: A value that its check refuses.
    """
    for name, check in checks.items():
        try:
            check(f"--{name.replace('_', '-')}", getattr(options, name))
        except ValueError as error:
            raise ConfigError(str(error)) from error
