"""Kernel tests run in Triton's interpreter, and are skipped where Triton is not installed.

`tests/conftest.py` sets TRITON_INTERPRET before anything is imported: the flag is read where a kernel is decorated, and
outside of these tests nothing starts a kernel. They are compiled by `make kernels`, without it.
"""

import pytest

from kvtier.gpu import kernels


class _Skipped(pytest.Module):
    """Stands for a module that cannot be imported."""

    def collect(self):
        pytest.skip("Triton is not installed: pip install 'kvtier[gpu]'", allow_module_level=True)


def pytest_pycollect_makemodule(module_path, parent):
    return None if kernels.available() else _Skipped.from_parent(parent, path=module_path)
