"""Programs that tests drive: where one is missing, what needs it is skipped.

Those that KVTIER_REQUIRE_PROGRAMS names, apart by blanks, must be there: their absence is a failure.
"""

import os
import shutil
import sys
from pathlib import Path

import pytest

__all__ = ["program"]


def program(name: str, source: str) -> str:
    """The path of a program, beside the interpreter or of the machine. Skips the test, or the module, that needs it.

    Args:
        name: of the program.
        source: the command that installs it.
    """
    found = shutil.which(name, path=str(Path(sys.executable).parent)) or shutil.which(name)
    if found is not None:
        return found
    reason = f"no {name} here: {source}"
    if name in os.environ.get("KVTIER_REQUIRE_PROGRAMS", "").split():
        pytest.fail(reason)
    pytest.skip(reason, allow_module_level=True)
