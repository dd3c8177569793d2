"""One tenant's prefixes do not exist for another, by whatever name they are asked for."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest
from engine_sharp import Sharp
from engine_support import tokens

from ckv_jax import Engine, Request, SamplingParams
from ckv_jax.storage.errors import PrefixNotFound
from ckv_jax.storage.prefix import Prefix

TEXT = tokens(100)
SUFFIX = [3, 1, 4]


@pytest.fixture(scope="module")
def owner(sharp: Sharp, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    with sharp.fresh(tmp_path_factory.mktemp("store"), salt="a") as engine:
        yield engine


@pytest.fixture(scope="module")
def prefix(owner: Engine) -> Prefix:
    return owner.ingest(TEXT)


@pytest.fixture(params=["", "A", "a "])
def stranger(owner: Engine, request: pytest.FixtureRequest) -> Iterator[Engine]:
    """Same model, same store, another salt."""
    with owner.variant(dataclasses.replace(owner.config, salt=request.param)) as engine:
        yield engine


def test_a_handle_and_an_id_open_nothing_for_another(stranger: Engine, prefix: Prefix) -> None:
    for name in (prefix, prefix.id, prefix.id[:12]):
        request = Request(prefix=name, suffix=SUFFIX, budget=1.0)
        (result,) = stranger.reprefill([request])
        assert isinstance(result.error, PrefixNotFound)
        with pytest.raises(PrefixNotFound):
            _ = result.logits
        (generation,) = stranger.generate(request, SamplingParams(max_tokens=2)).results()
        assert isinstance(generation.error, PrefixNotFound)
        with pytest.raises(PrefixNotFound):
            stranger.recompute(request)
    with pytest.raises(PrefixNotFound):
        stranger.check_prefix(prefix)


def test_a_request_and_an_ingest_may_name_their_tenant(owner: Engine) -> None:
    """3 x 3: who wrote, who reads; hits on the diagonal only."""
    salts = ("", "b", "c")
    text = tokens(64, 9)
    written = {salt: owner.ingest(text, salt=salt) for salt in salts}
    assert len({prefix.id for prefix in written.values()}) == 3
    for reader in salts:
        for writer, prefix in written.items():
            request = Request(prefix=prefix, suffix=SUFFIX, budget=1.0, salt=reader)
            (result,) = owner.reprefill([request])
            assert (result.error is None) == (reader == writer)
        by_tokens = Request(prefix=text, suffix=SUFFIX, budget=1.0, salt=reader)
        (found,) = owner.generate(by_tokens, SamplingParams(max_tokens=2)).results()
        assert found.completion().prefix == written[reader]
    (unknown,) = owner.generate(
        Request(prefix=text, suffix=SUFFIX, salt="d"), SamplingParams(max_tokens=2)
    ).results()
    assert unknown.completion().prefix.num_tokens == 0
    with pytest.raises(ValueError, match="salt"):
        Request(prefix=text, suffix=SUFFIX, salt="\0")


def test_an_appended_turn_stays_its_tenants(owner: Engine) -> None:
    request = Request(prefix=tokens(40, 10), suffix=SUFFIX, salt="b")
    (turn,) = owner.generate(request, SamplingParams(max_tokens=9), keep_kv=True).results()
    stored = owner.append(turn)
    assert stored.salt == "b"
    assert stored.num_tokens == 40 + len(SUFFIX) + 9
