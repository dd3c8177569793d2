"""Buckets hold what is put in, waste little, and are few."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ckv_jax.buckets import batch_bucket, bucket, chunk_bucket, suffix_bucket


@given(st.integers(1, 1 << 20))
def test_a_bucket_holds_its_value_and_wastes_at_most_a_quarter(n: int) -> None:
    assert n <= bucket(n) <= max(n * 1.25 + 1, 1)
    assert bucket(bucket(n)) == bucket(n)


def test_buckets_are_few() -> None:
    assert {chunk_bucket(n, 5000) for n in range(1, 5001)} == {256, 1024, 4096, bucket(5000)}
    assert {chunk_bucket(n, 300) for n in range(1, 301)} == {256, bucket(300)}
    assert {chunk_bucket(n, m) for m in range(1, 257) for n in range(1, m + 1)} == {256}
    assert {suffix_bucket(n) for n in range(1, 129)} == {16, 32, 64, 128}
    assert [batch_bucket(n) for n in (1, 2, 3, 8, 9)] == [1, 2, 4, 8, 16]
