import io
import json
import logging
from datetime import UTC, datetime

import pytest

from kvtier.cli.logs import setup_logging


@pytest.fixture
def log():
    def start(level, style):
        stream = io.StringIO()
        setup_logging(level, style, stream)
        return logging.getLogger("kvtier.room"), stream

    return start


def test_a_json_line_has_time_level_logger_message_and_fields(log):
    logger, stream = log("info", "json")
    logger.debug("not shown")
    logger.warning("tier %s\nopened", "nvme", extra={"tier": "nvme", "bytes": 3, "odd": {1, 2}.__class__})
    row = json.loads(stream.getvalue())
    assert row.keys() == {"time", "level", "logger", "message", "tier", "bytes", "odd"}
    assert (row["level"], row["logger"], row["message"]) == ("warning", "kvtier.room", "tier nvme\nopened")
    assert (row["tier"], row["bytes"], row["odd"]) == ("nvme", 3, "<class 'set'>")
    assert abs((datetime.now(UTC) - datetime.fromisoformat(row["time"])).total_seconds()) < 3600


def test_a_field_cannot_replace_what_every_line_has(log):
    logger, stream = log("info", "json")
    logger.info("x", extra={"level": "mine", "time": "mine"})
    row = json.loads(stream.getvalue())
    assert row["level"] == "info"
    assert row["time"] != "mine"


def test_a_text_line_is_one_line(log):
    logger, stream = log("info", "text")
    logger.error("two\nlines", extra={"tier": "nvme"})
    (line,) = stream.getvalue().splitlines()
    assert line.endswith(" ERROR kvtier.room two\\nlines tier=nvme")
    datetime.fromisoformat(line.split()[0])


@pytest.mark.parametrize("style", ["json", "text"])
def test_an_exception_comes_with_its_traceback(log, style):
    logger, stream = log("info", style)
    try:
        int("inner")
    except ValueError:
        logger.exception("failed")
    text = stream.getvalue()
    if style == "json":
        text = json.loads(text)["exception"]
    assert "Traceback" in text
    assert "ValueError: invalid literal for int() with base 10: 'inner'" in text


def test_a_second_set_up_replaces_the_first_and_leaves_other_loggers_alone(log):
    root = list(logging.getLogger().handlers)
    _, first = log("debug", "text")
    logger, second = log("warning", "json")
    logger.info("hidden")
    logger.warning("shown")
    assert first.getvalue() == ""
    assert second.getvalue().count("\n") == 1
    assert logging.getLogger().handlers == root
