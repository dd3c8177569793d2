"""No single request, and no single tenant, stops the server for others."""

from __future__ import annotations

import asyncio
import gc
import json
import resource
import socket
import threading
import time
import weakref
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import urlsplit

import httpx
import numpy as np
import psutil
import pytest
from server.applications import ALICE, BOB, TENANTS, TEXT, WAY, chat, serving
from server.serving import MODEL, Served, metric, post, wait_for

from ckv_jax import Engine
from ckv_jax.model.tokenizer import Tokenizer, load_tokenizer
from ckv_jax.server.bodies import Limits, measure, parse_body
from ckv_jax.server.config import ServerConfig
from ckv_jax.server.http import ApiError
from ckv_jax.server.parser import ParsedRequest, RequestParser
from ckv_jax.server.schema import CompletionRequest
from ckv_jax.server.tenants import INGEST_THREADS, FairPool, Tenant, Tenants
from ckv_jax.server.write_behind import WriteBehind

MIB = 2**20
CANARY = "hunter2-never-said-again"
BOMBS = {
    "ints": ("completions", '"prompt":[%s]', "1"),
    "nulls": ("completions", '"prompt":[%s]', "null"),
    "lists": ("completions", '"prompt":[%s]', "[[],[1]]"),
    "texts": ("completions", '"prompt":[%s]', '""'),
    "messages": ("chat/completions", '"messages":[%s]', "{}"),
    "parts": ("chat/completions", '"messages":[{"role":"user","content":[%s]}]', "{}"),
    "metadata": ("chat/completions", '"metadata":{"a":[%s]}', '{"a":0}'),
    "tokens": ("prefixes", '"tokens":[%s]', "null"),
    "spaces": ("completions", '"prompt":%s', " " * 99),
    "escapes": ("completions", '"prompt":["%s"]', "\\u0041" * 20),
    "letters": ("completions", '"prompt":["%s"]', "a" * 99),
    "words": ("chat/completions", '"messages":[{"role":"user","content":"%s"}]', "lamp owl "),
    "utf-16": ("completions", '"prompt":[%s]', "1"),
    "calls": (
        "chat/completions",
        '"messages":[{"role":"assistant","tool_calls":[{"function":{"name":"f","arguments":"%s"}}]}]',
        "lamp owl ",
    ),
    "digits": ("completions", '"n":%s', "9" * 99),
}


def bomb(kind: str, size: int) -> tuple[str, bytes]:
    """A path, and a body of about `size` bytes."""
    path, form, part = BOMBS[kind]
    comma = "" if kind in ("spaces", "escapes", "letters", "words", "calls", "digits") else ","
    size //= 2 if kind == "utf-16" else 1
    value = comma.join([part] * (size // (len(part) + len(comma))))
    return f"/v1/{path}", f'{{"model":"{MODEL}",{form % value}}}'.encode(
        "utf-16-le" if kind == "utf-16" else "utf-8"
    )


# -- bodies ----------------------------------------------------------------------------------------


def test_a_bomb_is_an_error_and_others_do_not_notice(served: Served) -> None:
    process = psutil.Process(served.process.pid)
    post(served.url, "completions", WAY | {"prompt": "Hello"}, headers=ALICE)
    before = process.memory_info().rss
    waits, over = [], threading.Event()

    def watch() -> None:
        with httpx.Client(timeout=30) as web:
            while not over.is_set():
                began = time.monotonic()
                assert web.get(f"{served.url}/health").status_code == 200
                waits.append(time.monotonic() - began)
                time.sleep(0.01)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        for kind in BOMBS:
            path, body = bomb(kind, 12 * MIB)
            spent = sum(process.cpu_times()[:2])
            answer = httpx.post(f"{served.url}{path}", content=body, headers=ALICE, timeout=60)
            assert answer.status_code == 400, (kind, answer.text)
            assert len(answer.content) < 400
            spent = sum(process.cpu_times()[:2]) - spent
            assert spent < 12, kind  # a millisecond per KiB
    finally:
        over.set()
        watcher.join()
    assert max(waits) < 2  # 0.1 s on a machine that has nothing else to do
    assert process.memory_info().rss - before < 64 * MIB


def test_a_key_comes_before_a_body(served: Served) -> None:
    where = urlsplit(served.url)
    for path in ("completions", "chat/completions", "prefixes"):
        with socket.create_connection((where.hostname, where.port), timeout=10) as web:
            head = f"POST /v1/{path} HTTP/1.1\r\nhost: localhost\r\ncontent-length: 9000000\r\n\r\n"
            web.sendall(head.encode() + b"{")  # the rest never comes
            answer = b"".join(iter(lambda: web.recv(4096), b""))
        assert b" 401 " in answer and b"invalid_api_key" in answer


def test_what_is_within_limits_passes() -> None:
    limits = Limits(max_bytes=MIB, items=100, text_bytes=1000)
    tokens = {"prompt": list(range(100)), "model": "m"}
    assert parse_body(json.dumps(tokens).encode(), CompletionRequest, limits).prompt[-1] == 99
    escaped = json.dumps({"prompt": '\n\u00e9"\\' * 200, "model": "m"}).encode()
    measure(escaped, limits)  # far longer as it is written than as it is read
    for bad in (
        {"prompt": [0] * 101},
        {"prompt": "a" * 1001},
        {"metadata": {"a": "a" * 1001}},
        {"n": 10**64},
        {"ckv": json.loads("[" * 64 + "]" * 64)},
    ):
        with pytest.raises(ApiError) as raised:
            measure(json.dumps(bad).encode(), limits)
        assert raised.value.param == next(iter(bad))
    with pytest.raises(ApiError, match="the body: a list or object has more than 100 items") as of:
        measure(json.dumps(dict.fromkeys(map(str, range(101)), 0)).encode(), limits)
    assert of.value.param is None


@pytest.mark.parametrize(
    "body", [b"[" * 65, b'{"a":' * 65, b"[%s]" % (b"1" * 64), b"[0%s]" % (b",0" * 100)]
)
def test_a_small_body_has_the_same_limits(body: bytes) -> None:
    with pytest.raises(ApiError):
        measure(body, Limits(max_bytes=MIB, items=100))


@pytest.mark.parametrize(
    ("path", "field", "value"),
    [
        ("chat/completions", "model", CANARY),
        ("chat/completions", "messages", [{"role": CANARY, "content": "a"}]),
        ("chat/completions", "messages", [{"role": "user", "content": {CANARY: 1}}]),
        ("chat/completions", "temperature", CANARY),
        ("chat/completions", "n", 987654321987654321),
        ("chat/completions", "n", 987654321),
        ("chat/completions", "stop", [1, CANARY]),
        ("chat/completions", "ckv", {"budget": CANARY}),
        ("chat/completions", "ckv", {"budget": 987654321}),
        ("chat/completions", "response_format", {"type": CANARY}),
        ("completions", "prompt", [1, CANARY]),
        ("completions", "prompt", [987654321]),
        ("completions", "prompt", ["\ud800 987654321"]),
        ("prefixes", "tokens", [987654321]),
        ("prefixes", "priority", 987654321),
        ("prefixes", "name", f"{CANARY}\n"),
    ],
)
def test_no_refusal_repeats_a_value(url: str, path: str, field: str, value: object) -> None:
    bodies = {"prefixes": {"tokens": [7]}, "completions": WAY, "chat/completions": chat("Hello")}
    data = json.dumps(bodies[path] | {field: value})
    refused = httpx.post(f"{url}/v1/{path}", content=data, timeout=60)
    assert refused.status_code in (400, 404), refused.text
    assert CANARY not in refused.text and "987654321" not in refused.text
    assert refused.json()["error"]["param"].startswith(field)


def test_numbers_are_bounded(url: str) -> None:
    for name in ("n", "seed"):
        body = json.dumps(chat("Hello"))[:-1] + f', "{name}": {"9" * 4299}}}'
        refused = httpx.post(f"{url}/v1/chat/completions", content=body)
        assert refused.status_code == 400, refused.text
        assert refused.json()["error"]["param"] == name


# -- texts that cannot fit -------------------------------------------------------------------------


def test_the_fewest_tokens_of_a_text_are_never_more_than_it_has(checkpoint: Path) -> None:
    for folder in (checkpoint, Path("ckv_jax/data/reference")):
        tokenizer = load_tokenizer(folder)
        assert tokenizer.bounds.max_bytes
        rng = np.random.default_rng(0)
        alphabets = ("ab ", "lamp owl   \n", "aé \U0001f600", "<|im_end|> ", "  \t", "9 9")
        for letters in alphabets:
            for length in (1, 7, 300):
                text = "".join(rng.choice(list(letters), length))
                count = len(tokenizer.encode(text))
                assert tokenizer.bounds.least(text.encode()) <= count
                assert not tokenizer.exceeds(text, count)


def test_a_text_that_cannot_fit_is_not_encoded(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    encoded: list[int] = []
    encode = Tokenizer.encode

    def noted(self: Tokenizer, text: str, **more: bool) -> np.ndarray:
        encoded.append(len(text))
        return encode(self, text, **more)

    monkeypatch.setattr(Tokenizer, "encode", noted)
    long = "lamp " * 200_000
    thought = [{"role": "assistant", "reasoning_content": long}]
    for body, path in (
        (WAY | {"prompt": long}, "completions"),
        (chat(long), "chat/completions"),
        (WAY | {"messages": thought}, "chat/completions"),
        ({"text": long}, "prefixes"),
    ):
        refused = post(url, path, body)
        assert refused.status_code == 400
        assert refused.json()["error"]["code"] == "context_length_exceeded"
    assert not [size for size in encoded if size > 100_000]


# -- ingests ---------------------------------------------------------------------------------------


def test_ingests_of_one_tenant_do_not_keep_others_waiting(fresh: Engine) -> None:
    rng = np.random.default_rng(0)
    with serving(fresh, Tenants(TENANTS), max_requests=16) as url:
        post(url, "chat/completions", chat("Hello"), headers=BOB)  # compiled from here on
        answers: Counter[int] = Counter()

        def put() -> None:
            tokens = rng.integers(5, 500, 4000).tolist()
            answers[post(url, "prefixes", {"tokens": tokens}, headers=ALICE).status_code] += 1

        threads = [threading.Thread(target=put) for _ in range(12)]
        for thread in threads:
            thread.start()
        wait_for(lambda: answers[429] == 12 - 8)  # half of what the server admits
        began = time.monotonic()
        for path in ("health", "metrics", "v1/prefixes", "v1/models"):
            assert httpx.get(f"{url}/{path}", headers=BOB, timeout=60).status_code == 200
        said = post(url, "chat/completions", chat("Hello", max_tokens=2), headers=BOB)
        put_too = post(url, "prefixes", {"text": TEXT}, headers=BOB)
        assert (said.status_code, put_too.status_code) == (200, 201)
        waited, left = time.monotonic() - began, sum(answers.values())
        assert left < 12  # they were not waited for
        for thread in threads:
            thread.join()
        assert answers == {201: 8, 429: 4}
        assert waited < 30


def test_an_ingest_ends_with_its_client(fresh: Engine) -> None:
    rng = np.random.default_rng(1)
    with serving(fresh) as url:
        where = urlsplit(url)
        for _ in range(6):
            body = json.dumps({"tokens": rng.integers(5, 500, 8000).tolist()}).encode()
            with socket.create_connection((where.hostname, where.port)) as web:
                head = "POST /v1/prefixes HTTP/1.1\r\nhost: localhost\r\ncontent-length: "
                web.sendall(f"{head}{len(body)}\r\n\r\n".encode() + body)
                time.sleep(0.05)
        wait_for(lambda: httpx.get(f"{url}/v1/status").json()["answers_in_progress"] == 0, 10)
        wait_for(lambda: metric(url, "ckv_jobs") == 0, 10)
        assert httpx.get(f"{url}/v1/prefixes").json()["data"] == []
        assert metric(url, "ckv_undelivered_total") == 6


def test_tenants_take_turns_at_ingests() -> None:
    async def scene() -> None:
        ingests = FairPool("test", INGEST_THREADS, share=2)
        held, began = threading.Event(), []

        def work(name: str) -> object:
            def run(given_up: threading.Event) -> None:
                began.append(name)
                held.wait(10)

            return run

        alice, bob = Tenant(name="alice"), Tenant(name="bob")
        tasks = [asyncio.create_task(ingests.run(alice, work("a"))) for _ in range(9)]
        await asyncio.sleep(0.05)
        assert began == ["a"] * 2
        tasks += [asyncio.create_task(ingests.run(bob, work("b"))) for _ in range(3)]
        await asyncio.sleep(0.05)
        assert sorted(began) == ["a", "a", "b", "b"]
        assert len(began) == INGEST_THREADS
        tasks[5].cancel()  # while it waits
        held.set()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert Counter(began) == {"a": 8, "b": 3}
        ingests.close()

    asyncio.run(scene())


def test_who_leaves_while_others_wait_takes_no_turn() -> None:
    async def scene() -> None:
        pool, go, alice = FairPool("test", 1, share=1), threading.Event(), Tenant(name="alice")
        first = asyncio.create_task(pool.run(alice, lambda _: go.wait(10)))
        others = [asyncio.create_task(pool.run(alice, lambda _: True)) for _ in range(2)]
        await asyncio.sleep(0.05)
        go.set()
        time.sleep(0.05)  # the loop gets the end of the first, and then that the second leaves
        asyncio.get_running_loop().call_soon(others[0].cancel)
        async with asyncio.timeout(10):
            assert await first
            assert await others[1]
            assert await pool.run(alice, lambda _: 7) == 7
        assert others[0].cancelled()
        pool.close()

    asyncio.run(scene())


def test_who_leaves_before_a_thread_is_free_leaves_nothing() -> None:
    async def scene() -> None:
        pool, go, alive = FairPool("test", 2, share=1), threading.Event(), weakref.WeakSet()
        alice, bob, carol = (Tenant(name=name) for name in ("alice", "bob", "carol"))
        held = [asyncio.create_task(pool.run(who, lambda _: go.wait(10))) for who in (alice, bob)]
        works = [lambda _, which=which: which for which in range(3)]
        alive.update(works)
        while works:
            leaver = asyncio.create_task(pool.run(carol, works.pop()))
            await asyncio.sleep(0.02)
            leaver.cancel()
            await asyncio.wait([leaver])
        del leaver
        gc.collect()
        assert not alive
        last = asyncio.create_task(pool.run(carol, lambda _: 7))
        await asyncio.sleep(0.02)
        assert not last.done()
        go.set()
        async with asyncio.timeout(10):
            assert await last == 7
            assert all(await asyncio.gather(*held))
        pool.close()

    asyncio.run(scene())


# -- memory of turns -------------------------------------------------------------------------------


def asked(engine: Engine, tenant: str = "alice", prompt: str = TEXT) -> ParsedRequest:
    body = CompletionRequest(**WAY | {"prompt": prompt, "max_tokens": 64})
    return RequestParser(engine, CONFIG).parse(body, Tenant(name=tenant, salt=tenant))


CONFIG = ServerConfig(model=MODEL, store_tokens=16, turn_tokens=16)


def test_turns_that_wait_have_a_bound(fresh: Engine) -> None:
    request = asked(fresh)
    one = (request.prompt_tokens + 64) * fresh.layout.token_bytes
    config = ServerConfig(model=MODEL, store_tokens=16, turn_tokens=16, write_behind_bytes=4 * one)
    behind = WriteBehind(fresh, config, share=2 * one)
    try:
        others = [asked(fresh, name) for name in ("alice", "bob", "carol")]
        held = [behind.turns(other) for other in others for _ in range(9)]
        kept = [turns.__enter__().keep_kv[0] for turns in held]
        assert [kept[at : at + 9].count(True) for at in (0, 9, 18)] == [2, 2, 0]
        assert behind.skipped["busy"] == 9 * 3 - 4
        for turns in held:  # their clients leave: nothing is submitted
            turns.__exit__(None, None, None)
        with behind.turns(request) as turns:
            assert turns.keep_kv == [True]
    finally:
        behind.close(10)


def test_one_turn_alone_may_be_larger_than_the_bound(fresh: Engine) -> None:
    config = ServerConfig(model=MODEL, store_tokens=16, turn_tokens=16, write_behind_bytes=1)
    behind = WriteBehind(fresh, config, share=1)
    try:
        with behind.turns(asked(fresh)) as first, behind.turns(asked(fresh)) as second:
            assert (first.keep_kv, second.keep_kv) == ([True], [False])
    finally:
        behind.close(10)


def test_a_damaged_prefix_waits_once_for_its_repair(
    fresh: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    request, prefix, go = asked(fresh), fresh.ingest(fresh.encode(TEXT)), threading.Event()
    repaired: list[int] = []

    def repair(tokens: np.ndarray, *, salt: str) -> None:
        assert go.wait(60)
        repaired.append(len(tokens))

    monkeypatch.setattr(fresh, "ingest", repair)
    answer = SimpleNamespace(prefix=prefix, suffix=(), token_ids=(), kv=None)
    trace = SimpleNamespace(ttft_ms=1.0, of=lambda *_: 1)
    generation = SimpleNamespace(completion=lambda: answer, trace=trace)
    behind = WriteBehind(fresh, CONFIG, share=1)
    try:
        with behind.turns(request) as turns:
            for _ in range(3):
                behind.submit(turns, [generation] * 3)  # type: ignore[list-item]
            go.set()
            assert behind.flush(60)
            assert repaired == [prefix.num_tokens]
            behind.submit(turns, [generation])  # type: ignore[list-item]
            assert behind.flush(60)
        assert repaired == [prefix.num_tokens] * 2
    finally:
        go.set()
        behind.close(10)


# -- tenants ---------------------------------------------------------------------------------------


def test_a_tenant_has_a_share_of_what_is_admitted(engine: Engine) -> None:
    with serving(engine, Tenants(TENANTS), max_requests=2) as url:
        long = chat("Count.", max_tokens=2000, stream=True)
        with httpx.stream(
            "POST", f"{url}/v1/chat/completions", json=long, headers=ALICE, timeout=60
        ) as answer:
            lines = answer.iter_lines()
            next(lines)
            assert post(url, "chat/completions", chat("Hi"), headers=ALICE).status_code == 429
            assert post(url, "chat/completions", chat("Hi"), headers=BOB).status_code == 200


def test_salts_that_nobody_gave_are_secret_and_stay(tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    file.write_text(
        '[alice]\nkeys = ["alice-key-1"]\n[bob]\nkeys = ["bob-key-1"]\nsalt = "given"\n'
    )
    alice, bob = Tenants.load(file).all()
    assert (bob.salt, len(alice.salt)) == ("given", 64)
    salts = tmp_path / "keys.toml.salts"
    assert salts.stat().st_mode & 0o777 == 0o600
    file.write_text(file.read_text() + '[carol]\nkeys = ["carol-key-1"]\n')
    again = {tenant.name: tenant.salt for tenant in Tenants.load(file).all()}
    assert again["alice"] == alice.salt
    assert len(set(again.values())) == 3
    before = salts.read_bytes()
    file.write_text(file.read_text() + '[dora]\nkeys = ["dora-key-1"]\n')
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 5, hard))  # as of a disk that is full
    try:
        with pytest.raises(ValueError, match="cannot be written"):
            Tenants.load(file)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert salts.read_bytes() == before
    salts.unlink()
    (anew, *_) = Tenants.load(file).all()
    assert anew.salt != alice.salt
    salts.write_text("[]")
    with pytest.raises(ValueError, match="not a file of salts"):
        Tenants.load(file)
    salts.unlink()
    salts.mkdir()
    with pytest.raises(ValueError, match="Give each tenant a salt"):
        Tenants.load(file)
