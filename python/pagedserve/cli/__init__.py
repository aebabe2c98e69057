"""The command line: one file per command, and what they share.

torch is imported only to load a model, after everything that can be refused without it.
"""

from pagedserve.cli.main import main as main
from pagedserve.cli.main import run as run
