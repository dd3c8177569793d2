"""Tools that people have, over a server as they start it: LangChain, litellm, and the examples."""

from __future__ import annotations

import asyncio
import runpy
from functools import partial
from pathlib import Path

import httpx
import pytest
from server.serving import KEYS, MODEL, Served, metric, wait_for

EXAMPLES = Path(__file__).resolve().parent.parent.parent / "examples"
DOCUMENT = "The keeper of the lamp walks up the stairs and counts them one by one. " * 45


def run_example(name: str, served: Served, monkeypatch: pytest.MonkeyPatch, *args: object) -> None:
    command = [
        name, *args, "--base-url", f"{served.url}/v1", "--api-key", KEYS["alice"],
        "--model", MODEL, "--max-tokens", 8,
    ]  # fmt: skip
    monkeypatch.setattr("sys.argv", [str(part) for part in command])
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_langchain_over_one_document(
    served: Served,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    langchain = pytest.importorskip("langchain_openai", reason="langchain-openai is not installed")
    (tmp_path / "document.txt").write_text(DOCUMENT)
    command = ("langchain_document.py", served, monkeypatch, tmp_path / "document.txt")
    stored = metric(served.url, "ckv_stored_turns_total")
    run_example(*command, "Which lamp?")
    assert "[0 of " in capsys.readouterr().out
    wait_for(lambda: metric(served.url, "ckv_stored_turns_total") == stored + 1)
    run_example(*command, "How many stairs?")
    read = int(capsys.readouterr().out.rpartition("[")[2].split()[0])
    assert read > 1000
    model = partial(
        langchain.ChatOpenAI,
        base_url=f"{served.url}/v1", api_key=KEYS["alice"], model=MODEL, max_tokens=4,
    )  # fmt: skip

    async def streamed() -> str:
        async with httpx.AsyncClient() as web:
            said = model(http_async_client=web).astream("Hello")
            return "".join([chunk.content async for chunk in said])

    assert asyncio.run(streamed())
    assert len(model().batch(["Hello"] * 3)) == 3


@pytest.mark.filterwarnings("ignore")
def test_litellm(served: Served) -> None:
    litellm = pytest.importorskip(
        "litellm", reason="litellm is not installed: it wants an older openai"
    )
    answer = litellm.completion(
        f"openai/{MODEL}", api_base=f"{served.url}/v1", api_key=KEYS["alice"],
        messages=[{"role": "user", "content": "Hello"}], max_tokens=4,
    )  # fmt: skip
    assert answer.choices[0].message.content


def test_an_agent(
    served: Served, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_example("agent_loop.py", served, monkeypatch, "How many stairs are there?")
    assert "[step 1: 0 of " in capsys.readouterr().out
    calculate = runpy.run_path(str(EXAMPLES / "agent_loop.py"))["calculate"]
    assert calculate("2 * (3 + 4) / -7") == "2 * (3 + 4) / -7 = -2.0"
    for bad in ("1 / 0", "__import__('os')", "2 **", "9 ** 9"):
        assert "cannot be worked out" in calculate(bad)
