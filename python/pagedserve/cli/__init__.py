"""The command line: a file a command, what they share in ``parser``, ``sampling`` and ``server``.

torch is loaded only when a model is: ``--help``, ``--version`` and refusals come at once.
"""

from pagedserve.cli.main import main as main
