"""Formats: how the bytes of one part of a block are encoded inside one tier."""

from kvtier.formats.base import Format
from kvtier.formats.catalog import choose, fidelity, get, names, stored
from kvtier.formats.raw import RawFormat

__all__ = ["Format", "RawFormat", "choose", "fidelity", "get", "names", "stored"]
