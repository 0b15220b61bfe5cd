"""Formats by name, the sink rule, and the order of fidelity."""

import pytest

from kvtier import formats
from kvtier.errors import ConfigError
from kvtier.formats import RawFormat
from kvtier.formats.catalog import fidelity

ALL = ("raw", "bitsplit", "int8r", "int8", "fp8", "k8v4", "int4r", "mla8", "mla4")


class Own(RawFormat):
    """A third party's format."""

    id = sink = "own"
    exact = False
    fidelity = 42


class Impostor(RawFormat):
    """Calls itself like a built-in one."""

    fidelity = 1000


class TooLong(RawFormat):
    id = "a" * 17


class OwnAgain(Own):
    """Another class with an id that is taken."""


def test_every_name_gives_one_instance_of_that_id():
    assert formats.names()[: len(ALL)] == ALL
    for name in ALL:
        assert formats.get(name).id == name
        assert formats.get(name) is formats.get(name)


def test_exact_formats_rank_highest_and_lossy_ones_by_measured_error():
    ranks = [fidelity(name) for name in ("int8r", "int8", "fp8", "k8v4", "int4r")]
    assert ranks == sorted(set(ranks), reverse=True)
    assert fidelity("mla8") > fidelity("mla4")
    assert fidelity("raw") == fidelity("bitsplit") > max(ranks)
    assert all(formats.get(name).exact == (name in ("raw", "bitsplit")) for name in ALL)


@pytest.mark.parametrize("name", ["", "int9", "raw\0", "kvtier.formats.raw:Nothing"])
def test_an_unknown_format_has_no_fidelity(name):
    assert fidelity(name) == 0


@pytest.mark.parametrize(
    ("name", "sink"),
    [(name, {"k8v4": "int8r", "int4r": "int8r", "mla4": "mla8"}.get(name, name)) for name in ALL],
)
def test_the_sink_keeps_eight_bits_and_an_unknown_parent_everything(name, sink):
    assert formats.choose(name, 0).id == sink
    assert formats.choose(name, 1).id == name
    assert formats.choose(name, 1000).id == name
    assert formats.choose(name, -1).id == (name if name == "bitsplit" else "raw")


def test_an_unknown_name_is_refused_with_a_suggestion():
    for verb in (formats.get, lambda name: formats.choose(name, 3)):
        with pytest.raises(
            ConfigError, match=r"kvtier.formats 'int4': unknown, expected one of raw.*did you mean 'int"
        ):
            verb("int4")


def test_a_third_partys_format():
    spelled = f"{__name__}:Own"
    own = formats.get(spelled)
    assert own.id == "own"
    assert formats.get("own") is own is formats.get(spelled)
    assert fidelity("own") == 42
    assert formats.choose(spelled, 0) is own
    assert formats.choose(spelled, -1).id == "raw"
    with pytest.raises(ConfigError, match=r"'own'.*has it already"):
        formats.get(f"{__name__}:OwnAgain")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("kvtier.keys:Namespace", "cannot be made .*missing"),
        ("kvtier.errors:ConfigError", "is a ConfigError: expected"),
    ],
)
def test_a_class_that_is_no_format_is_refused(name, words):
    with pytest.raises(ConfigError, match=words):
        formats.get(name)


@pytest.mark.parametrize(("name", "words"), [("Impostor", "calls itself 'raw'"), ("TooLong", "1 to 16 ASCII")])
def test_an_id_that_cannot_be_is_refused(name, words):
    with pytest.raises(ConfigError, match=words):
        formats.get(f"{__name__}:{name}")
    assert type(formats.get("raw")) is RawFormat
