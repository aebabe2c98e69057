"""How the log looks: a readable line a record, or one JSON object.

A record may bring ``fields``: a mapping with all that it says, which JSON has in the place of its
message.
"""

import json
import logging
from datetime import UTC, datetime
from typing import Final

_READABLE: Final = "%(asctime)s %(name)s: %(message)s"


def set_up_logging(log_format: str) -> None:
    """Send all records from INFO on to stderr, unless this process has a log of its own.

    Args:
        log_format: "text" or "json".
    """
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter() if log_format == "json" else logging.Formatter(_READABLE))
    logging.basicConfig(level=logging.INFO, handlers=[handler])


class JsonFormatter(logging.Formatter):
    """Makes an object of a record: ``time`` (UTC), ``level``, ``logger``, and what is said."""

    def format(self, record: logging.LogRecord) -> str:
        """The object, on one line."""
        time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        said = getattr(record, "fields", None) or {"message": record.getMessage()}
        shown = {"time": time, "level": record.levelname, "logger": record.name, **said}
        if record.exc_info:
            shown["exception"] = self.formatException(record.exc_info)
        return json.dumps(shown)
