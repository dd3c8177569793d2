"""The application in this process: limits, prefixes, and what is told of it all."""

from __future__ import annotations

import asyncio
import json
import shutil
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import Mock
from urllib.parse import urlsplit

import httpx
import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from server.applications import TEXT, WAY, cached, chat, serving
from server.serving import MODEL, metric, post, wait_for

from ckv_jax import Engine, Request
from ckv_jax.errors import Cancelled, CkvError
from ckv_jax.server import service, write_behind
from ckv_jax.server.app import create_app
from ckv_jax.server.config import ServerConfig
from ckv_jax.server.delivery import Client, Delivery
from ckv_jax.server.http import ApiError
from ckv_jax.server.observability import Metrics
from ckv_jax.server.tenants import INGEST_THREADS
from ckv_jax.server.write_behind import WriteCost
from ckv_jax.serving.decode_batch import DecodeBatches
from ckv_jax.serving.jobs import Job
from ckv_jax.storage import ChunkStore, Prefix, PrefixRecord
from ckv_jax.storage.errors import StoreUnavailable
from ckv_jax.storage.tools.verify import verify_store

# -- limits ----------------------------------------------------------------------------------------


def test_a_body_has_a_size_and_a_time(engine: Engine) -> None:
    with serving(engine, max_body_bytes=2000, body_s=0.3) as url:
        large = post(url, "chat/completions", chat("x" * 3000))
        assert large.status_code == 413
        assert large.json()["error"]["code"] == "request_too_large"
        chunked = httpx.post(f"{url}/v1/completions", content=iter([b"x" * 500] * 8))
        assert chunked.status_code == 413
        where = urlsplit(url)
        with socket.create_connection((where.hostname, where.port)) as slow:
            slow.sendall(
                b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 90\r\n\r\n{"
            )
            assert b"408" in slow.recv(1000)
        assert post(url, "chat/completions", chat("Hello")).status_code == 200


def test_who_comes_when_it_is_full_comes_again_and_who_leaves_makes_room(engine: Engine) -> None:
    with serving(engine, max_requests=1) as url:
        never = post(url, "chat/completions", chat("Hello", n=2))
        assert (never.status_code, never.json()["error"]["param"]) == (400, "n")
        long = chat("Count.", max_tokens=2000, stream=True)
        with httpx.stream("POST", f"{url}/v1/chat/completions", json=long, timeout=60) as answer:
            lines = answer.iter_lines()
            next(lines)
            full = post(url, "chat/completions", chat("Hello"))
            assert full.status_code == 429
            assert int(full.headers["retry-after"]) >= 1
            assert full.json()["error"]["type"] == "rate_limit_error"
            assert metric(url, "ckv_requests_running") == 1
        wait_for(lambda: metric(url, "ckv_undelivered_total") == 1)  # nobody reads it any more
        wait_for(lambda: metric(url, "ckv_requests_running") == 0)
        assert 0 < metric(url, "ckv_prompt_tokens_total") < 2000
        assert 0 < metric(url, "ckv_generated_tokens_total") < 2000  # of who vanished
        assert post(url, "chat/completions", chat("Hello")).status_code == 200


def test_an_answer_has_a_time(engine: Engine) -> None:
    with serving(engine, request_s=0.5) as url:
        cut = post(url, "chat/completions", chat("Count.", max_tokens=4000)).json()
        assert cut["ckv"]["ended_by"] == "deadline"
        assert cut["choices"][0]["finish_reason"] == "length"
    with serving(engine, request_s=1e-6) as url:
        none = post(url, "chat/completions", chat("Count."))
        assert none.status_code == 503
        assert none.json()["error"]["code"] == "deadline_exceeded"


def test_an_answer_that_is_not_read_ends() -> None:
    ended, said = [], []

    async def deliver(client: Client) -> None:
        try:
            await client.event({"text": "never taken"})
        finally:
            ended.append(True)

    async def never(*_: object) -> dict:
        await asyncio.Event().wait()
        return {}

    delivery = Delivery(deliver, undelivered=said.append, send_s=0.05, ending=asyncio.Event())
    asyncio.run(delivery({}, never, never))
    assert ended and "read nothing" in said[0]


def test_an_answer_ends_if_it_is_not_read_and_not_while_it_waits_for_its_model() -> None:
    sent, said = [], []

    async def deliver(client: Client) -> None:
        for text in ("first", "second"):
            await client.event({"text": text})
            await asyncio.sleep(0.1)
        raise ApiError(400, "third", code="late")

    async def never(*_: object) -> dict:
        await asyncio.Event().wait()
        return {}

    async def send(message: dict) -> None:
        sent.append(message.get("body", b""))
        if b"third" in sent[-1]:
            await never()

    delivery = Delivery(deliver, undelivered=said.append, send_s=0.03, ending=asyncio.Event())
    asyncio.run(asyncio.wait_for(delivery({}, never, send), 5))
    assert [b"first" in one or b"second" in one for one in sent] == [False, True, True, False]
    assert "read nothing" in said[0], "the error was not read"


# -- prefixes --------------------------------------------------------------------------------------


def test_turns_are_stored_after_their_answers(fresh: Engine) -> None:
    with serving(fresh) as url:
        messages = [{"role": "user", "content": TEXT}]
        first = post(url, "chat/completions", WAY | {"messages": messages})
        assert cached(first) == 0
        wait_for(lambda: metric(url, "ckv_stored_turns_total") == 1)
        said = first.json()["choices"][0]["message"]
        history = [*messages, {"role": "assistant", "content": said["content"]}]
        history.append({"role": "user", "content": "And down again?"})
        second = post(url, "chat/completions", WAY | {"messages": history})
        assert cached(second) >= first.json()["usage"]["prompt_tokens"] // 16 * 16 - 16
        wait_for(lambda: metric(url, "ckv_stored_turns_total") == 2)
        third = post(url, "chat/completions", WAY | {"messages": history})
        assert cached(third) > cached(second)
        assert third.json()["choices"] == second.json()["choices"]
        sparse = post(url, "chat/completions", WAY | {"messages": history, "model": "tiny:sparse"})
        assert sparse.json()["ckv"]["budget"] == 0.25
        assert sparse.json()["ckv"]["attention_covered"] < 1
        longer = WAY | {"messages": history, "max_tokens": 32}
        passed_over = metric(url, "ckv_not_stored_total", reason="approximate")
        for asked, understood in (
            ({"mass": 0.5}, "mass:0.5"),
            ({"mass": 0.5, "budget": 0.75}, "mass:0.5:0-0.75"),
            ({"budget": "mass:0.5"}, "mass:0.5"),
        ):
            told = post(url, "chat/completions", longer | {"ckv": asked}).json()
            assert told["ckv"]["budget"] == understood
            assert 0.5 <= told["ckv"]["attention_covered"] < 1
        assert metric(url, "ckv_not_stored_total", reason="approximate") == passed_over + 3
        all_of_it = WAY | {"messages": history, "ckv": {"budget": "mass:1"}}
        assert post(url, "chat/completions", all_of_it).json()["choices"] == third.json()["choices"]
        short = post(url, "chat/completions", chat("Hello", ckv={"retain_s": 60}))
        assert cached(short) == 0
        assert metric(url, "ckv_not_stored_total", reason="short") >= 1


def test_a_prefix_is_put_kept_and_deleted(fresh: Engine) -> None:
    with serving(fresh, prune_s=0.2) as url, httpx.Client(base_url=f"{url}/v1", timeout=60) as web:
        onward = f"{TEXT} And so it went on until the evening of that day."
        put = web.post("/prefixes", json={"text": TEXT, "pinned": True})
        assert put.status_code == 201
        prefix = put.json()
        assert prefix["pinned"] and prefix["tokens"] > 128
        again = web.post("/prefixes", json={"text": TEXT}).json()
        now = {"last_used": again["last_used"]}
        assert again == prefix | now  # it stays pinned
        assert [p | now for p in web.get("/prefixes").json()["data"]] == [again]
        assert web.get(f"/prefixes/{prefix['id'][:12]}").json() | now == again
        assert prefix["bytes"] > 0 and abs(prefix["last_used"] - time.time()) < 600
        asked = web.post("/completions", json=WAY | {"prompt": onward})
        assert cached(asked) >= prefix["tokens"] // 16 * 16 - 16
        wait_for(lambda: metric(url, "ckv_stored_turns_total") == 1)
        told = web.patch(f"/prefixes/{prefix['id']}", json={"pinned": False, "priority": 3}).json()
        assert (told["pinned"], told["priority"], told["retain_s"]) == (False, 3, None)
        path = f"/prefixes/{prefix['id']}"
        gone = web.delete(path).json()
        assert gone["deleted"] and gone["bytes"] > 0
        assert web.get(f"/prefixes/{prefix['id']}").status_code == 404
        assert web.get("/prefixes").json()["data"] == []
        assert cached(web.post("/completions", json=WAY | {"prompt": onward})) == 0
        wait_for(lambda: web.get("/prefixes").json()["data"])  # after the answer
        for turn in web.get("/prefixes").json()["data"]:
            web.patch(f"/prefixes/{turn['id']}", json={"retain_s": 0})
        wait_for(lambda: not web.get("/prefixes").json()["data"])  # its time is over
        assert metric(url, "ckv_evicted_segments_total", reason="expired") >= 1
        assert metric(url, "ckv_evicted_segments_total", reason="deleted") >= 1
        kept = web.post("/completions", json=WAY | {"prompt": TEXT, "ckv": {"retain_s": 900}})
        assert cached(kept) == 0
        wait_for(lambda: [p["retain_s"] for p in web.get("/prefixes").json()["data"]] == [900])
        for bad in (
            {},
            {"text": "a", "tokens": [1]},
            {"text": ""},
            {"text": "a", "priority": 1001},
        ):
            assert web.post("/prefixes", json=bad).status_code == 400
        assert web.get("/prefixes/..%2f..%2f").status_code in (400, 404)
        assert web.post("/prefixes", json={"text": "lamp " * 9000}).status_code == 400


def test_a_prefix_has_a_name(fresh: Engine) -> None:
    with serving(fresh) as url, httpx.Client(base_url=f"{url}/v1", timeout=60) as web:
        first = web.post("/prefixes", json={"text": TEXT, "name": "stairs/of the lamp"}).json()
        path = "/prefixes/stairs%2Fof the lamp"
        assert web.get(path).json()["id"] == first["id"]
        assert web.patch(path, json={"name": "stairs"}).json()["name"] == "stairs"
        assert web.get(path).status_code == 404
        second = web.post("/prefixes", json={"text": f"So. {TEXT}", "name": "stairs"}).json()
        several = web.get("/prefixes/stairs")
        assert several.status_code == 400
        for one in (first, second):
            assert one["id"][:12] in several.json()["error"]["message"]
        assert web.patch(f"/prefixes/{second['id']}", json={"name": ""}).json()["name"] == ""
        assert web.get(f"/prefixes/{first['id'][:3]}").status_code in (400, 404)
        assert web.patch("/prefixes/stairs", json={"name": "a\nb"}).status_code == 400
        assert web.delete("/prefixes/stairs").json()["id"] == first["id"]
        assert web.get("/prefixes/stairs").status_code == 404


def test_a_chat_reads_back_a_document_that_was_put(fresh: Engine) -> None:
    question = {"role": "user", "content": "How many stairs?"}
    with serving(fresh) as url:
        document = post(url, "prefixes", {"document": f"{TEXT}<|im_end|>\n"}).json()
        system = {"role": "system", "content": f"{TEXT}<|im_end|>"}
        asked = post(url, "chat/completions", WAY | {"messages": [system, question]})
        assert cached(asked) == document["tokens"]
        text = f"Be brief.\n\n{TEXT}"
        put = post(url, "prefixes", {"document": TEXT, "instructions": "Be brief."}).json()
        asked = post(
            url, "chat/completions",
            WAY | {"messages": [{"role": "system", "content": text}, question]},
        )  # fmt: skip
        assert cached(asked) == put["tokens"]
        put = post(url, "prefixes", {"document": f"\n{TEXT}\n", "turn": "user"}).json()
        for end in ("", "\n"):
            asked = post(url, "chat/completions", chat(f"\n{TEXT}{end}\n\nHow many stairs?"))
            assert cached(asked) == put["tokens"]
        for bad in (
            {"document": " "},
            {"text": TEXT, "turn": "user"},
            {"document": "a", "turn": "x"},
        ):
            assert post(url, "prefixes", bad).status_code == 400


def test_an_answer_says_what_it_read(fresh: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    messages = [{"role": "system", "content": TEXT}, {"role": "user", "content": "How many?"}]
    with serving(fresh) as url:
        prefix = post(url, "prefixes", {"document": TEXT}).json()
        body = WAY | {"messages": messages, "ckv": {"citations": 2, "budget": 0.25}}
        asked = post(url, "chat/completions", body)
        found = asked.json()["ckv"]
        assert 1 <= len(found["citations"]) <= 2
        for passage in found["citations"]:
            assert passage["text"] and 0 < passage["share"] <= 1
            assert 0 <= passage["tokens"][0] < passage["tokens"][1] <= prefix["tokens"]
        covered = found["attention_covered"]
        assert found["low_coverage"] == (covered < 0.7)
        assert float(asked.headers["x-ckv-attention-covered"]) == pytest.approx(covered, abs=1e-4)
        lines = post(url, "chat/completions", body | {"stream": True}).text.splitlines()
        last = json.loads([line for line in lines if '"ckv"' in line][-1].removeprefix("data: "))
        assert last["ckv"]["citations"] == found["citations"]
        plain = post(url, "chat/completions", WAY | {"messages": messages}).json()
        assert "citations" not in plain["ckv"]
        several = post(url, "chat/completions", body | {"n": 2}).json()["choices"]
        assert all(choice["ckv"]["citations"] for choice in several)
        with monkeypatch.context() as broken:
            broken.setattr(Engine, "citations", Mock(side_effect=CkvError("the disk is gone")))
            uncited = post(url, "chat/completions", body)
        assert uncited.status_code == 200 and "citations" not in uncited.json()["ckv"]
        wrong = {"messages": messages, "ckv": {"citations": 21}}
        assert post(url, "chat/completions", WAY | wrong).status_code == 400


def test_storing_a_text_has_a_time(fresh: Engine) -> None:
    with serving(fresh, request_s=1e-6) as url:
        late = post(url, "prefixes", {"text": TEXT * 6})
        assert late.status_code == 503
        assert late.json()["error"]["code"] == "deadline_exceeded"
        assert httpx.get(f"{url}/v1/prefixes").json()["data"] == []


def test_waiting_for_a_thread_to_store_with_has_a_time(
    fresh: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    go, begun = threading.Event(), list[object]()

    def held(*_: object, **__: object) -> None:
        begun.append(None)
        assert go.wait(60)
        raise Cancelled("held")

    monkeypatch.setattr(fresh, "ingest", held)
    with serving(fresh, request_s=0.3) as url, ThreadPoolExecutor(INGEST_THREADS + 1) as clients:
        asked = [
            clients.submit(httpx.post, f"{url}/v1/prefixes", json={"text": TEXT}, timeout=20)
            for _ in range(INGEST_THREADS + 1)
        ]
        try:
            answers = [one.result() for one in asked]
        finally:
            go.set()
        assert len(begun) == INGEST_THREADS
        assert {one.json()["error"]["code"] for one in answers} == {"deadline_exceeded"}


def test_scrapes_at_one_time_are_one(fresh: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    go, begun = threading.Event(), list[object]()

    def held(self: Metrics) -> bytes:
        begun.append(None)
        assert go.wait(60)
        return b"figures"

    monkeypatch.setattr(Metrics, "text", held)
    app = create_app(fresh, ServerConfig(model=MODEL))

    async def scene() -> None:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as web:
            leaver, *others = [asyncio.create_task(web.get("/metrics")) for _ in range(8)]
            await asyncio.sleep(0.2)
            leaver.cancel()
            await asyncio.wait([leaver])
            go.set()
            assert {answer.text for answer in await asyncio.gather(*others)} == {"figures"}
            assert len(begun) == 1
            await web.get("/metrics")
            assert len(begun) == 2

    try:
        asyncio.run(scene())
    finally:
        go.set()
        app.state.service.close()


def test_what_is_not_granted_is_refused(url: str) -> None:
    obfuscated = chat("Hello", stream_options={"include_obfuscation": True})
    assert post(url, "chat/completions", obfuscated).status_code == 400
    assert metric(url, "ckv_requests_total", route="other", status="404") == 0
    assert httpx.get(f"{url}/v1/modelsXYZ").status_code == 404
    assert metric(url, "ckv_requests_total", route="other", status="404") == 1


def test_memory_keeps_nothing_of_a_prefix_that_is_deleted(fresh: Engine) -> None:
    with serving(fresh) as url, httpx.Client(base_url=f"{url}/v1", timeout=60) as web:
        path = f"/prefixes/{web.post('/prefixes', json={'text': TEXT}).json()['id']}"
        [prefix] = fresh.store.prefixes()
        request = Request(prefix=prefix, suffix=[1, 2], budget=0.5)
        fresh.reprefill([request])[0].raise_for_error()
        tiers, opened = fresh.worker.memory.tiers, fresh.worker.prefixes.known(prefix)
        assert (tiers.device_pages, opened.digest_bytes) > (0, 0)
        assert web.delete(path).json()["deleted"]
        wait_for(lambda: (tiers.device_pages, opened.digest_bytes) == (0, 0))


def test_what_cannot_be_deleted_is_wanted_as_before(fresh: Engine) -> None:
    with serving(fresh) as url, httpx.Client(base_url=f"{url}/v1", timeout=60) as web:
        wanted = {"pinned": True, "retain_s": 900.0, "priority": 7}
        prefix = web.post("/prefixes", json={"text": TEXT} | wanted).json()
        path = f"/prefixes/{prefix['id']}"
        onward = {"text": f"{TEXT} And down again, until the evening.", "pinned": True}
        later = web.post("/prefixes", json=onward).json()
        kept = web.delete(path)
        assert kept.status_code == 409
        assert kept.json()["error"]["code"] == "in_use"
        assert web.get(path).json() | {"last_used": 0} == prefix | {"last_used": 0}
        assert wanted.items() <= prefix.items()
        web.patch(f"/prefixes/{later['id']}", json={"pinned": False})
        assert web.delete(path).json()["deleted"]


def test_a_prefix_that_is_being_deleted_is_wanted_until_it_is_gone(
    fresh: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server may be killed meanwhile."""
    found: list[PrefixRecord] = []

    def late(self: ChunkStore, prefix: Prefix) -> int:
        found.append(self.record_of(prefix))
        raise StoreUnavailable("late")

    with serving(fresh) as url, httpx.Client(base_url=f"{url}/v1", timeout=60) as web:
        wanted = {"name": "stairs", "pinned": True}
        path = f"/prefixes/{web.post('/prefixes', json={'text': TEXT} | wanted).json()['id']}"
        with monkeypatch.context() as broken:
            broken.setattr(ChunkStore, "delete", late)
            assert web.delete(path).status_code == 503
        assert (found[0].name, found[0].pinned) == ("stairs", True)
        assert web.delete(path).json()["deleted"]
        assert not fresh.store.records()


def test_a_prefix_stays_while_an_answer_over_it_runs(
    fresh: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever continues it goes."""
    asked, step = threading.Event(), DecodeBatches.step

    def after(self: DecodeBatches) -> list[Job]:
        assert asked.wait(60)
        return step(self)

    monkeypatch.setattr(DecodeBatches, "step", after)
    with serving(fresh) as url, httpx.Client(base_url=f"{url}/v1", timeout=60) as web:
        prefix = web.post("/prefixes", json={"text": TEXT, "retain_s": 900.0}).json()
        path = f"/prefixes/{prefix['id']}"
        later = web.post("/prefixes", json={"text": f"{TEXT} And down again."}).json()
        long = WAY | {"prompt": f"{TEXT} Why?", "max_tokens": 3, "stream": True}
        with web.stream("POST", "/completions", json=long) as answer:
            next(answer.iter_lines())
            assert web.delete(path).json()["error"]["code"] == "in_use"
            asked.set()
        assert web.get(path).json()["retain_s"] == 900
        assert web.get(f"/prefixes/{later['id']}").status_code == 404


def test_a_damaged_index_is_named_with_its_repair(fresh: Engine) -> None:
    with serving(fresh) as url, httpx.Client(base_url=f"{url}/v1", timeout=60) as web:
        path = f"/prefixes/{web.post('/prefixes', json={'text': TEXT}).json()['id']}"
        fresh.store.index.catalog.db.write(lambda db: db.execute("UPDATE segments SET parent = id"))
        kept = web.delete(path)
        assert kept.status_code == 503
        error = kept.json()["error"]
        assert error["code"] == "index_damaged"
        assert error["message"].endswith("nothing was deleted; run: ckv verify STORE --repair")
        assert "segment" not in error["message"]
        assert verify_store(fresh.store, repair=True).unindexed
        assert web.delete(path).json()["deleted"]


def test_the_store_may_vanish(fresh: Engine, tmp_path: Path) -> None:
    with serving(fresh) as url:
        body = chat(TEXT)
        first = post(url, "chat/completions", body)
        wait_for(lambda: metric(url, "ckv_stored_turns_total") == 1)
        shutil.rmtree(tmp_path / "kv")
        (tmp_path / "kv").write_text("no folder any more")
        again = post(url, "chat/completions", body)
        assert again.status_code == 200
        assert again.json()["choices"] == first.json()["choices"]
        assert post(url, "prefixes", {"text": TEXT}).status_code == 503
        assert httpx.get(f"{url}/metrics").status_code == 200


def test_turns_are_not_written_to_a_slow_disk() -> None:
    cost = WriteCost()
    assert cost.worth_writing()
    cost.computed(1000, 1.0)
    cost.written(1000, 5.0)
    assert cost.slow_disk
    assert [cost.worth_writing() for _ in range(16)].count(True) == 1  # to measure again
    for _ in range(20):
        cost.written(1000, 0.1)
    assert not cost.slow_disk and cost.worth_writing()


def test_a_write_is_tried_again_for_a_while(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And no longer than the server lives."""
    work = Mock(side_effect=StoreUnavailable("no descriptors"))
    monkeypatch.setattr(write_behind, "_RETRY_S", 0.5)
    written = write_behind.WriteBehind(engine, ServerConfig(model="model"), share=1)
    written._put(work).result(10)
    assert 1 < work.call_count < 4 and written.failed == 1
    monkeypatch.setattr(write_behind, "_RETRY_S", 1e4)
    monkeypatch.setattr(write_behind, "_PAUSE_S", 1e3)
    last = written._put(work)
    while work.call_count < 4:
        time.sleep(0.001)
    written.close(10)
    assert last.done() and not written._thread.is_alive()


# -- seen ------------------------------------------------------------------------------------------


def test_counters_equal_sums_over_answers(fresh: Engine) -> None:
    with serving(fresh) as url:
        answers = []
        for question in ("up", "down", "round"):
            answers.append(post(url, "chat/completions", chat(f"{TEXT} {question}?")).json())
            wait_for(lambda: metric(url, "ckv_stored_turns_total") >= 1)
        assert post(url, "chat/completions", {}).status_code == 400
        usages = [answer["usage"] for answer in answers]
        assert metric(url, "ckv_prompt_tokens_total") == sum(u["prompt_tokens"] for u in usages)
        assert metric(url, "ckv_generated_tokens_total") == sum(
            u["completion_tokens"] for u in usages
        )
        details = [u["prompt_tokens_details"]["cached_tokens"] for u in usages]
        assert metric(url, "ckv_cached_tokens_total") == sum(details) > 0
        read = sum(answer["ckv"]["ssd_bytes"] for answer in answers)
        assert metric(url, "ckv_read_bytes_total", source="ssd") == read > 0
        assert metric(url, "ckv_time_to_first_token_seconds_count") == 3
        assert metric(url, "ckv_token_gap_seconds_count") == sum(
            u["completion_tokens"] - 1 for u in usages
        )
        route = {"route": "/v1/chat/completions"}
        assert metric(url, "ckv_requests_total", status="200", **route) == 3
        assert metric(url, "ckv_requests_total", status="400", **route) == 1
        for name in ("num_requests_waiting", "num_requests_running", "kv_cache_usage_perc"):
            assert f"\nvllm:{name} 0.0\n" in httpx.get(f"{url}/metrics").text
        status = httpx.get(f"{url}/v1/status").json()
        assert status["answers_in_progress"] == 0
        assert status["ttft_ms"]["compute"] > 0
        assert "<title>ckv serve</title>" in httpx.get(url).text


def test_spans_nest_and_sum_to_the_time_to_first_token(engine: Engine) -> None:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    parent = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
    with serving(engine, tracing=provider) as url:
        post(url, "chat/completions", chat("Hello", n=2), headers={"traceparent": parent})
        wait_for(lambda: any(s.name.startswith("POST") for s in exporter.get_finished_spans()))
        with serving(engine, tracing=provider, request_s=1e-6) as late:
            assert post(late, "completions", WAY | {"prompt": "Hello"}).status_code == 503
    (cut,) = [s for s in exporter.get_finished_spans() if s.name == "POST /v1/completions"]
    assert (cut.status.status_code.name, cut.status.description) == ("ERROR", "DeadlineExceeded")
    spans = [s for s in exporter.get_finished_spans() if s is not cut]
    by_id = {span.context.span_id: span for span in spans}
    (root,) = [span for span in spans if span.name == "POST /v1/chat/completions"]
    assert f"{root.context.trace_id:032x}" == parent.split("-")[1]
    assert f"{root.parent.span_id:016x}" == parent.split("-")[2]
    texts = [span for span in spans if span.name.startswith("text ")]
    assert len(texts) == 2
    for span in spans:
        if span is not root:
            above = by_id[span.parent.span_id]
            assert above.start_time <= span.start_time <= span.end_time <= above.end_time
    for text in texts:
        parts = {s.name: s for s in spans if s.parent and s.parent.span_id == text.context.span_id}
        assert set(parts) == {"prepare", "queue", "prefill", "decode"}
        length = sum(
            parts[n].end_time - parts[n].start_time for n in ("prepare", "queue", "prefill")
        )
        assert length / 1e6 == pytest.approx(text.attributes["ckv.ttft_ms"], abs=0.01)
        stages = [s for s in spans if s.parent and by_id.get(s.parent.span_id) is parts["prefill"]]
        assert stages


def test_a_server_whose_engine_has_ended_is_not_ready(fresh: Engine) -> None:
    with serving(fresh) as url:
        assert httpx.get(f"{url}/ready").status_code == 200
        fresh.close()
        ready = httpx.get(f"{url}/ready")
        assert (ready.status_code, ready.json()["error"]["code"]) == (503, "engine_stopped")


def test_a_ready_server_has_compiled(fresh: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    for bound, least in (("_WARM_BATCH", 1), ("_WARM_SUFFIX", 16), ("_WARM_ANSWER", 16)):
        monkeypatch.setattr(service, bound, least)  # fewer programs, no other way
    with serving(fresh, warm_tokens=256) as url:
        early = httpx.get(f"{url}/ready")
        assert early.status_code == 503
        assert early.json()["error"]["code"] == "warming_up"
        assert httpx.get(f"{url}/health").status_code == 200
        wait_for(lambda: httpx.get(f"{url}/ready").status_code == 200, 120)
        assert fresh.store.prefixes() == [] and fresh.store.usage() == 0
        programs = fresh.stats().programs
        asked = WAY | {"prompt": [7] * 290}
        assert cached(post(url, "completions", asked)) == 0
        wait_for(lambda: metric(url, "ckv_stored_turns_total") == 1)
        assert cached(post(url, "completions", asked)) == 288
        sparse = post(url, "completions", asked | {"model": f"{MODEL}:sparse"})
        assert sparse.json()["ckv"]["budget"] == 0.25
        assert fresh.stats().programs == programs
    with pytest.raises(ValueError, match="warm_tokens=8192"):
        create_app(fresh, ServerConfig(model="a", warm_tokens=8192))


def test_settings_that_mean_nothing_are_refused() -> None:
    for bad in (
        {"budget": 0},
        {"max_requests": 0},
        {"send_s": 0},
        {"warm_tokens": -1},
        {"model": "a:sparse"},
    ):
        with pytest.raises(ValueError, match="got"):
            ServerConfig(**({"model": "a"} | bad))
