"""Stored documents in any order, named in a request."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from server.applications import ALICE, BOB, TENANTS, TEXT, WAY, chat, serving
from server.serving import post

from ckv_jax import Engine, Request, SamplingParams
from ckv_jax.server.tenants import Tenants
from ckv_jax.storage import Prefix, PrefixRecord
from ckv_jax.storage.store import ChunkStore

QUESTION = " How many stairs are there?"


@pytest.fixture(scope="module")
def fresh(engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """An engine over one store for all of these tests."""
    with (
        ChunkStore.open(tmp_path_factory.mktemp("documents") / "kv") as store,
        engine.variant(engine.config, store=store) as variant,
    ):
        yield variant


@pytest.fixture(scope="module")
def url(fresh: Engine) -> Iterator[str]:
    with serving(fresh, Tenants(TENANTS)) as url:
        yield url


@pytest.fixture(scope="module")
def documents(fresh: Engine) -> list[Prefix]:
    """Two of alice's, one of which has a name that one of bob's has, too."""
    found = []
    for text, salt, name in (
        (f"The first: {TEXT}", "alice", "manual"),
        (f"Another: {TEXT}", "alice", ""),
        (f"His own: {TEXT}", "bob", "manual"),
    ):
        prefix = fresh.ingest(text, salt=salt)
        if name:
            fresh.store.set_record(prefix.id, PrefixRecord(name=name))
        found.append(prefix)
    return found


def ask(url: str, *names: str, headers: dict[str, str] = ALICE, **more: object) -> dict:
    body = WAY | {"prompt": QUESTION, "ckv": {"documents": list(names)}} | more
    answer = post(url, "completions", body, headers=headers)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_documents_are_read_in_the_order_given(
    fresh: Engine, url: str, documents: list[Prefix]
) -> None:
    first, second, _ = documents
    for order in ((first, second), (second, first), (first,)):
        told = ask(url, *(prefix.id for prefix in order), temperature=0)
        request = Request(documents=order, suffix=QUESTION, budget=1.0, salt="alice")
        (expected,) = fresh.generate(request, SamplingParams(max_tokens=8)).results()
        assert told["choices"][0]["text"] == expected.text
        before = sum(prefix.num_tokens for prefix in order)
        usage = told["usage"]
        assert usage["prompt_tokens"] == before + len(fresh.encode(QUESTION))
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        assert 0 < cached <= before


def test_a_document_is_named_by_its_id_the_start_of_it_or_its_name(
    url: str, documents: list[Prefix]
) -> None:
    first = documents[0]
    told = [ask(url, name)["choices"] for name in (first.id, first.id[:12], "manual")]
    assert told[0] == told[1] == told[2]
    his = ask(url, "manual", headers=BOB)["choices"]
    assert his == ask(url, documents[2].id, headers=BOB)["choices"]


def test_chats_and_streams_have_documents_too(url: str, documents: list[Prefix]) -> None:
    names = [prefix.id for prefix in documents[:2]]
    body = chat(QUESTION, ckv={"documents": names})
    whole = post(url, "chat/completions", body, headers=ALICE).json()
    assert whole["usage"]["prompt_tokens"] > sum(prefix.num_tokens for prefix in documents[:2])
    streamed = post(url, "chat/completions", body | {"stream": True}, headers=ALICE)
    assert streamed.status_code == 200 and streamed.text.endswith("data: [DONE]\n\n")


@pytest.mark.parametrize(
    ("names", "more", "status", "code"),
    [
        (["0" * 32], {}, 404, "prefix_not_found"),
        (["nobody knows"], {}, 404, "prefix_not_found"),
        (["short"], {}, 404, "prefix_not_found"),
        ([], {}, 400, "invalid_value"),
        (["manual"], {"echo": True}, 400, "invalid_value"),
        (["manual"] * 60, {}, 400, "context_length_exceeded"),
        (["manual"] * 65, {}, 400, "invalid_value"),
        ("manual", {}, 400, "invalid_value"),
    ],
)
def test_documents_that_are_none(
    url: str, documents: list[Prefix], names: object, more: dict, status: int, code: str
) -> None:
    body = WAY | {"prompt": QUESTION, "ckv": {"documents": names}} | more
    refused = post(url, "completions", body, headers=ALICE)
    assert (refused.status_code, refused.json()["error"]["code"]) == (status, code)


def test_documents_of_others_do_not_exist(url: str, documents: list[Prefix]) -> None:
    refused = [
        post(url, "completions", WAY | {"prompt": "a", "ckv": {"documents": [name]}}, headers=BOB)
        for name in (documents[0].id, "0" * 32)
    ]
    assert refused[0].status_code == 404
    assert refused[0].json() == refused[1].json()


def test_a_name_that_several_have_is_no_name(
    fresh: Engine, url: str, documents: list[Prefix]
) -> None:
    fresh.store.set_record(documents[1].id, PrefixRecord(name="manual"))
    body = WAY | {"prompt": "a", "ckv": {"documents": ["manual"]}}
    refused = post(url, "completions", body, headers=ALICE)
    fresh.store.set_record(documents[1].id, PrefixRecord())
    assert refused.status_code == 400
    assert "several" in refused.json()["error"]["message"]


def test_a_document_of_another_system_is_refused(
    fresh: Engine, url: str, documents: list[Prefix], monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = replace(fresh.layout, chunk_tokens=2 * fresh.layout.chunk_tokens)
    other = replace(documents[0], layout=layout)
    monkeypatch.setattr(type(fresh.store), "prefix", lambda *_, **__: other)
    body = WAY | {"prompt": "a", "ckv": {"documents": [other.id]}}
    refused = post(url, "completions", body, headers=ALICE)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "ckv.documents"
