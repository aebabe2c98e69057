"""The command line: a file a command, what they share beside them.

torch is loaded only when a model is: ``--help``, ``--version`` and refusals come at once.
"""

from pagedserve.cli.main import main as main
