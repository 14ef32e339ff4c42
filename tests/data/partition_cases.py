"""Sizes, labels and small data sets: what the tests of partitions share."""

from hypothesis import strategies as st

SIZES = st.integers(1, 60).flatmap(lambda rows: st.tuples(st.just(rows), st.integers(1, rows)))
SEEDS = st.none() | st.integers(0, 2**32)
REMAINDERS = st.sampled_from(["spread", "last"])


def as_lists(rows):
    return [ids.tolist() for ids in rows]
