"""A parser that takes an option once, and says what is wrong as all other refusals are said.

argparse lets the last of several win.  In a line put together by a script or a template that is one
setting without effect, and nobody says so.  Options that collect (``--prompt``, ``--stop``) may be
given again.
"""

import argparse
from typing import Any, NoReturn

from pagedserve.errors import ConfigError


class Parser(argparse.ArgumentParser):
    """Raises what ``main`` says in one line."""

    def __init__(self, **settings: Any) -> None:
        """As ``argparse.ArgumentParser``."""
        super().__init__(**settings)
        self.register("action", None, _Store)
        self.register("action", "store", _Store)
        self.register("action", "store_const", _StoreConst)
        self.register("action", argparse.BooleanOptionalAction, _Flag)

    def error(self, message: str) -> NoReturn:
        """Refuse a command line.

        Raises:
            ConfigError: Always.
        """
        raise ConfigError(f"{message} (see {self.prog} --help)")


def _take_once(action: argparse.Action, namespace: argparse.Namespace, option: str | None) -> None:
    """Note in a namespace which option gave what.

    Raises:
        argparse.ArgumentError: One gave the same before.
    """
    if option is None:  # an argument that has its place, and so comes once
        return
    given: dict[str, str] = namespace.__dict__.setdefault("given", {})
    before = given.get(action.dest)
    if before == option:
        raise argparse.ArgumentError(None, f"{option} is given twice; give it once")
    if before is not None:
        raise argparse.ArgumentError(
            None, f"{before} and {option} are both given; give one of them"
        )
    given[action.dest] = option


class _Store(argparse.Action):
    """Keeps what is given."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        del parser
        _take_once(self, namespace, option_string)
        setattr(namespace, self.dest, values)


class _StoreConst(argparse.Action):
    """Keeps what the option stands for."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(nargs=0, **settings)

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: object,
        option_string: str | None = None,
    ) -> None:
        del parser, values
        _take_once(self, namespace, option_string)
        setattr(namespace, self.dest, self.const)


class _Flag(argparse.BooleanOptionalAction):
    """Keeps True, or False where ``--no-`` is in front."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        _take_once(self, namespace, option_string)
        super().__call__(parser, namespace, values, option_string)
