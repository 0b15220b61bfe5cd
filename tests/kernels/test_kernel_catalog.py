"""The catalog has every kernel, in every coding and head size; `make kernels` compiles all of it."""

import pkgutil
from importlib import import_module

import pytest

from kvtier.errors import ConfigError
from kvtier.gpu import kernels
from kvtier.gpu.kernels.catalog import compile_all, entries
from kvtier.gpu.kernels.quantized_pool import CODINGS

ATTENTION = ("decode", "decode.split", "prefill", "prefill.short", "mass", "write")


def test_names_are_unique():
    names = [entry.name for entry in entries()]
    assert len(names) == len(set(names))


def test_every_kernel_is_there():
    compiled = {launch.kernel for entry in entries() for launch in entry.prepare()}
    modules = [import_module(f"{kernels.__name__}.{module.name}") for module in pkgutil.iter_modules(kernels.__path__)]
    kind = type(next(iter(compiled)))
    defined = {one for module in modules for one in vars(module).values() if isinstance(one, kind)}
    # What another kernel calls is a part of it; the probe only tells what a kernel is.
    parts = {"_probe"}.union(*(one.fn.__code__.co_names for one in defined))
    assert compiled == {one for one in defined if one.fn.__name__ not in parts}


def test_attention_is_there_in_every_coding_and_head_size():
    names = {entry.name for entry in entries()}
    cases = {name.removeprefix("decode.split.") for name in names if name.startswith("decode.split.")}
    assert names >= {f"{kind}.{case}" for kind in ATTENTION for case in cases}
    coded, sizes = ({case.split(".")[at] for case in cases} for at in (0, 1))
    assert coded == {"float32", "bfloat16", "float16", *CODINGS}
    assert {int(size.partition("x")[0]) for size in sizes} >= {64, 80, 96, 128, 192, 256}


def test_every_entry_prepares_launches():
    for entry in entries():
        for launch in entry.prepare():
            given = {*launch.arguments, *launch.constants}
            assert given == set(launch.kernel.arg_names), entry.name
            assert min(launch.grid) > 0, entry.name


def test_an_interpreting_process_refuses():
    with pytest.raises(ConfigError, match="TRITON_INTERPRET is set"):
        compile_all(90, "gather".__eq__)
