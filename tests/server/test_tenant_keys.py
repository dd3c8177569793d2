"""Tenants who share a server: by their keys each sees its own prefixes, within its quota."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest
from server.applications import TEXT, WAY, cached, serving
from server.serving import post

from ckv_jax import Engine
from ckv_jax.server.tenants import Tenants
from ckv_jax.storage.config import StoreConfig
from ckv_jax.storage.store import ChunkStore


def test_three_tenants_see_their_own_alone(fresh: Engine, tmp_path: Path) -> None:
    names = ("alice", "bob", "carol")
    file = tmp_path / "keys.toml"
    file.write_text("".join(f'[{name}]\nkeys = ["{name}-key-1"]\n' for name in names))
    with serving(fresh, Tenants.load(file), store_tokens=10_000) as url:
        webs = {
            name: httpx.Client(
                base_url=f"{url}/v1", headers={"authorization": f"Bearer {name}-key-1"}, timeout=60
            )
            for name in names
        }
        bodies = {name: {"text": f"{name} {TEXT}"} for name in names}
        stored = {name: webs[name].post("/prefixes", json=bodies[name]).json() for name in names}
        for reader in names:
            for writer in names:
                asked = WAY | {"prompt": bodies[writer]["text"] + " so"}
                hit = cached(webs[reader].post("/completions", json=asked))
                assert (hit > 0) == (reader == writer)
                path = f"/prefixes/{stored[writer]['id']}"
                assert webs[reader].get(path).status_code == (200 if reader == writer else 404)
                if reader != writer:
                    strange = webs[reader].delete(path)
                    assert strange.status_code == 404
                    never = webs[reader].get(f"/prefixes/{'0' * 64}")
                    assert strange.json() == never.json()  # as if there were none
            ids = {p["id"] for p in webs[reader].get("/prefixes").json()["data"]}
            assert not ids & {stored[name]["id"] for name in names if name != reader}
        for web in webs.values():
            web.close()


@pytest.mark.parametrize(
    "text",
    [
        "not toml",
        "",
        "[a]\nkeys = []",
        '[a]\nkeys = ["short"]',
        '[a]\nkeys = ["long-enough"]\nmax_bytes = -1',
        '[a]\nkeys = ["long-enough"]\nunknown = 1',
        '[a]\nkeys = ["long-enough"]\n[b]\nkeys = ["long-enough"]',
        '[a]\nkeys = ["long-enough"]\nsalt = "x"\n[b]\nkeys = ["long-enough-2"]\nsalt = "x"',
    ],
)
def test_a_key_file_that_is_wrong_is_refused_without_its_keys(tmp_path: Path, text: str) -> None:
    file = tmp_path / "keys.toml"
    file.write_text(text)
    with pytest.raises(ValueError, match="key file") as told:
        Tenants.load(file)
    assert "long-enough" not in str(told.value)


def test_a_tenant_who_has_its_fill_evicts_its_own(engine: Engine, tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    file.write_text(
        '[alice]\nkeys = ["alice-key-1"]\nsalt = "alice"\n[bob]\nkeys = ["bob-key-1"]\n'
    )
    with ChunkStore.open(tmp_path / "one") as store:
        with engine.variant(engine.config, store=store) as one:
            one.ingest(TEXT)
        size = store.usage()
    config = StoreConfig(quotas={"alice": size * 3 // 2})
    with (
        ChunkStore.open(tmp_path / "two", config=config) as store,
        engine.variant(engine.config, store=store) as variant,
        serving(variant, Tenants.load(file)) as url,
    ):
        left = {}
        for name in ("bob", "alice"):
            headers = {"authorization": f"Bearer {name}-key-1"}
            for word in ("once", "twice"):
                put = post(url, "prefixes", {"text": f"{word} {TEXT}"}, headers=headers)
                assert put.status_code == 201
            left[name] = httpx.get(f"{url}/v1/prefixes", headers=headers).json()["data"]
        assert {name: len(prefixes) for name, prefixes in left.items()} == {"bob": 2, "alice": 1}
        large = post(url, "prefixes", {"text": TEXT * 3}, headers=headers)
        assert large.status_code == 503
        assert large.json()["error"]["code"] == "store_full"
        assert "max_bytes" not in large.text
