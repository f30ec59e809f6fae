"""Runs a call and answers it, whole or as a stream, as long as the client is there."""

import asyncio
import time
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

from fastapi.requests import Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from narrows.core.request import FinishReason
from narrows.errors import NarrowsError, Unavailable
from narrows.server.answers import DONE, Json, Shape, Tally, event
from narrows.server.errors import ClientGone, payload_of
from narrows.server.generate import Call, Engine, Update
from narrows.server.stream import PlacedToken

T = TypeVar("T")


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`; when the client disconnects first, `work` is cancelled and ClientGone raised.

    The request's body must have been read.
    """
    working = asyncio.create_task(work)
    watching = asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientGone
    finally:
        working.cancel()
        watching.cancel()
        await asyncio.wait({working, watching})


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def respond(
    http: Request, engine: Engine, call: Call, shape: Shape, *, streamed: bool, include_usage: bool
) -> Response:
    """The answer to a checked call. Errors before the first token are raised, so that they get their HTTP status."""
    head = {"id": call.id, "object": shape.object, "created": int(time.time()), "model": engine.client.model.name}
    headers = {"X-Request-Id": call.id}
    updates = engine.run(call)
    if not streamed:
        body = await unless_gone(http.receive, _whole(updates, call, shape, head))
        return JSONResponse(body, headers=headers)
    first = await unless_gone(http.receive, _first(updates))
    head["object"] = shape.chunk_object
    return EventStream(_events(first, updates, call, shape, head, include_usage), updates, headers)


async def _first(updates: AsyncGenerator[Update, None]) -> Update:
    update = await anext(updates)
    try:
        _check_not_cut(update)
    except Unavailable:
        await updates.aclose()
        raise
    return update


def _check_not_cut(update: Update) -> None:
    """A request that ends in ABORT while its client is there was taken back by the server's end."""
    if update.piece.finish_reason is FinishReason.ABORT:
        raise Unavailable("the server is shutting down; the answer was not finished")


async def _whole(updates: AsyncGenerator[Update, None], call: Call, shape: Shape, head: Json) -> Json:
    num_choices = len(call.prompts) * call.num_choices
    texts: list[list[str]] = [[] for _ in range(num_choices)]
    tokens: list[list[PlacedToken]] = [[] for _ in range(num_choices)]
    reasons: dict[int, FinishReason] = {}
    tally = Tally(call)
    async with aclosing(updates):
        async for update in updates:
            tally.add(update)
            texts[update.index].append(update.piece.text)
            tokens[update.index].extend(update.piece.tokens)
            _check_not_cut(update)
            if update.piece.finish_reason is not None:
                reasons[update.index] = update.piece.finish_reason
    choices = [
        shape.choice(index, "".join(texts[index]), tokens[index], reasons[index]) for index in range(num_choices)
    ]
    return head | {"choices": choices, "usage": tally.usage()}


async def _events(
    first: Update,
    updates: AsyncGenerator[Update, None],
    call: Call,
    shape: Shape,
    head: Json,
    include_usage: bool,
) -> AsyncGenerator[bytes, None]:
    """One event for each piece of news, an error event when the rest can not come, and always the end mark."""
    unused: Json = {"usage": None} if include_usage else {}

    def chunk(choice: Json) -> bytes:
        return event(head | {"choices": [choice]} | unused)

    tally = Tally(call)
    for choice in shape.first_chunks(len(call.prompts) * call.num_choices):
        yield chunk(choice)
    try:
        update: Update | None = first
        while update is not None:
            tally.add(update)
            _check_not_cut(update)
            for choice in shape.chunks(update.index, update.piece):
                yield chunk(choice)
            update = await anext(updates, None)
        if include_usage:
            yield event(head | {"choices": [], "usage": tally.usage()})
    except NarrowsError as error:
        yield event(payload_of(error))
    yield DONE


class EventStream(StreamingResponse):
    """Sends events as they come; closes `source`, and with it the requests, when done or when the client goes."""

    media_type = "text/event-stream"

    def __init__(
        self, events: AsyncGenerator[bytes, None], source: AsyncGenerator[Update, None], headers: dict[str, str]
    ) -> None:
        # nginx and its like would otherwise collect events before passing them on.
        super().__init__(events, headers=headers | {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        self._events = events
        self._source = source

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._source), aclosing(self._events):
            try:
                await unless_gone(receive, self.stream_response(send))
            except ClientGone:
                return  # nobody is left to answer
