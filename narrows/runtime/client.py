"""What a front end (HTTP server, offline batches, command line) talks to: submit a request, receive its outputs.

No torch, no sockets, no HTTP in here. `runtime.launch_local` gives the implementation with real processes,
`testing` one that lives in memory.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from typing import Protocol

from narrows.core.ids import RequestId
from narrows.core.request import FinishReason, Request, SampledToken


@dataclass(frozen=True, slots=True)
class Output:
    """News of one request: tokens in order, and at the end exactly one output with a finish_reason.

    That last one may carry tokens too. `error` is set exactly when finish_reason is ERROR.
    """

    request: RequestId
    tokens: tuple[SampledToken, ...] = ()
    finish_reason: FinishReason | None = None
    cached_tokens: int = 0  # prompt tokens taken from a prefix cache; known from the first token on
    error: str | None = None


Sink = Callable[[Output], None]


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What a front end must know of the model."""

    name: str  # as clients call it
    folder: str  # holds tokenizer.json and tokenizer_config.json
    max_model_len: int  # prompt and output tokens of one request together, at most
    vocab_size: int


@dataclass(frozen=True, slots=True)
class InstanceStatus:
    """One instance as the coordinator sees it."""

    id: str
    role: str
    ready: bool
    running: int
    waiting: int
    used_pages: int
    num_pages: int
    restarts: int = 0


@dataclass(frozen=True, slots=True)
class Status:
    """The whole cluster. `ready`: at least one instance of each role can serve."""

    ready: bool
    queued: int
    instances: tuple[InstanceStatus, ...]
    reason: str = ""  # why not ready


class Client(Protocol):
    """Thread-safe. Every submitted request's sink gets exactly one Output with a finish_reason, whatever happens."""

    model: ServedModel

    def submit(self, request: Request, sink: Sink) -> None:
        """Hand a request in. Calls `sink` from another thread for each output; it must not block.

        Raises RequestError (prompt empty or too long, token outside the vocabulary), QueueFull, Unavailable: then the
        sink is never called.
        """
        ...

    def abort(self, request: RequestId, reason: FinishReason = FinishReason.ABORT) -> None:
        """Take a request back, or end it early because a stop string was found (reason STOP): it ends with `reason`
        unless it has ended already. Unknown ids are ignored."""
        ...

    def status(self) -> Status: ...

    def metrics(self) -> str:
        """The metrics page in Prometheus' text format."""
        ...

    def close(self) -> None:
        """End every request with ABORT, stop every process. Idempotent."""
        ...


async def stream(client: Client, *requests: Request) -> AsyncGenerator[Output, None]:
    """Submit requests and yield their outputs as they come, up to and including the last of each.

    All are submitted or none: when one is refused the others are aborted and its error is raised. Leaving the
    iterator early aborts what has not ended.
    """
    loop = asyncio.get_running_loop()
    outputs: asyncio.Queue[Output] = asyncio.Queue()
    unfinished: set[RequestId] = set()
    try:
        for request in requests:
            client.submit(request, lambda output: _hand_over(loop, outputs, output))
            unfinished.add(request.id)
        while unfinished:
            output = await outputs.get()
            if output.finish_reason is not None:
                unfinished.discard(output.request)
            yield output
    finally:
        for id in unfinished:
            client.abort(id)


def _hand_over(loop: asyncio.AbstractEventLoop, outputs: asyncio.Queue[Output], output: Output) -> None:
    if not loop.is_closed():
        loop.call_soon_threadsafe(outputs.put_nowait, output)
