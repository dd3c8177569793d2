"""The service behind the HTTP routes: admits, parses and answers requests; starts and stops."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from opentelemetry import trace
from opentelemetry.trace import TracerProvider
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response

from ckv_jax import request as engine_request
from ckv_jax.answer import citations_json
from ckv_jax.engine import Engine
from ckv_jax.errors import CkvError, DeadlineExceeded
from ckv_jax.fidelity import abudget_for, fidelity_of
from ckv_jax.fidelity import load as load_calibration
from ckv_jax.model.sampling import Logprobs, SamplingParams
from ckv_jax.request import Generation, TokenEvent
from ckv_jax.server.adapters import (
    Conversations,
    MessagesFormat,
    MessagesRequest,
    ResponsesFormat,
    ResponsesRequest,
)
from ckv_jax.server.bodies import Bodies, Limits, validated
from ckv_jax.server.config import MOST_GENERATIONS, ServerConfig
from ckv_jax.server.delivery import Client, Delivery, send_stream, send_whole
from ckv_jax.server.formats import ChatFormat, CompletionFormat, ResponseFormat
from ckv_jax.server.http import client_errors
from ckv_jax.server.observability import Metrics, RequestObserver, log_event
from ckv_jax.server.parser import ParsedRequest, RequestParser
from ckv_jax.server.schema import ChatRequest, CompletionRequest
from ckv_jax.server.tenants import INGEST_THREADS, FairPool, RequestLimiter, Tenant, Tenants, after
from ckv_jax.server.write_behind import PendingPrompt, Sharing, Turns, WriteBehind
from ckv_jax.serving.streams import AsyncTokenStream
from ckv_jax.storage.prefix import PrefixRecord

LEAST_ITEMS = 4096
"""Of lists in bodies, however small the context is."""
_LAST_S = 0.75  # for the last events of streams, and again for errors in their place
_MOST_IGNORED = 100
_WARM_BATCH = 2
_WARM_SUFFIX = 64
_WARM_ANSWER = 64
_WARM_RETAIN_S = 3600.0  # the made-up prefix of a process that dies meanwhile expires after it


class Service:
    """State and operations shared by the routes of one application. Used in one event loop.

    `close` it before the engine. Raises `ValueError` for an engine that cannot generate text, or
    whose context has no room for `config.warm_tokens`.
    """

    def __init__(
        self,
        engine: Engine,
        config: ServerConfig,
        tenants: Tenants,
        tracing: TracerProvider | None = None,
    ) -> None:
        if engine.tokenizer is None:
            raise ValueError("got an engine without a tokenizer, expected one that reads text")
        if not engine.system.own.generates or engine.system.computes_all:
            raise ValueError(
                f"got system {engine.system.name!r}, which computes first tokens only; expected "
                "one that generates, such as ckv"
            )
        limit = engine.model_config.max_position_embeddings
        most = limit - _WARM_SUFFIX - _WARM_ANSWER
        if config.warm_tokens and config.warm_tokens > most:
            raise ValueError(
                f"got warm_tokens={config.warm_tokens}, expected at most {most}: this model's "
                f"context has room for {limit} tokens"
            )
        served = (config.budget, config.sparse_budget)
        calibration = load_calibration(engine)
        if calibration is None and any(fidelity_of(budget) is not None for budget in served):
            raise ValueError(
                "got a fidelity as budget without a calibration: run `ckv calibrate` first"
            )
        longest = engine.tokenizer.bounds.max_bytes
        self.engine = engine
        self.config = config
        self.started = int(time.time())
        self.limiter = RequestLimiter(config.max_requests, tenants.share(config.max_requests))
        self.ingests = FairPool("ckv-ingest", INGEST_THREADS, tenants.share(INGEST_THREADS))
        self._grammars = FairPool("ckv-grammars", 2, tenants.share(2))
        self.bodies = Bodies(
            Limits(
                max_bytes=config.max_body_bytes,
                items=max(limit, LEAST_ITEMS),
                text_bytes=longest and longest * limit,
            ),
            config.body_s,
            share=tenants.share(2) / 2,
        )
        self._citing = ThreadPoolExecutor(2, thread_name_prefix="ckv-citations")
        self.scrapes = ThreadPoolExecutor(1, thread_name_prefix="ckv-metrics")
        self.parser = RequestParser(engine, config)
        self.write_behind = WriteBehind(engine, config, tenants.share(config.write_behind_bytes))
        self.metrics = Metrics(engine, self.limiter, self.write_behind)
        self._tenants = tenants
        self._tracer = trace.get_tracer("ckv_jax", tracer_provider=tracing)
        self.sharing = Sharing(config.turn_tokens, self.parser.stored)
        self._streams: set[AsyncTokenStream] = set()
        self._conversations = Conversations()
        self._ending = asyncio.Event()
        self._ignored: set[str] = set()
        self._end_at: float | None = None
        self._warm_up = threading.Thread(
            target=warm_up, args=(engine, config), name="ckv-warm-up", daemon=True
        )
        if config.warm_tokens:
            self._warm_up.start()

    @property
    def warming(self) -> bool:
        """Whether the programs of first requests are being compiled."""
        return self._warm_up.is_alive()

    def wait_warm(self) -> None:
        if self.warming:
            self._warm_up.join()

    def tenant(self, http: Request) -> Tenant:
        """The tenant of a request, also noted in its log line. Raises `ApiError` 401."""
        tenant = self._tenants.of(http.headers)
        http.state.record.fields["tenant"] = tenant.name
        return tenant

    async def answer(
        self, http: Request, kind: type[ChatRequest] | type[CompletionRequest]
    ) -> Response:
        tenant = self.tenant(http)
        prompts = 1 if kind is ChatRequest else MOST_GENERATIONS
        body = await self.bodies.parse(http, kind, tenant.name, prompts=prompts)
        return self._respond(http, tenant, body)

    async def respond(self, http: Request) -> Response:
        """Generates the next message of a chat, in the format of OpenAI's responses API."""
        tenant = self.tenant(http)
        body = await self.bodies.parse(http, ResponsesRequest, tenant.name)
        history = self._conversations.of(tenant.salt, body.previous_response_id)
        chat = await run_in_threadpool(as_chat, partial(body.chat, history), "input")

        def ended(form: ResponseFormat) -> None:
            if body.store is not False and isinstance(form, ResponsesFormat):
                said = [*history, *body.messages(), form.message]
                self._conversations.keep(tenant.salt, form.id, said)

        key = http.scope.get("prefix_key", "")
        form = partial(ResponsesFormat, engine=self.engine, body=body, key=key)
        return self._respond(http, tenant, chat, form, ended)

    async def message(self, http: Request) -> Response:
        """Generates the next message of a chat, in the format of Anthropic's messages API."""
        tenant = self.tenant(http)
        body = await self.bodies.parse(http, MessagesRequest, tenant.name)
        chat = await run_in_threadpool(as_chat, body.chat, "messages")
        return self._respond(
            http, tenant, chat, lambda request: MessagesFormat(request, self.engine, body)
        )

    def _respond(
        self,
        http: Request,
        tenant: Tenant,
        body: ChatRequest | CompletionRequest,
        form_of: Callable[[ParsedRequest], ResponseFormat] | None = None,
        ended: Callable[[ResponseFormat], None] = lambda _: None,
    ) -> Response:
        """The response to a parsed body, in the form of its endpoint; `ended` is called at its
        end."""
        self.parser.check(body)
        self._note_ignored(body)

        async def deliver(client: Client) -> None:
            with self.limiter.admit(tenant, body.num_generations):
                request = await self._parse(body, tenant)
                request = await self._settled(await self.sharing.wait(request))
                client.headers = [(b"x-ckv-budget", request.budgets.encode())]
                form: ResponseFormat
                if form_of is not None:
                    form = form_of(request)
                elif isinstance(body, ChatRequest):
                    form = ChatFormat(request, self.engine)
                else:
                    form = await self._completion_format(request)
                send = send_stream if body.stream else send_whole
                observer = RequestObserver(http, metrics=self.metrics, tracer=self._tracer)
                with (
                    observer.reporting(request),
                    self.write_behind.turns(request) as turns,
                    ExitStack() as computing,
                ):
                    prompts = {
                        index: computing.enter_context(
                            self.sharing.computing(
                                tenant.salt, request.prompts[index // request.choices].tokens
                            )
                        )
                        for index, keep in enumerate(turns.keep_kv)
                        if keep
                    }
                    async with self._events(request, observer, turns, prompts) as events:
                        generations = await send(events, request, form, client)
                    ended(form)
                    for index, written in self.write_behind.submit(turns, generations).items():
                        tokens = generations[index].completion().tokens
                        self.sharing.writing(tenant.salt, tokens, written)

        return self.delivery(http, deliver)

    async def _parse(self, body: ChatRequest | CompletionRequest, tenant: Tenant) -> ParsedRequest:
        """A body in the engine's terms. Grammars, which may take seconds, hold up no others."""
        calls = isinstance(body, ChatRequest) and body.has_to_call
        if not calls and body.grammar is None:
            return await run_in_threadpool(self.parser.parse, body, tenant)
        return await self._grammars.run(tenant, lambda _: self.parser.parse(body, tenant))

    async def _settled(self, request: ParsedRequest) -> ParsedRequest:
        """The request with the budget that the fidelity it asks for takes for each prompt."""
        if (target := request.target) is None:
            return request
        prompts = list(request.prompts)
        try:
            async with asyncio.timeout(request.request_s):
                for i, prompt in enumerate(prompts):
                    if prefix := prompt.prefix.num_tokens:
                        found = await abudget_for(
                            self.engine, prompt.prefix, prompt.tokens[prefix:], target
                        )
                        prompts[i] = replace(prompt, budget=found.budget, settled=found)
        except TimeoutError as error:
            raise DeadlineExceeded("no budget was settled in time") from error
        return replace(request, prompts=prompts)

    def _note_ignored(self, body: ChatRequest | CompletionRequest) -> None:
        """Logs each field that has no effect once, as far as there are not too many of them."""
        for name in body.unknown:
            if len(self._ignored) == _MOST_IGNORED:
                return
            if name not in self._ignored:
                self._ignored.add(name)
                log_event("field_ignored", field=name)

    async def _completion_format(self, request: ParsedRequest) -> CompletionFormat:
        """With the prompts that the request wants to see, and how likely their tokens are."""
        form = CompletionFormat(request, self.engine)
        if request.echo:
            scores: list[list[Logprobs]] | None = None
            if (top := request.sampling[0].logprobs) is not None:
                try:
                    async with asyncio.timeout(request.request_s):
                        scores = [
                            await asyncio.wrap_future(self.engine.score(prompt.tokens, top=top))
                            for prompt in request.prompts
                        ]
                except TimeoutError as error:
                    raise DeadlineExceeded("the prompt was not computed in time") from error
            await run_in_threadpool(form.echo, scores)
        return form

    def delivery(self, http: Request, deliver: Callable[[Client], Awaitable[None]]) -> Response:
        """A response that runs `deliver` until it ends or the client is gone."""

        def undelivered(reason: str) -> None:
            http.state.record.undelivered = reason

        return Delivery(
            deliver, undelivered=undelivered, send_s=self.config.send_s, ending=self._ending
        )

    @asynccontextmanager
    async def _events(
        self,
        request: ParsedRequest,
        observer: RequestObserver,
        turns: Turns,
        prompts: Mapping[int, PendingPrompt],
    ) -> AsyncIterator[AsyncIterator[TokenEvent]]:
        """The engine's events of a request; leaving the context early cancels its generations."""
        loop = asyncio.get_running_loop()

        def share(prompt: PendingPrompt, generation: Generation) -> None:
            """In the engine thread."""
            written = self.write_behind.submit_prompt(request, generation)
            after(written, prompt.stored.set, loop)

        async def marked(events: AsyncIterator[TokenEvent]) -> AsyncIterator[TokenEvent]:
            async for event in events:
                if (prompt := prompts.get(event.index)) is not None:
                    prompt.computed.set()
                yield event

        stream = self.engine.agenerate(
            request.engine_requests(),
            request.sampling,
            keep_kv=turns.keep_kv,
        )
        observer.submitted(request)  # before the engine's thread gets on with it
        async with stream:
            self._streams.add(stream)
            try:
                for index, prompt in prompts.items():
                    prompt.can_share(partial(stream.share, index, partial(share, prompt)))
                events = marked(observer.observe(stream))
                yield self._cited(request, events) if request.citations else events
            finally:
                self._streams.remove(stream)

    async def _cited(
        self, request: ParsedRequest, events: AsyncIterator[TokenEvent]
    ) -> AsyncIterator[TokenEvent]:
        """The same events; the citations of a generation are found before its last one."""
        async for event in events:
            ended = event.generation
            if ended is not None and ended.error is None:
                cite = partial(self.engine.citations, ended, most=request.citations)
                loop = asyncio.get_running_loop()
                try:
                    found = await loop.run_in_executor(self._citing, cite)
                except CkvError as error:  # the answer is complete without them
                    log_event("not_cited", why=type(error).__name__)
                else:
                    request.cited[event.index] = citations_json(found)
            yield event

    async def drain(self) -> None:
        """Refuses new requests, and waits for those in progress and for what is written after them.

        Waits `drain_s` at most; `close` has what is left of that.
        """
        self.limiter.closed = True
        self._end_at = time.monotonic() + self.config.drain_s
        try:
            async with asyncio.timeout(self._left_s):
                await self.limiter.idle()
            written = await asyncio.to_thread(self.write_behind.flush, self._left_s)
        except TimeoutError:
            written = False
        if not written:
            log_event("drain_over", left=self.limiter.under_way)
            await self._end_answers()

    async def _end_answers(self) -> None:
        """Ends what is in progress: generations with what they have, others with an error."""
        for stream in self._streams:
            stream.cancel()
        for _ in range(2):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LAST_S):
                    await self.limiter.idle()
            self._ending.set()

    def give_up(self) -> None:
        """Makes `drain` and `close` return as soon as they can."""
        self._end_at = time.monotonic()
        self.write_behind.give_up()

    def close(self) -> None:
        """Ends the write-behind thread: the running write ends within what is left of `drain_s`,
        those that wait are dropped."""
        for pool in (self.scrapes, self._citing):
            pool.shutdown(wait=False, cancel_futures=True)
        self.ingests.close()
        self._grammars.close()
        self.bodies.close()
        self.write_behind.close(self._left_s)

    @property
    def _left_s(self) -> float:
        """Seconds that are left of `drain_s`."""
        if self._end_at is None:
            return self.config.drain_s
        return max(0.0, self._end_at - time.monotonic())


def as_chat(made: Callable[[], dict[str, Any]], field: str) -> ChatRequest:
    """A request of another API as one of chats. Raises `ApiError`."""
    with client_errors(field):
        return validated(ChatRequest, made())


def warm_up(engine: Engine, config: ServerConfig) -> None:
    """Compiles the programs that first requests need, before they arrive.

    Answers made-up prompts of `config.warm_tokens` tokens, new and stored, up to two at once, at
    any budget. They are stored for a tenant of their own, and removed afterwards. A
    failure is logged, and the server serves all the same.
    """
    began, salt = time.monotonic(), f"warm-up {secrets.token_hex(16)}"
    tokens = (np.arange(config.warm_tokens + 1) % engine.model_config.vocab_size).tolist()
    request = engine_request.Request(prefix=tokens[:-1], suffix=tokens[-1:], budget=1.0, salt=salt)
    try:
        sampling = SamplingParams(max_tokens=2, temperature=1.0)
        stream = engine.generate(request, sampling, keep_kv=True)
        prefix = engine.append(stream.results()[0])
        try:
            engine.store.set_record(prefix.id, PrefixRecord(retain_s=_WARM_RETAIN_S), salt=salt)
            engine.warmup(
                prefix,
                max_batch=_WARM_BATCH,
                max_suffix=_WARM_SUFFIX,
                max_tokens=_WARM_ANSWER,
            )
        finally:
            engine.store.delete(prefix)
    except (CkvError, OSError, ValueError) as error:
        log_event("not_warmed", why=type(error).__name__)
    else:
        log_event("warmed", seconds=round(time.monotonic() - began, 1))
