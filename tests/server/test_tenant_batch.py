"""Two tenants in one batch: what is reported to either, and repaired, concerns its own alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from segment_support import hurt
from server.applications import TEXT, WAY
from server.serving import MODEL

from ckv_jax import Engine
from ckv_jax.request import Generation
from ckv_jax.server.config import ServerConfig
from ckv_jax.server.formats import cost
from ckv_jax.server.parser import ParsedRequest, RequestParser
from ckv_jax.server.schema import CompletionRequest
from ckv_jax.server.tenants import Tenant
from ckv_jax.server.write_behind import WriteBehind
from ckv_jax.storage.store import ChunkStore

CONFIG = ServerConfig(model=MODEL, turn_tokens=10_000)
NAMES = ("alice", "bob")


@pytest.fixture
def cold(fresh: Engine) -> Iterator[Engine]:
    """An engine that has nothing in its caches, over a store with one text of each tenant."""
    for name in NAMES:
        fresh.ingest(f"{name}: {TEXT}", raw=True, salt=name)
    with fresh.variant(fresh.config, store=fresh.store) as engine:
        yield engine


def ask(engine: Engine, names: tuple[str, ...]) -> tuple[list[ParsedRequest], list[Generation]]:
    """One question of each tenant about its text, all in one batch."""
    parser = RequestParser(engine, CONFIG)
    asked = [
        parser.parse(
            CompletionRequest(prompt=f"{name}: {TEXT} so", **WAY), Tenant(name=name, salt=name)
        )
        for name in names
    ]
    requests = [request for one in asked for request in one.engine_requests()]
    ways = [way for one in asked for way in one.sampling]
    texts = engine.generate(requests, ways).results()
    assert len({text.trace.start_ns for text in texts}) == 1
    return asked, texts


def costs(asked: list[ParsedRequest], texts: list[Generation]) -> list[dict]:
    return [cost(one, 0, text) for one, text in zip(asked, texts, strict=True)]


def test_reads_of_others_are_not_reported(cold: Engine) -> None:
    (alone,) = costs(*ask(cold, ("alice",)))
    assert alone["ssd_bytes"] > 0
    asked, texts = ask(cold, NAMES)  # hers is in the caches by now
    alice, bob = costs(asked, texts)
    whole = texts[0].trace.bytes["ssd"]
    assert bob["ssd_bytes"] > 0
    assert alice["ssd_bytes"] + bob["ssd_bytes"] == whole
    assert alice["ssd_bytes"] < alone["ssd_bytes"]


def test_damage_to_others_is_neither_reported_nor_repaired(cold: Engine, tmp_path: Path) -> None:
    (prefix,) = cold.store.prefixes(salt="alice")
    hers = {span.segment_id for span in prefix.spans}
    for pack in (tmp_path / "kv").glob("segments/*/*/packs/c.*"):
        if pack.parts[-3] in hers:
            hurt(pack, pack.stat().st_size // 2)
    asked, texts = ask(cold, NAMES)
    alice, bob = costs(asked, texts)
    assert alice["chunks_recomputed"] > 0
    assert bob["chunks_recomputed"] == 0
    write_behind = WriteBehind(cold, CONFIG, share=1)
    try:
        with write_behind.turns(asked[1]) as turns:
            write_behind.submit(turns, [texts[1]])
        assert write_behind.flush(60)
        assert damaged(cold)
        with write_behind.turns(asked[0]) as turns:
            write_behind.submit(turns, [texts[0]])
        assert write_behind.flush(60)
        assert not damaged(cold)
    finally:
        write_behind.close(60)


def damaged(engine: Engine) -> bool:
    """Whether less of her text can be found than was stored."""
    tokens = engine.encode(f"alice: {TEXT}", begins=True)
    store: ChunkStore = engine.store
    found = store.longest_prefix(
        tokens, fingerprint=engine.fingerprint, layout=engine.layout, salt="alice"
    )
    return found.num_tokens < len(tokens)
