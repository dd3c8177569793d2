"""Two replicas on Ray Serve over one store; the process of one is killed while it is asked."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

ray = pytest.importorskip("ray", reason="replicas need the extra `ray`")

from server.applications import cached  # noqa: E402
from server.serving import MODEL, metric, wait_for  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

DOCUMENT = "The keeper of the lamp walks up the stairs and counts them one by one. " * 40
WAY = {"model": MODEL, "max_tokens": 24, "temperature": 1.0, "seed": 5}


@pytest.fixture(scope="module")
def url(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with warnings.catch_warnings(action="ignore"):  # Ray's own
        from ray import serve

        from ckv_jax.server.ray_app import build

    for name in ("READY", "HEALTH"):  # a busy machine starts Ray's proxy slowly
        os.environ.setdefault(f"RAY_SERVE_PROXY_{name}_CHECK_TIMEOUT_S", "60")
    environment = {"env_vars": {"JAX_PLATFORMS": "cpu"}}
    ray.init(
        num_cpus=4, include_dashboard=False, runtime_env=environment, log_to_driver=False,
        object_store_memory=100 * 2**20,
    )  # fmt: skip
    settings = {
        "checkpoint": str(checkpoint), "store": str(tmp_path_factory.mktemp("ray") / "kv"),
        "name": MODEL, "replicas": 2, "engine": {"dtype": "float32"},
        "server": {"guard_disk": False, "max_body_bytes": 100_000},
    }  # fmt: skip
    serve.start(http_options={"host": "127.0.0.1", "port": 18_431})
    serve.run(build(settings), name="ckv", route_prefix="/")
    yield "http://127.0.0.1:18431"
    serve.shutdown()
    ray.shutdown()


def ask(url: str, question: str, **more: object) -> httpx.Response:
    body = WAY | {
        "messages": [{"role": "system", "content": DOCUMENT}, {"role": "user", "content": question}]
    }
    return httpx.post(f"{url}/v1/chat/completions", json=body | more, timeout=240)


def replicas() -> set[int]:
    """Process ids of the replicas."""
    children = psutil.Process().children(recursive=True)
    title = "ray::ServeReplica:ckv:replica"
    return {child.pid for child in children if "".join(child.cmdline()).startswith(title)}


@pytest.mark.timeout(500)
def test_the_door_answers_what_needs_no_replica(url: str) -> None:
    assert httpx.get(f"{url}/health", timeout=60).json() == {"status": "ok"}
    assert httpx.get(f"{url}/ready", timeout=60).status_code == 200
    large = httpx.post(f"{url}/v1/completions", content=b"x" * 100_001, timeout=60)
    assert large.status_code == 413
    assert large.json()["error"]["code"] == "request_too_large"
    wrong = httpx.post(f"{url}/v1/completions", json={"model": MODEL}, timeout=60)
    assert wrong.status_code == 400


@pytest.mark.timeout(500)
def test_a_response_goes_on_at_its_replica(url: str) -> None:
    for text in ("up", "down", "round", "along"):
        body = {"model": MODEL, "input": text, "max_output_tokens": 4}
        for _ in range(3):
            answer = httpx.post(f"{url}/v1/responses", json=body, timeout=240)
            assert answer.status_code == 200, answer.text
            body |= {"input": f"And {text}?", "previous_response_id": answer.json()["id"]}


@pytest.mark.timeout(500)
def test_a_replica_that_dies_loses_no_request(url: str) -> None:
    first = ask(url, "Which lamp?")
    assert cached(first) == 0
    wait_for(lambda: cached(ask(url, "Which lamp?")) > 1024, 120)
    before = replicas()
    assert len(before) == 2
    assert len(httpx.get(f"{url}/v1/status", timeout=60).json()["replicas"]) == 2
    assert metric(url, "ckv_requests_waiting") == 0
    text = httpx.get(f"{url}/metrics", timeout=60).text
    assert len(set(re.findall('replica="(.*?)"', text))) == 2
    answers: list[httpx.Response] = []
    streams: list[str] = []

    def keep_asking() -> None:
        for turn in range(4):
            question = f"Which lamp? {turn // 2}"
            if not turn % 2:
                answers.append(ask(url, question))
                continue
            stream = ask(url, question, stream=True).text.rstrip()
            if not stream.endswith("[DONE]"):  # it had begun, so that no other replica could go on
                stream = ask(url, question, stream=True).text.rstrip()
            streams.append(stream)

    threads = [threading.Thread(target=keep_asking) for _ in range(3)]
    for thread in threads:
        thread.start()
    time.sleep(0.5)
    os.kill(min(before), signal.SIGKILL)
    for thread in threads:
        thread.join()
    assert len(answers) == len(streams) == 6
    assert all(stream.endswith("[DONE]") for stream in streams)
    assert all(cached(answer) > 1024 for answer in answers)
    texts = {answer.json()["choices"][0]["message"]["content"] for answer in answers}
    assert len(texts) <= 2  # one per question, whichever replica answered
    wait_for(lambda: len(replicas() - {min(before)}) == 2, 120)
    streamed = ask(url, "Which lamp?", stream=True)
    assert streamed.text.rstrip().endswith("[DONE]")
    os.kill(max(before), signal.SIGKILL)
    again = ask(url, "Which lamp?")  # by one that started since: the store has it
    assert cached(again) > 1024
    assert again.json()["choices"] == first.json()["choices"]
