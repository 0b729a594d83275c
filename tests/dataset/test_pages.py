"""What pages say of numbers."""

from __future__ import annotations

import pytest

from dataset.pages import bytes_in_words


@pytest.mark.parametrize(
    "number, words",
    [
        (0, "0 B"),
        (999.4, "999 B"),
        (999.6, "1 kB"),
        (999_400, "999 kB"),
        (999_600, "1 MB"),
        (1_250_000, "1.25 MB"),
        (999_600_000, "1 GB"),
        (999.6e9, "1 TB"),
        (999.6e12, "1,000 TB"),
        (-999_600, "-1 MB"),
    ],
)
def test_bytes_are_said_without_an_exponent(number: float, words: str) -> None:
    """999,600 bytes were 1e+03 kB."""
    assert bytes_in_words(number) == words
