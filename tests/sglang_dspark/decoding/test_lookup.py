"""Look-up equals a search of the whole text, token by token."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_dspark.decoding.lookup import Lookup
from sglang_dspark.errors import InputError

TOKENS = st.lists(st.integers(0, 3), max_size=60)


def naive(whole: list[int], count: int, longest: int) -> tuple[list[int], int]:
    """The last earlier occurrence of the longest ending that has one, found by looking everywhere."""
    for n in range(min(longest, len(whole)), 0, -1):
        ends = [e for e in range(n, len(whole)) if whole[e - n : e] == whole[len(whole) - n :]]
        if ends:
            grown = list(whole)
            for i in range(count):
                grown.append(grown[ends[-1] + i])
            return grown[len(whole) :], n
    return [], 0


@given(TOKENS, st.integers(1, 9), st.integers(1, 5), st.data())
def test_it_finds_what_a_search_finds(text: list[int], count: int, longest: int, data: st.DataObject) -> None:
    lookup, cut = Lookup(longest), data.draw(st.integers(0, len(text)))
    lookup.extend(text[:cut])
    assert lookup.propose(count) == naive(text[:cut], count, longest)
    lookup.extend(text[cut:])
    assert lookup.propose(count) == naive(text, count, longest)
    assert lookup.propose(count) == naive(text, count, longest), "proposing commits nothing"


def test_the_longest_match_decides_and_of_those_the_last() -> None:
    lookup = Lookup(2)
    lookup.extend([1, 2, 7, 9, 2, 8, 1, 2, 6, 5, 1, 2])
    assert lookup.propose(2) == ([6, 5], 2)
    lookup.extend([9])
    assert lookup.propose(2) == ([2, 8], 1)
    lookup.extend([4])
    assert lookup.propose(2) == ([], 0)
    lookup.clear()
    assert lookup.propose(2) == ([], 0)


def test_a_repetition_goes_on() -> None:
    lookup = Lookup()
    lookup.extend([5, 6, 5, 6])
    assert lookup.propose(5) == ([5, 6, 5, 6, 5], 2)
    with pytest.raises(InputError, match="at least 1"):
        Lookup(0)


def test_a_token_costs_the_same_however_long_the_text() -> None:
    lookup = Lookup(3)
    lookup.extend(range(1000))
    before = sum(map(len, lookup._after))
    lookup.extend([1000])
    assert sum(map(len, lookup._after)) == before + 3
