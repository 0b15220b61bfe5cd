import logging

import pytest


@pytest.fixture
def pristine_log():
    """The kvtier logger as the test-suite found it, also after a command has set it up."""
    logger = logging.getLogger("kvtier")
    level, propagate, handlers = logger.level, logger.propagate, list(logger.handlers)
    yield
    logger.setLevel(level)
    logger.propagate = propagate
    logger.handlers[:] = handlers
