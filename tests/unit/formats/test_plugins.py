"""Registry: built-in names, entry points of other distributions, module:Class strings, and errors that help."""

import sys
from fractions import Fraction

import pytest

from kvtier.errors import ConfigError
from kvtier.plugins import Registry

BUILTIN = {"fraction": "fractions:Fraction", "ordered": "collections:OrderedDict"}


@pytest.fixture
def registry():
    return Registry("kvtier.test_group", BUILTIN)


@pytest.fixture
def distribution(tmp_path, monkeypatch):
    """Another installed distribution, with entry points of its own."""
    info = tmp_path / "other-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: other\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[kvtier.test_group]\nmine = other_plugin:Outer.Inner\nfraction = other_plugin:Impostor\n"
    )
    (tmp_path / "other_plugin.py").write_text(
        "class Outer:\n    class Inner: pass\nclass Impostor: pass\nNUMBER = 3\ndef factory(): return 5\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("other_plugin", None)


def test_builtin_names_load_lazily(registry):
    assert registry.names() == ("fraction", "ordered")
    sys.modules.pop("fractions_never", None)
    late = Registry("kvtier.test_group", {"late": "no.such.module:Class", **BUILTIN})
    assert late.get("fraction") is Fraction
    with pytest.raises(ConfigError, match=r"'late': cannot load 'no.such.module:Class'"):
        late.get("late")


def test_entry_points_of_other_distributions(registry, distribution):
    assert registry.names() == ("fraction", "ordered", "mine")
    import other_plugin

    assert registry.get("mine") is other_plugin.Outer.Inner
    assert registry.get("fraction") is Fraction, "a built-in name was taken over"


def test_module_and_class(registry, distribution):
    import other_plugin

    assert registry.get("other_plugin:Impostor") is other_plugin.Impostor
    assert registry.get("other_plugin:factory")() == 5


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("fracton", "unknown, expected one of fraction, ordered or 'module:Class'; did you mean 'fraction'"),
        ("zzz", "expected one of fraction, ordered"),
        ("", "unknown"),
        ("fractions:Nothing", "cannot load 'fractions:Nothing'"),
        ("fractions:", "cannot load"),
        (":Fraction", "cannot load"),
        ("no_such_module:Class", "No module named 'no_such_module'"),
        ("sys:maxsize", "is no class or factory"),
    ],
)
def test_errors_name_the_value_and_the_choices(registry, name, words):
    with pytest.raises(ConfigError) as caught:
        registry.get(name)
    assert words in str(caught.value)
    assert str(caught.value).startswith(f"kvtier.test_group {name!r}: ")
    assert "\n" not in str(caught.value)
