"""``FlexibleArgumentParser``: a parser that accepts underscores in option names."""

import argparse
import sys
from collections.abc import Sequence
from typing import Any


class FlexibleArgumentParser(argparse.ArgumentParser):
    """An ``argparse.ArgumentParser`` that accepts ``--max_model_len`` for ``--max-model-len``."""

    def parse_known_args(  # type: ignore[override]  # typed by overloads for its namespace
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        """Parse arguments; return the namespace and the arguments that no option takes."""
        given = sys.argv[1:] if args is None else args
        return super().parse_known_args([self._with_dashes(word) for word in given], namespace)

    def _with_dashes(self, word: str) -> str:
        """Replace underscores by dashes in an argument's option name; other words may be values."""
        name, equals, value = word.partition("=")
        dashed = name.replace("_", "-")
        if name in self._option_string_actions or dashed not in self._option_string_actions:
            return word
        return dashed + equals + value
