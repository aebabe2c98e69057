"""The parser of command lines: options given twice, unknown ones, and refusals.

argparse lets the last of several equal options win, so in a line composed by a script or a template
one setting would have no effect.  Options that collect (``--prompt``, ``--stop``) may be repeated.
"""

import argparse
from collections.abc import Sequence
from typing import Any, NoReturn

from pagedserve.checks import did_you_mean
from pagedserve.config.argument_parser import FlexibleArgumentParser
from pagedserve.errors import ConfigError


class Parser(FlexibleArgumentParser):
    """Raises ``ConfigError``, which ``main`` reports in one line, instead of exiting."""

    def __init__(self, **settings: Any) -> None:
        """Create a parser as ``argparse.ArgumentParser`` does."""
        super().__init__(**settings, allow_abbrev=False)  # a new option could make one ambiguous
        self.register("action", None, _Store)
        self.register("action", "store", _Store)
        self.register("action", "store_const", _StoreConst)
        self.register("action", argparse.BooleanOptionalAction, _Flag)

    def parse_known_args(  # type: ignore[override]  # as above
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        """Parse arguments, all of which must be known.

        Raises:
            ConfigError: Unknown arguments, with the nearest option.
        """
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}{self._nearest(unknown)}")
        return found, unknown

    def _nearest(self, unknown: Sequence[str]) -> str:
        """Suggestion of the option that the first misspelled one may mean."""
        word = next((word for word in unknown if word.startswith("-")), "")
        shown = [
            name
            for name, action in self._option_string_actions.items()
            if action.help != argparse.SUPPRESS
        ]
        return did_you_mean(word.partition("=")[0], shown)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Refuse a value that is none of the choices, with the nearest.

        Raises:
            argparse.ArgumentError: It is none of them.
        """
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as error:
            nearest = did_you_mean(str(value), map(str, action.choices or ()))
            named = None if isinstance(action, argparse._SubParsersAction) else action  # noqa: SLF001
            raise argparse.ArgumentError(named, f"{error.message}{nearest}") from error

    def error(self, message: str) -> NoReturn:
        """Refuse a command line.

        Raises:
            ConfigError: Always.
        """
        raise ConfigError(f"{message} (see {self.prog} --help)")


def _take_once(action: argparse.Action, namespace: argparse.Namespace, option: str | None) -> None:
    """Record in a namespace which option gave a value.

    Raises:
        argparse.ArgumentError: An earlier option gave the same.
    """
    if option is None:  # a positional argument, which occurs once
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
    """Stores the value given."""

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
    """Stores the constant of the option."""

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
    """Stores True, or False with ``--no-``."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        _take_once(self, namespace, option_string)
        super().__call__(parser, namespace, values, option_string)
