"""Format of the log: a readable line per record, or one JSON object.

A record may have ``fields``: a mapping with its content, which JSON has in place of the message.
"""

import copy
import json
import logging
from datetime import UTC, datetime
from typing import Final

_READABLE: Final = "%(asctime)s %(name)s: %(message)s"
# Loggers whose names would mislead: uvicorn's for everything but access is called error.
_SHOWN_NAMES: Final = {"uvicorn.error": "uvicorn"}


def set_up_logging(log_format: str) -> None:
    """Write all records from INFO on to stderr, unless this process has set up logging itself.

    Args:
        log_format: "text" or "json".
    """
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter() if log_format == "json" else TextFormatter(_READABLE))
    logging.basicConfig(level=logging.INFO, handlers=[handler])


class TextFormatter(logging.Formatter):
    """Formats a record as a readable line."""

    def format(self, record: logging.LogRecord) -> str:
        """The line, and a traceback if there is one."""
        shown = copy.copy(record)
        shown.name = _SHOWN_NAMES.get(record.name, record.name)
        return super().format(shown)


class JsonFormatter(logging.Formatter):
    """Formats a record as an object: ``time`` (UTC), ``level``, ``logger``, and its content."""

    def format(self, record: logging.LogRecord) -> str:
        """The object, on one line."""
        name = _SHOWN_NAMES.get(record.name, record.name)
        time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        said = getattr(record, "fields", None) or {"message": record.getMessage()}
        shown = {"time": time, "level": record.levelname, "logger": name, **said}
        if record.exc_info:
            shown["exception"] = self.formatException(record.exc_info)
        return json.dumps(shown)
