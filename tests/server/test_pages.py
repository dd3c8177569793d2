"""What README and docs/server.md tell a newcomer to serve and to ask."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from server.serving import KEYS, MODEL, Served, wait_for

from tests.support.pages import blocks

ROOT = Path(__file__).parents[2]
VARIES = {"id", "created", "ttft_ms", "queued_ms", "waited_ms", "ssd_bytes"}


def commands(page: str) -> list[list[str]]:
    """The commands of a page's shell blocks."""
    text = (ROOT / page).read_text("utf-8")
    shell = "".join(re.findall(r"^```sh\n(.*?)^```", text, re.M | re.S))
    return [shlex.split(line) for line in shell.replace("\\\n", "").splitlines()]


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The server that README starts, on a store and a port of its own."""
    (words,) = [words for words in commands("README.md") if words[:2] == ["ckv", "serve"]]
    store = tmp_path_factory.mktemp("pages") / "kv"
    words[words.index("--store") + 1] = str(store)
    log = store.with_suffix(".jsonl")
    with log.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "ckv_jax.cli", *words[1:], "--port", "0"],
            stdout=out, stderr=out, cwd=ROOT,
            env={**os.environ, "JAX_PLATFORMS": "cpu"},
        )  # fmt: skip
    try:
        wait_for(lambda: process.poll() is not None or '"serving"' in log.read_text(), 120)
        assert process.poll() is None, log.read_text()
        yield json.loads(log.read_text().splitlines()[0])["url"]
    finally:
        process.terminate()
        process.wait(30)


def curl(words: list[str], url: str, **changes: object) -> httpx.Response:
    """What a page's `curl` sends, to this server; `changes` of the body."""
    assert words[0] == "curl" and words[2] == "-H"
    name, _, value = words[3].partition(": ")
    body = json.loads(words[words.index("-d") + 1]) | changes
    path = words[1].removeprefix("localhost:8000")
    headers = {name: value, "authorization": f"Bearer {KEYS['alice']}"}
    return httpx.post(url + path, json=body, headers=headers, timeout=120)


def steady(value: Any) -> Any:
    """JSON without what differs from run to run."""
    if isinstance(value, dict):
        return {name: steady(part) for name, part in value.items() if name not in VARIES}
    return [steady(part) for part in value] if isinstance(value, list) else value


def test_the_readmes_request_is_answered_as_it_shows(url: str) -> None:
    (words,) = [words for words in commands("README.md") if words[0] == "curl"]
    (shown,) = re.findall(r"^```json\n(.*?)^```", (ROOT / "README.md").read_text(), re.M | re.S)
    assert curl(words, url).json()["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}

    answers: list[Any] = []

    def read_back() -> bool:
        """Asks again; true once the first prompt is stored."""
        answers.append(curl(words, url).json())
        return answers[-1]["ckv"]["prefix_tokens"] > 0

    wait_for(read_back, 120)
    answer = answers[-1]
    assert steady(answer) == steady(json.loads(shown))
    assert {*answer, *answer["ckv"]} >= VARIES
    assert answer["ckv"]["ssd_bytes"] > 0


def test_the_servers_page_is_answered(served: Served) -> None:
    chat, prefix = (words for words in commands("docs/server.md") if words[0] == "curl")
    got = curl(chat, served.url, model=MODEL, max_tokens=12)
    assert got.status_code == 200 and got.json()["choices"][0]["message"]["content"]
    named = {"attention_covered", "ssd_bytes", "chunks_recomputed", "prefix_tokens", "ttft_ms",
             "queued_ms"}  # fmt: skip
    assert named <= got.json()["ckv"].keys()
    got = curl(prefix, served.url)
    assert got.status_code == 201 and got.json()["pinned"]
    (shown,) = blocks(ROOT / "docs" / "server.md", "json")
    assert got.json().keys() == json.loads(shown).keys()
