"""`/v1/prefixes`: documents put, listed, pinned, given a time to live, deleted."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, FastAPI, Request
from pydantic import Field, model_validator
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response

from ckv_jax.errors import DeadlineExceeded
from ckv_jax.server.errors import ApiError, invalid
from ckv_jax.server.json_answer import JsonAnswer
from ckv_jax.server.schema import Message, Seconds, Strict, Tokens
from ckv_jax.server.service import Service
from ckv_jax.server.tenants import Tenant
from ckv_jax.storage.index.wishes import MOST_PRIORITY, Wish
from ckv_jax.storage.prefix import Prefix

Priority = Annotated[int, Field(ge=-MOST_PRIORITY, le=MOST_PRIORITY)]


class Wishes(Strict):
    """What is wanted of a prefix; a field that is not there leaves things as they are."""

    pinned: bool | None = None
    retain_s: Seconds | None = None
    priority: Priority | None = None

    def over(self, before: Wish) -> Wish:
        """These, in place of what was wanted before. `retain_s: null` means for ever."""
        given = self.model_fields_set & {"pinned", "retain_s", "priority"}
        changes = {name: getattr(self, name) for name in given}
        for name in ("pinned", "priority"):
            if changes.get(name, 0) is None:
                del changes[name]
        return replace(before, **changes)


class NewPrefix(Wishes):
    """`POST /v1/prefixes`: a text, token ids, or the messages that a chat begins with."""

    text: Annotated[str, Field(min_length=1)] | None = None
    tokens: Tokens | None = None
    messages: Annotated[list[Message], Field(min_length=1)] | None = None

    @model_validator(mode="after")
    def _one(self) -> NewPrefix:
        given = [self.text, self.tokens, self.messages]
        if sum(value is not None for value in given) != 1:
            raise ValueError("expected one of text, tokens and messages")
        return self


def add_prefix_routes(app: FastAPI, service: Service) -> None:
    """Adds them to `app`. Each tenant sees its own alone."""
    router = APIRouter(prefix="/v1/prefixes")
    engine = service.engine

    def put(body: NewPrefix, tenant: Tenant) -> dict[str, Any]:
        if body.messages is not None:
            text: str | list[int] = service.asking.chat_text(body.messages)
        else:
            text = body.tokens or body.text or ""
        prefix = engine.ingest(
            service.asking.encode(text),
            salt=tenant.salt,
            progress=partial(in_time, time.monotonic() + service.config.request_s),
        )
        wish = body.over(wish_of(prefix))
        engine.store.set_wish(prefix.id, wish, salt=tenant.salt)
        return describe(prefix, wish)

    def in_time(until: float, done: int, tokens: int) -> None:
        """Called after each block. What has been computed of a text that is late is given up."""
        if done < tokens and time.monotonic() > until:
            raise DeadlineExceeded(f"got {done} of {tokens} tokens computed in time")

    def change(prefix_id: str, body: Wishes, tenant: Tenant) -> dict[str, Any]:
        prefix = find(prefix_id, tenant)
        wish = body.over(wish_of(prefix))
        engine.store.set_wish(prefix.id, wish, salt=tenant.salt)
        return describe(prefix, wish)

    def listed(tenant: Tenant) -> list[dict[str, Any]]:
        wishes = engine.store.wishes()
        found = engine.store.prefixes(salt=tenant.salt)
        return [describe(prefix, wishes.get(prefix.id, Wish())) for prefix in found]

    def delete(prefix_id: str, tenant: Tenant) -> dict[str, Any]:
        prefix = find(prefix_id, tenant)
        wish, freed = wish_of(prefix), 0
        engine.store.set_wish(prefix.id, Wish(), salt=tenant.salt)
        try:
            freed = engine.store.delete(prefix)
        finally:
            if not freed:  # it stays, and so does what was wanted of it
                engine.store.set_wish(prefix.id, wish, salt=tenant.salt)
        if not freed:
            message = "this prefix is being read, or what continues it is pinned; it stays"
            raise ApiError(409, message, code="in_use", retry_s=1)
        return {"id": prefix.id, "object": "prefix", "deleted": True, "bytes": freed}

    def find(prefix_id: str, tenant: Tenant) -> Prefix:
        if not prefix_id.isalnum() or len(prefix_id) < 8:
            raise invalid("a prefix is named by at least 8 digits of its id", param="id")
        return engine.store.prefix(prefix_id, salt=tenant.salt)

    def wish_of(prefix: Prefix) -> Wish:
        return engine.store.wishes().get(prefix.id, Wish())

    @router.post("")
    async def post(body: NewPrefix, http: Request) -> Response:
        """Stores a text; returns once it is there, 503 if that takes longer than an answer may.
        What is stored already costs nothing."""
        tenant = service.tenant(http)
        with service.gate.enter(tenant, 1):
            return JsonAnswer(await run_in_threadpool(put, body, tenant), status=201)

    @router.get("")
    async def get(http: Request) -> Response:
        """Every stored prefix that no other continues."""
        data = await run_in_threadpool(listed, service.tenant(http))
        return JsonAnswer({"object": "list", "data": data})

    @router.get("/{prefix_id}")
    async def one(prefix_id: str, http: Request) -> Response:
        """One of them, by its id or how that begins."""

        def look(tenant: Tenant) -> Mapping[str, Any]:
            prefix = find(prefix_id, tenant)
            return describe(prefix, wish_of(prefix))

        return JsonAnswer(await run_in_threadpool(look, service.tenant(http)))

    @router.patch("/{prefix_id}")
    async def patch(prefix_id: str, body: Wishes, http: Request) -> Response:
        """Pins it, lets it go again, gives it a time to live or a priority."""
        tenant = service.tenant(http)
        return JsonAnswer(await run_in_threadpool(change, prefix_id, body, tenant))

    @router.delete("/{prefix_id}")
    async def remove(prefix_id: str, http: Request) -> Response:
        """Removes it from the store, with the turns that continue it, and what only it needs."""
        return JsonAnswer(await run_in_threadpool(delete, prefix_id, service.tenant(http)))

    app.include_router(router)


def describe(prefix: Prefix, wish: Wish) -> dict[str, Any]:
    """One prefix as JSON."""
    return {
        "id": prefix.id,
        "object": "prefix",
        "tokens": prefix.num_tokens,
        "chunks": prefix.num_chunks,
        "pinned": wish.pinned,
        "retain_s": wish.retain_s,
        "priority": wish.priority,
    }
