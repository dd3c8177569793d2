"""The status page in a real browser."""

from __future__ import annotations

import html
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from server.applications import TENANTS, TEXT, chat, serving
from server.serving import metric, post, wait_for

from ckv_jax import Engine
from ckv_jax.server.tenants import Tenants

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")


def browse(url: str, profile: Path) -> str:
    """The page that a browser with a new profile has after it has been at `url` for a while."""
    done = subprocess.run(
        [
            str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic",
            "--no-first-run", "--disable-background-networking", "--disable-component-update",
            "--disable-sync", f"--user-data-dir={profile}", "--window-size=1000,900",
            "--virtual-time-budget=2500", "--dump-dom", url,
        ],
        capture_output=True, text=True, timeout=90, check=True,
    )  # fmt: skip
    return done.stdout


def table(page: str, name: str) -> list[list[str]]:
    """The cells of one table, row by row."""
    (body,) = re.findall(rf'<table id="{name}">(.*?)</table>', page, re.DOTALL)
    rows = re.findall(r"<tr>(.*?)</tr>", body, re.DOTALL)
    return [[html.unescape(c) for c in re.findall(r"<t[hd].*?>(.*?)</t[hd]>", r)] for r in rows]


def test_the_page_shows_what_the_server_tells(fresh: Engine, tmp_path: Path) -> None:
    with serving(fresh) as url:
        empty = browse(url, tmp_path / "profile")
        assert table(empty, "ttft")[1][0] == "no answer yet"
        assert table(empty, "prefixes")[1][0] == "nothing is stored yet"
        body = {"text": TEXT, "name": "stairs", "pinned": True, "retain_s": 5000}
        prefix = post(url, "prefixes", body).json()
        answer = post(url, "chat/completions", chat(TEXT)).json()
        wait_for(lambda: metric(url, "ckv_stored_turns_total") == 1)
        page = browse(url, tmp_path / "profile")
    lines = table(page, "ttft")[1:]
    assert ["compute", "waiting for the device"] in [cells[:2] for cells in lines]
    stages = {cells[0]: float(cells[2].replace(",", "")) for cells in lines}
    total = stages.pop("all")
    assert stages["compute"] > 0
    assert total == pytest.approx(sum(stages.values()), abs=0.1 * len(stages))
    assert total == pytest.approx(answer["ckv"]["ttft_ms"] + answer["ckv"]["queued_ms"], rel=0.2)
    prefixes = {cells[1]: cells for cells in table(page, "prefixes")[1:]}
    name, _, tokens, size, used, *rest = prefixes[prefix["id"][:12]]
    assert (name, tokens, rest) == ("stairs", str(prefix["tokens"]), ["yes", "5,000"])
    assert size.endswith(" MiB") and "20" in used
    assert len(prefixes) == 2
    assert [cells[0] for cells in table(page, "tiers")] == ["tier", "device", "host", "SSD"]
    assert ["read errors", "0"] in table(page, "engine")


def test_the_page_says_that_it_needs_a_key(engine: Engine, tmp_path: Path) -> None:
    with serving(engine, Tenants(TENANTS)) as url:
        page = browse(url, tmp_path / "profile")
    assert "the API key is missing or unknown" in page
    assert not table(page, "prefixes")
