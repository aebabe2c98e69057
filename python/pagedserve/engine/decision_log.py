"""``DecisionLog``: writes the scheduler's decision log to its file."""

import logging

from pagedserve._core import Scheduler
from pagedserve.config import EngineArgs
from pagedserve.engine.request import RequestTable

logger = logging.getLogger(__name__)


class DecisionLog:
    """The log file of ``decision_log``, if that option is given."""

    def __init__(self, args: EngineArgs, scheduler: Scheduler, requests: RequestTable) -> None:
        """Store the scheduler, which writes the log, and the requests."""
        self._scheduler = scheduler
        self._requests = requests
        self._is_open = args.decision_log is not None

    def flush(self) -> None:
        """Flush the log if no request is left; report once if it ended with an error."""
        if not self._is_open:
            return
        if not len(self._requests):
            self._scheduler.flush_log()
        if (error := self._scheduler.log_error) is not None:
            self._is_open = False
            logger.error("the decision log ends here, and requests continue: %s", error)
