"""Routes of `/v1/prefixes`, which store, list, pin, expire and delete prefixes."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ckv_jax.errors import Cancelled, CkvError, ContextOverflow, DeadlineExceeded
from ckv_jax.server.delivery import Client
from ckv_jax.server.http import ApiError, JsonResponse, client_errors, invalid
from ckv_jax.server.messages import Messages
from ckv_jax.server.schema import Seconds, Strict, Tokens
from ckv_jax.server.service import Service
from ckv_jax.server.tenants import Tenant
from ckv_jax.storage.prefix import MOST_LETTERS, MOST_PRIORITY, Prefix, PrefixRecord
from ckv_jax.storage.tools.inspect import find_prefix


class PrefixChange(Strict):
    """Name and retention of a prefix; fields that are not given stay unchanged."""

    name: Annotated[str, Field(max_length=MOST_LETTERS)] | None = None
    """Name of the prefix; an empty string removes it."""
    pinned: bool | None = None
    """Whether the prefix is protected from eviction."""
    retain_s: Seconds | None = None
    """Time to live in seconds after the last use; null: no limit."""
    priority: Annotated[int, Field(ge=-MOST_PRIORITY, le=MOST_PRIORITY)] | None = None
    """Eviction priority; lower values are evicted first."""

    def applied_to(self, before: PrefixRecord) -> PrefixRecord:
        """Applies these changes to a record. `retain_s: null` removes the time to live."""
        given = self.model_fields_set & {"name", "pinned", "retain_s", "priority"}
        changes = {name: getattr(self, name) for name in given}
        for name in ("name", "pinned", "priority"):
            if changes.get(name, 0) is None:
                del changes[name]
        with client_errors("name", f"one line of at most {MOST_LETTERS} characters"):
            return replace(before, **changes)


class NewPrefix(PrefixChange):
    """`POST /v1/prefixes`: a document, plain text, token ids, or the first messages of a chat."""

    document: Annotated[str, Field(min_length=1)] | None = None
    """Document to store inside the chat template; a chat that begins with it reads its KV."""
    turn: Literal["system", "user"] | None = None
    """Turn of the chat template that contains the document, see `Engine.ingest`."""
    instructions: str = ""
    """Instructions in the system turn, before the document."""
    text: Annotated[str, Field(min_length=1)] | None = None
    """Plain text to store without the template, for completions."""
    tokens: Tokens | None = None
    """Token ids to store unchanged."""
    messages: Messages | None = None
    """First messages of a chat, rendered by the chat template."""

    @model_validator(mode="after")
    def _one(self) -> NewPrefix:
        given = [self.document, self.text, self.tokens, self.messages]
        if sum(value is not None for value in given) != 1:
            raise ValueError("expected one of document, text, tokens and messages")
        if self.document is None and (self.turn is not None or self.instructions):
            raise ValueError("got turn or instructions without a document, expected neither")
        return self


def prefix_routes(service: Service) -> list[Route]:
    """The routes. Each tenant sees its own prefixes alone."""
    engine = service.engine
    ingests = service.ingests

    def store(body: NewPrefix, tenant: Tenant, given_up: threading.Event) -> dict[str, Any]:
        def check(done: int, total: int) -> None:
            """Ends an ingest that is late, or that has no client any more; after each block."""
            if given_up.is_set():
                raise Cancelled("the client has left, or its time limit has passed")

        body.applied_to(PrefixRecord())  # a wrong name is refused before anything is computed
        ingest = partial(engine.ingest, salt=tenant.salt, progress=check)
        if body.document is not None:
            service.parser.check_fits(body.instructions + body.document, "document")
            with client_errors("document"):
                prefix = ingest(body.document, turn=body.turn, instructions=body.instructions)
        elif body.messages is not None:
            prefix = ingest(service.parser.messages_tokens(body.messages))
        elif body.text is not None:
            prefix = ingest(service.parser.encode(body.text, "text"))
        else:
            prefix = ingest(service.parser.encode(body.tokens or [], "tokens"))
        return changed(prefix, body, tenant)

    def changed(prefix: Prefix, body: PrefixChange, tenant: Tenant) -> dict[str, Any]:
        record = body.applied_to(engine.store.record_of(prefix))
        engine.store.set_record(prefix.id, record, salt=tenant.salt)
        return describe(prefix, record, engine.store.sizes(salt=tenant.salt))

    def change(prefix_id: str, body: PrefixChange, tenant: Tenant) -> dict[str, Any]:
        return changed(find(prefix_id, tenant), body, tenant)

    def listed(tenant: Tenant) -> list[dict[str, Any]]:
        sizes, found = engine.store.sizes(salt=tenant.salt), engine.store.prefixes(salt=tenant.salt)
        return [describe(prefix, engine.store.record_of(prefix), sizes) for prefix in found]

    def look(prefix_id: str, tenant: Tenant) -> dict[str, Any]:
        prefix, sizes = find(prefix_id, tenant), engine.store.sizes(salt=tenant.salt)
        return describe(prefix, engine.store.record_of(prefix), sizes)

    def delete(prefix_id: str, tenant: Tenant) -> dict[str, Any]:
        prefix = find(prefix_id, tenant)
        freed = engine.store.delete(prefix)
        if prefix.spans[-1].segment_id in engine.store.sizes(salt=tenant.salt):
            message = "the prefix is in use, or a pinned prefix continues it; it was not deleted"
            raise ApiError(409, message, code="in_use", retry_s=1)
        with suppress(CkvError, ValueError):  # of another model, or of an engine that ends
            engine.demote(prefix)  # its packs leave memory, too
        return {"id": prefix.id, "object": "prefix", "deleted": True, "bytes": freed}

    def find(name: str, tenant: Tenant) -> Prefix:
        with client_errors("id"):  # of several with this name it lists the ids
            prefix = find_prefix(engine.store, name, salt=tenant.salt)
        if len(name) < 8 and engine.store.record_of(prefix).name != name:
            raise invalid("expected a prefix's name, or at least 8 digits of its id", param="id")
        return prefix

    async def post(http: Request) -> Response:
        """Stores a prefix and answers when it is stored, or 503 at the time limit of an answer. A
        prefix that is stored already costs nothing. The ingest ends if the client disconnects."""
        tenant = service.tenant(http)
        body = await service.bodies.parse(http, NewPrefix, tenant.name)

        async def deliver(client: Client) -> None:
            with service.limiter.admit(tenant, 1):
                try:
                    async with asyncio.timeout(service.config.request_s):
                        stored = await ingests.run(tenant, partial(store, body, tenant))
                except TimeoutError as error:
                    raise DeadlineExceeded("the prefix was not stored in time") from error
                except ContextOverflow as error:
                    names = ("document", "messages", "text", "tokens")
                    field = next(name for name in names if getattr(body, name) is not None)
                    code = "context_length_exceeded"
                    raise invalid(str(error), param=field, code=code) from error
            await client.whole(stored, status=201)

        return service.delivery(http, deliver)

    async def get(http: Request) -> Response:
        """Lists the stored prefixes that no other continues."""
        data = await run_in_threadpool(listed, service.tenant(http))
        return JsonResponse({"object": "list", "data": data})

    async def one(http: Request) -> Response:
        """Describes one prefix, by its name, its id or the start of its id."""
        tenant = service.tenant(http)
        return JsonResponse(await run_in_threadpool(look, http.path_params["id"], tenant))

    async def patch(http: Request) -> Response:
        """Names, pins or unpins a prefix, sets its time to live or its priority."""
        tenant = service.tenant(http)
        body = await service.bodies.parse(http, PrefixChange, tenant.name)
        return JsonResponse(await run_in_threadpool(change, http.path_params["id"], body, tenant))

    async def remove(http: Request) -> Response:
        """Deletes a prefix, the turns that continue it, and the segments that only it needs."""
        tenant = service.tenant(http)
        return JsonResponse(await run_in_threadpool(delete, http.path_params["id"], tenant))

    return [
        Route("/v1/prefixes", post, methods=["POST"]),
        Route("/v1/prefixes", get, methods=["GET"]),
        Route("/v1/prefixes/{id:path}", one, methods=["GET"]),
        Route("/v1/prefixes/{id:path}", patch, methods=["PATCH"]),
        Route("/v1/prefixes/{id:path}", remove, methods=["DELETE"]),
    ]


def describe(
    prefix: Prefix, record: PrefixRecord, sizes: Mapping[str, tuple[int, float]]
) -> dict[str, Any]:
    """A prefix as JSON. `bytes` counts whole segments, which others may share; `last_used` in
    seconds since the epoch. `sizes`: see `ChunkStore.sizes`."""
    found = [sizes[span.segment_id] for span in prefix.spans if span.segment_id in sizes]
    return {
        "id": prefix.id,
        "object": "prefix",
        "name": record.name,
        "begins": record.begins,
        "bytes": sum(count for count, _ in found),
        "last_used": int(max((used for _, used in found), default=0)),
        "tokens": prefix.num_tokens,
        "chunks": prefix.num_chunks,
        "pinned": record.pinned,
        "retain_s": record.retain_s,
        "priority": record.priority,
    }
