"""Error reports of the command line."""

import sys


def complain(error: Exception) -> None:
    """Print an error on stderr, in one line."""
    print(f"pagedserve: error: {' '.join(str(error).split())}", file=sys.stderr)
