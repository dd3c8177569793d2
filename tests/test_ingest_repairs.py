"""What is bad is repaired in place: little is computed, and nothing is stored twice."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
from engine_support import tokens
from engine_tiny import tiny_engine
from segment_support import hurt, segment_folder

from ckv_jax import Engine, Request
from ckv_jax.ingest import Ingest
from ckv_jax.pipeline.prefill import Block, Prefill
from ckv_jax.prefix.stored_kv import read_kv
from ckv_jax.storage import Prefix, verify_store
from ckv_jax.storage.errors import StoreUnavailable

BLOCK = 64
TOKENS = tokens(16 * 41 + 5)


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    with tiny_engine(tmp_path / "store", prefill_block=BLOCK, prefill_window=2 * BLOCK) as made:
        yield made


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[Block]:
    """Every block of a dense prefill that is computed."""
    found: list[Block] = []
    real = Prefill.advance

    def advance(self: Prefill) -> Block:
        found.append(real(self))
        return found[-1]

    monkeypatch.setattr(Prefill, "advance", advance)
    return found


def flip(tmp_path: Path, prefix: Prefix, files: str, at: int, span: int = 0) -> None:
    """Flip a bit of a segment's first file of a name."""
    hurt(sorted(segment_folder(tmp_path / "store", prefix, span).glob(files))[0], at)


def use(engine: Engine, prefix: Prefix) -> None:
    """Read all of a prefix, and its digest."""
    engine.reprefill([Request(prefix=prefix, suffix=[1, 2, 3], budget=1.0)])
    with engine.store.reader(prefix) as reader:
        reader.read_digest()


def sizes(tmp_path: Path) -> dict[str, int]:
    """Bytes of every file of every segment but its manifest's, by name."""
    files = (tmp_path / "store" / "segments").rglob("c.*")
    return {str(path): path.stat().st_size for path in files}


def check_whole(engine: Engine, prefix: Prefix, healthy: np.ndarray) -> None:
    assert prefix.num_tokens == len(TOKENS)
    assert verify_store(engine.store).ok
    np.testing.assert_allclose(read_kv(engine.store, prefix), healthy, atol=1e-5)


def test_a_bad_chunk_costs_its_own_block_and_no_byte(
    tmp_path: Path, engine: Engine, computed: list[Block]
) -> None:
    prefix = engine.ingest(TOKENS)
    healthy, before = read_kv(engine.store, prefix), sizes(tmp_path)
    assert len(computed) == 11
    flip(tmp_path, prefix, "packs/c.*", 7 * prefix.layout.pack_bytes + 5)
    use(engine, prefix)
    assert engine.store.longest_prefix(
        TOKENS, fingerprint=engine.fingerprint, layout=engine.layout
    ).num_tokens == 7 * 16  # fmt: skip
    computed.clear()
    told: list[tuple[int, int]] = []
    mended = engine.ingest(TOKENS, progress=lambda *done: told.append(done))
    assert [(b.first, b.length) for b in computed] == [(7 * 16, 16)]
    assert told == [(8 * 16, len(TOKENS))]
    assert sizes(tmp_path) == before
    check_whole(engine, mended, healthy)


def test_bad_digests_and_probes_cost_nothing(
    tmp_path: Path, engine: Engine, computed: list[Block]
) -> None:
    prefix = engine.ingest(TOKENS)
    assert prefix.layout.digest != "none"
    healthy, before = read_kv(engine.store, prefix), sizes(tmp_path)
    flip(tmp_path, prefix, "digest/c.*", 3000)
    use(engine, prefix)
    computed.clear()
    check_whole(engine, engine.ingest(TOKENS), healthy)
    assert not computed and sizes(tmp_path) == before


def test_a_digest_and_packs_of_several_blocks(
    tmp_path: Path, engine: Engine, computed: list[Block]
) -> None:
    half = engine.ingest(TOKENS[: 16 * 20])
    prefix = engine.ingest(TOKENS)
    assert len(prefix.spans) == 2
    healthy, before = read_kv(engine.store, prefix), sizes(tmp_path)
    pack = prefix.layout.pack_bytes
    for at in (3, 4, 19):
        flip(tmp_path, half, "packs/c.*", at * pack)
    flip(tmp_path, prefix, "packs/c.*", 21 * pack + 1, span=1)  # the partial last chunk
    flip(tmp_path, half, "digest/c.*", 3000)
    use(engine, prefix)
    computed.clear()
    check_whole(engine, engine.ingest(TOKENS), healthy)
    assert sum(b.length for b in computed) == 16 * 3 + 5
    assert sizes(tmp_path) == before


def test_a_lost_file_is_made_again_in_place(
    tmp_path: Path, engine: Engine, computed: list[Block]
) -> None:
    prefix = engine.ingest(TOKENS)
    healthy, before = read_kv(engine.store, prefix), sizes(tmp_path)
    next((tmp_path / "store" / "segments").rglob("packs/c.0*")).unlink()
    verify_store(engine.store, repair=False)
    use(engine, prefix)
    computed.clear()
    check_whole(engine, engine.ingest(TOKENS), healthy)
    assert sizes(tmp_path) == before and len(computed) <= 11


def test_what_is_mostly_bad_is_stored_again(
    tmp_path: Path, engine: Engine, computed: list[Block]
) -> None:
    text = tokens(BLOCK * 20)
    prefix = engine.ingest(text)
    for block in range(2, 20):
        flip(tmp_path, prefix, "packs/c.*", block * 4 * prefix.layout.pack_bytes)
    use(engine, prefix)
    computed.clear()
    again = engine.ingest(text)
    assert again.num_tokens == len(text) and len(again.spans) == 2
    assert len(computed) == 18


def test_what_cannot_be_repaired_is_stored_again(tmp_path: Path, engine: Engine) -> None:
    """Somebody else is mending the segment, and never ends."""
    prefix = engine.ingest(TOKENS)
    healthy = read_kv(engine.store, prefix)
    flip(tmp_path, prefix, "packs/c.*", 7 * prefix.layout.pack_bytes + 5)
    use(engine, prefix)
    held = engine.store.files.repairing(prefix.spans[0].segment_id)
    again = engine.ingest(TOKENS)
    held.release()
    assert again.num_tokens == len(TOKENS) and len(again.spans) == 2
    np.testing.assert_allclose(read_kv(engine.store, again), healthy, atol=1e-5)


@pytest.mark.parametrize(
    "error", [StoreUnavailable("no disk"), ValueError("too long"), MemoryError("no room")]
)
def test_a_prompt_that_cannot_be_stored_ends_its_request(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    monkeypatch.setattr(Ingest, "store", Mock(side_effect=error))
    prompt = engine.submit(Request(prefix=[], suffix=TOKENS.tolist()))
    if isinstance(error, MemoryError):  # not its own fault
        with pytest.raises(MemoryError, match="no room"):
            prompt.settled_result()
    else:
        assert prompt.settled_result().error is error
