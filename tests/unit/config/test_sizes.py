import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.config import format_size, parse_size


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("8GiB", 8 * 1024**3),
        ("1.5GiB", 3 * 1024**3 // 2),
        ("2 TiB", 2 * 1024**4),
        (" 4KiB ", 4096),
        ("500MB", 500_000_000),
        ("1kB", 1000),
        ("1.25GB", 1_250_000_000),
        ("1TB", 10**12),
        ("17B", 17),
        ("17", 17),
        (17, 17),
        (0, 0),
        ("0", 0),
    ],
)
def test_a_size_is_read(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (-1, "not a negative one"),
        ("-1GiB", "expected a size"),
        ("", "expected a size"),
        ("GiB", "expected a size"),
        (".5GiB", "expected a size"),
        ("1GiB 2GiB", "expected a size"),
        ("1e9", "expected a size"),
        ("\u0661GiB", "expected a size"),
        (1.5, "expected a size"),
        (True, "expected a size"),
        (None, "expected a size"),
        ([1], "expected a size"),
        ("8G", "did you mean GiB or GB?"),
        ("8gib", "did you mean GiB or GB?"),
        ("8KB", "did you mean KiB or kB?"),
        ("8PiB", "unknown unit 'PiB', expected one of B, KiB"),
        ("0.3KiB", "307.2 bytes, expected a whole number of bytes"),
        ("1.5", "1.5 bytes, expected a whole number of bytes"),
    ],
)
def test_what_is_no_size_is_refused(value, says):
    with pytest.raises(ValueError, match=re.escape(says)):
        parse_size(value)


@given(st.integers(0, 1 << 62))
def test_a_formatted_size_reads_back_exactly(size):
    assert parse_size(format_size(size)) == size


@given(st.integers(1, 1023), st.sampled_from([("KiB", 10), ("MiB", 20), ("GiB", 30), ("TiB", 40)]))
def test_round_sizes_are_shown_with_the_largest_unit(count, unit):
    assert format_size(count << unit[1]) == f"{count}{unit[0]}"
