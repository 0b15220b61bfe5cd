"""Programs of the machine that tests drive: where one is missing, what needs it is skipped.

Those that KVTIER_REQUIRE_PROGRAMS names, apart by blanks, must be there: their absence is a failure.
"""

import os
import shutil

import pytest

__all__ = ["program"]


def program(name: str, package: str) -> str:
    """The path of a program; Debian's `package` has it. Skips the test, or the module at whose top it is called."""
    found = shutil.which(name)
    if found is not None:
        return found
    reason = f"no {name} here: apt-get install {package}"
    if name in os.environ.get("KVTIER_REQUIRE_PROGRAMS", "").split():
        pytest.fail(reason)
    pytest.skip(reason, allow_module_level=True)
