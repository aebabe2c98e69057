"""How many examples a slow property test looks at."""

import os

# `make test-all` and a machine with a GPU look at all of them.
LOOKS_AT_ALL = bool(os.environ.get("PAGEDSERVE_ALL_EXAMPLES"))


def examples(few: int, *, all_of_them: int) -> int:
    """``few`` in `make test`; hypothesis draws other ones each time."""
    return all_of_them if LOOKS_AT_ALL else few
