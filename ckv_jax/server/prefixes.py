"""`/v1/prefixes`: prefixes are stored, listed, pinned, given a time to live, and deleted."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Annotated, Any, Literal

from fastapi import APIRouter, FastAPI, Request
from pydantic import Field, model_validator
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response

from ckv_jax.errors import DeadlineExceeded
from ckv_jax.server.http import ApiError, JsonResponse, client_errors, invalid
from ckv_jax.server.schema import Message, Seconds, Strict, Tokens
from ckv_jax.server.service import Service
from ckv_jax.server.tenants import Tenant
from ckv_jax.storage.index.wishes import MOST_LETTERS, MOST_PRIORITY, Wish
from ckv_jax.storage.prefix import Prefix
from ckv_jax.storage.tools.names import find_prefix

Priority = Annotated[int, Field(ge=-MOST_PRIORITY, le=MOST_PRIORITY)]


class PrefixChange(Strict):
    """A prefix's name and how long it is to be kept; fields that are not given stay as they are."""

    name: Annotated[str, Field(max_length=MOST_LETTERS)] | None = None
    """What people call it; "": nothing any more."""
    pinned: bool | None = None
    retain_s: Seconds | None = None
    priority: Priority | None = None

    def applied_to(self, before: Wish) -> Wish:
        """`before` with these changes. `retain_s: null` means for ever."""
        given = self.model_fields_set & {"name", "pinned", "retain_s", "priority"}
        changes = {name: getattr(self, name) for name in given}
        for name in ("name", "pinned", "priority"):
            if changes.get(name, 0) is None:
                del changes[name]
        with client_errors():
            return replace(before, **changes)


class NewPrefix(PrefixChange):
    """`POST /v1/prefixes`: a document, bare text, token ids, or the first messages of a chat."""

    document: Annotated[str, Field(min_length=1)] | None = None
    """Stored as the chat template has it: a chat that begins with it reads it back."""
    turn: Literal["system", "user"] | None = None
    """The turn that the document stands in, see `Engine.ingest`."""
    instructions: str = ""
    """Text of the system turn, before a document that stands there."""
    text: Annotated[str, Field(min_length=1)] | None = None
    """Stored as it is, for completions."""
    tokens: Tokens | None = None
    messages: Annotated[list[Message], Field(min_length=1)] | None = None

    @model_validator(mode="after")
    def _one(self) -> NewPrefix:
        given = [self.document, self.text, self.tokens, self.messages]
        if sum(value is not None for value in given) != 1:
            raise ValueError("expected one of document, text, tokens and messages")
        if self.document is None and (self.turn is not None or self.instructions):
            raise ValueError("got turn or instructions without a document")
        return self


def add_prefix_routes(app: FastAPI, service: Service) -> None:
    """Adds the routes to `app`. Each tenant sees its own prefixes alone."""
    router = APIRouter(prefix="/v1/prefixes")
    engine = service.engine

    def store(body: NewPrefix, tenant: Tenant) -> dict[str, Any]:
        late = partial(check_time, time.monotonic() + service.config.request_s)
        if body.document is not None:
            with client_errors():
                prefix = engine.ingest(
                    body.document,
                    turn=body.turn,
                    instructions=body.instructions,
                    salt=tenant.salt,
                    progress=late,
                )
        else:
            if body.messages is not None:
                tokens = service.parser.chat_tokens(body.messages)
            else:
                tokens = service.parser.encode(body.tokens or body.text or "")
            prefix = engine.ingest(tokens, salt=tenant.salt, progress=late)
        wish = body.applied_to(wish_of(prefix))
        engine.store.set_wish(prefix.id, wish, salt=tenant.salt)
        return describe(prefix, wish, engine.store.sizes())

    def check_time(until: float, done: int, tokens: int) -> None:
        """Ends an ingest that is late; called after each block."""
        if done < tokens and time.monotonic() > until:
            raise DeadlineExceeded(f"got {done} of {tokens} tokens computed in time")

    def change(prefix_id: str, body: PrefixChange, tenant: Tenant) -> dict[str, Any]:
        prefix = find(prefix_id, tenant)
        wish = body.applied_to(wish_of(prefix))
        engine.store.set_wish(prefix.id, wish, salt=tenant.salt)
        return describe(prefix, wish, engine.store.sizes())

    def listed(tenant: Tenant) -> list[dict[str, Any]]:
        wishes, sizes = engine.store.wishes(), engine.store.sizes()
        found = engine.store.prefixes(salt=tenant.salt)
        return [describe(prefix, wishes.get(prefix.id, Wish()), sizes) for prefix in found]

    def delete(prefix_id: str, tenant: Tenant) -> dict[str, Any]:
        prefix = find(prefix_id, tenant)
        wish, freed = wish_of(prefix), 0
        engine.store.set_wish(prefix.id, Wish(), salt=tenant.salt)
        try:
            freed = engine.store.delete(prefix)
        finally:
            if not freed:  # it stays, with its retention
                engine.store.set_wish(prefix.id, wish, salt=tenant.salt)
        if not freed:
            message = "this prefix is being read, or what continues it is pinned; it stays"
            raise ApiError(409, message, code="in_use", retry_s=1)
        return {"id": prefix.id, "object": "prefix", "deleted": True, "bytes": freed}

    def find(name: str, tenant: Tenant) -> Prefix:
        with client_errors():
            prefix = find_prefix(engine.store, name, salt=tenant.salt)
        if len(name) < 8 and wish_of(prefix).name != name:
            raise invalid("expected a prefix's name, or at least 8 digits of its id", param="id")
        return prefix

    def wish_of(prefix: Prefix) -> Wish:
        return engine.store.wishes().get(prefix.id, Wish())

    @router.post("")
    async def post(body: NewPrefix, http: Request) -> Response:
        """Stores a prefix and returns once it is stored; 503 if that takes longer than an answer
        may. One that is stored already costs nothing."""
        tenant = service.tenant(http)
        with service.admission.admit(tenant, 1):
            return JsonResponse(await run_in_threadpool(store, body, tenant), status=201)

    @router.get("")
    async def get(http: Request) -> Response:
        """Lists the stored prefixes that no other continues."""
        data = await run_in_threadpool(listed, service.tenant(http))
        return JsonResponse({"object": "list", "data": data})

    @router.get("/{prefix_id:path}")
    async def one(prefix_id: str, http: Request) -> Response:
        """One prefix, by its name, its id or the start of that."""

        def look(tenant: Tenant) -> Mapping[str, Any]:
            prefix = find(prefix_id, tenant)
            return describe(prefix, wish_of(prefix), engine.store.sizes())

        return JsonResponse(await run_in_threadpool(look, service.tenant(http)))

    @router.patch("/{prefix_id:path}")
    async def patch(prefix_id: str, body: PrefixChange, http: Request) -> Response:
        """Pins or unpins a prefix, sets its time to live or its priority."""
        tenant = service.tenant(http)
        return JsonResponse(await run_in_threadpool(change, prefix_id, body, tenant))

    @router.delete("/{prefix_id:path}")
    async def remove(prefix_id: str, http: Request) -> Response:
        """Removes a prefix, the turns that continue it, and the segments that only it needs."""
        return JsonResponse(await run_in_threadpool(delete, prefix_id, service.tenant(http)))

    app.include_router(router)


def describe(
    prefix: Prefix, wish: Wish, sizes: Mapping[str, tuple[int, float]]
) -> dict[str, Any]:
    """A prefix as JSON. `bytes` counts whole segments, which others may share; `last_used` in
    seconds since the epoch. `sizes`: see `ChunkStore.sizes`."""
    found = [sizes[span.segment_id] for span in prefix.spans if span.segment_id in sizes]
    return {
        "id": prefix.id,
        "object": "prefix",
        "name": wish.name,
        "begins": wish.begins,
        "bytes": sum(count for count, _ in found),
        "last_used": int(max((used for _, used in found), default=0)),
        "tokens": prefix.num_tokens,
        "chunks": prefix.num_chunks,
        "pinned": wish.pinned,
        "retain_s": wish.retain_s,
        "priority": wish.priority,
    }
