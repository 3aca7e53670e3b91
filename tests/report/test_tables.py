"""Words on a terminal."""

import pytest

from caddie.errors import count


@pytest.mark.parametrize(
    ("number", "noun", "words"),
    [(0, "seed", "0 seeds"), (1, "process", "1 process"), (2, "process", "2 processes"), (1_200, "run", "1,200 runs")],
)
def test_a_number_takes_its_noun_in_singular_or_plural(number: int, noun: str, words: str) -> None:
    assert count(number, noun) == words
