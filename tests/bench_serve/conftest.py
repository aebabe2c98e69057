from collections.abc import Callable
from typing import Any

import pytest

from pagedserve.bench.options import BenchOptions
from pagedserve.cli import main

MakeOptions = Callable[..., BenchOptions]


@pytest.fixture
def make_options(monkeypatch: pytest.MonkeyPatch) -> MakeOptions:
    """What a command line is read as; nothing is sent."""
    read: list[BenchOptions] = []
    monkeypatch.setattr("pagedserve.bench.serve.bench_serve", read.append)

    def make(*argv: Any) -> BenchOptions:
        read.clear()
        assert main(["bench", "serve", *map(str, argv)]) == 0
        return read[0]

    return make
