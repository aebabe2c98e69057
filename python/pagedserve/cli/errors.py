"""How the command line says what is wrong."""

import sys


def complain(error: Exception) -> None:
    """Say an error in one line."""
    print(f"pagedserve: error: {' '.join(str(error).split())}", file=sys.stderr)
