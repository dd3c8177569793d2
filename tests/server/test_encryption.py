"""`ckv serve --encrypt-key-file`: nothing that clients sent is on the disk in clear."""

from __future__ import annotations

import secrets
from pathlib import Path

import httpx
import pytest
from command_line import Here
from server.applications import TEXT, WAY, cached
from server.serving import MODEL, Served, metric, post, wait_for

PROMPT = WAY | {"prompt": "Seventeen ships of the northern fleet. " * 40}


@pytest.fixture(scope="module")
def key(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("key") / "key"
    path.write_text(secrets.token_hex(32))
    return path


def test_what_is_stored_is_hidden_and_outlives_a_kill(
    checkpoint: Path, key: Path, tmp_path: Path, here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = tmp_path / "kv"
    options = ("--encrypt-key-file", key, "--no-guard-disk", "--store-tokens", 128)
    first = Served(checkpoint, store, *options)
    try:
        asked = {"text": TEXT, "name": "lighthouse-manual"}
        made = post(first.url, "prefixes", asked)
        assert made.status_code in (200, 201), made.text
        before = post(first.url, "completions", PROMPT)
        assert before.status_code == 200
        wait_for(lambda: metric(first.url, "ckv_stored_turns_total") == 1)
    finally:
        first.kill()
    raw = b"".join(p.read_bytes() for p in store.rglob("*") if p.is_file())
    for word in (b"lighthouse", b"keeper", b"ships", b"northern"):
        assert word not in raw
    second = Served(checkpoint, store, *options)
    try:
        again = post(second.url, "completions", PROMPT)
        assert cached(again) > 100
        assert again.json()["choices"][0]["text"] == before.json()["choices"][0]["text"]
        listed = httpx.get(f"{second.url}/v1/prefixes", timeout=60).json()["data"]
        assert "lighthouse-manual" in {prefix["name"] for prefix in listed}
    finally:
        assert second.stop() == 0
    with monkeypatch.context() as named:
        named.setenv("CKV_ENCRYPT_KEY_FILE", str(key))
        code, shown, _ = here("inspect", store)
    assert code == 0 and "lighthouse-manual" in shown
    code, _, errors = here("serve", checkpoint, "--store", store, "--port", 0, "--name", MODEL)
    (line,) = errors.strip().splitlines()
    assert code == 1 and "encrypted and not readable without --encrypt-key-file" in line
