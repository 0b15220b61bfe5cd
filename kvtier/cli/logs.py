"""The log on stderr: lines for people, or one JSON object a line.

Fields go in by `logger.info("opened", extra={"tier": "nvme"})` and come out as `tier=nvme` or `"tier": "nvme"`.
"""

import json
import logging
from datetime import UTC, datetime
from typing import Any, Literal, TextIO

__all__ = ["JsonFormatter", "TextFormatter", "setup_logging"]

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class TextFormatter(logging.Formatter):
    """`2026-01-31T12:00:00.000Z INFO kvtier.nvme opened tier=nvme`."""

    def format(self, record: logging.LogRecord) -> str:
        """One record, one line; a traceback follows it."""
        fields = "".join(f" {name}={value}" for name, value in _fields(record).items())
        message = record.getMessage().replace("\n", "\\n")
        line = f"{_time(record)} {record.levelname} {record.name} {message}{fields}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


class JsonFormatter(logging.Formatter):
    """One object a line: time, level, logger, message, the record's fields, exception."""

    def format(self, record: logging.LogRecord) -> str:
        """One record, one line."""
        row = {
            **_fields(record),
            "time": _time(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            row["exception"] = self.formatException(record.exc_info)
        return json.dumps(row, default=str, ensure_ascii=False)


def setup_logging(
    level: Literal["debug", "info", "warning", "error"], style: Literal["text", "json"], stream: TextIO | None = None
) -> None:
    """Send what kvtier logs to `stream` (stderr by default). A second call replaces the first.

    Only the `kvtier` logger is touched: a library's user keeps the root logger.
    """
    logger = logging.getLogger("kvtier")
    for old in [handler for handler in logger.handlers if isinstance(handler, _Handler)]:
        logger.removeHandler(old)
    handler = _Handler(stream)
    handler.setFormatter(JsonFormatter() if style == "json" else TextFormatter())
    logger.addHandler(handler)
    logger.setLevel(level.upper())
    logger.propagate = False


class _Handler(logging.StreamHandler[TextIO]):
    """Ours, to be found again."""


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    return {name: value for name, value in vars(record).items() if name not in _STANDARD}


def _time(record: logging.LogRecord) -> str:
    moment = datetime.fromtimestamp(record.created, UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")
