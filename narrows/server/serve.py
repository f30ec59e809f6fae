"""A listening socket, and the application on it until a signal comes.

signal -> no new connections -> up to grace_s for what is open -> ABORT for the rest, whose streams end properly
       -> up to close_s for that to reach the clients -> connections are cut
a second signal cuts at once
"""

import asyncio
import contextlib
import errno
import signal
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FrameType

import uvicorn
from fastapi import FastAPI

from narrows.errors import ConfigError
from narrows.runtime.client import Client
from narrows.server.app import create_app
from narrows.server.connection import Connection
from narrows.server.generate import Engine, Limits
from narrows.server.tokenizer import Tokenizer

_BACKLOG = 2048
_WATCH_S = 0.5


@dataclass(frozen=True, slots=True)
class Grace:
    """Seconds of the picture above."""

    grace_s: float = 5.0
    close_s: float = 5.0


def bind(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 takes any free one. From here on no other server can have the address.

    Raises ConfigError when the address is in use, not ours or not an address.
    """
    if not 0 <= port <= 65535:
        raise ConfigError(f"port: {port} is not a port; use 0 (any free one) to 65535")
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"host: {host!r} is not an address of this machine: {error}") from error
    listener = socket.socket(family, kind)
    try:
        # Without this a server could not be restarted while old connections linger.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise _unusable(host, port, error) from error
    return listener


def _unusable(host: str, port: int, error: OSError) -> ConfigError:
    """Why an address can not be listened on, and which of the two settings mends it."""
    match error.errno:
        case errno.EADDRINUSE:
            return ConfigError(f"port: {port} on {host} is in use by another program; use another --port")
        case errno.EADDRNOTAVAIL:
            return ConfigError(
                f"host: {host} is not an address of this machine; use --host 127.0.0.1 for this machine alone or "
                "--host 0.0.0.0 for all its addresses"
            )
        case errno.EACCES:
            return ConfigError(f"port: {port} on {host} is not allowed to this user; use a --port from 1024 on")
        case _:
            return ConfigError(f"host: can not listen on {host}:{port}: {error.strerror}; use another --host or --port")


def url_of(listener: socket.socket) -> str:
    """Where clients of this machine find it."""
    host, port = listener.getsockname()[:2]
    if host in ("0.0.0.0", "::"):
        host = "127.0.0.1" if host == "0.0.0.0" else "::1"
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def serve(
    client: Client,
    tokenizer: Tokenizer,
    listener: socket.socket,
    *,
    api_key: str | None = None,
    limits: Limits | None = None,
    grace: Grace = Grace(),
    on_listening: Callable[[str], None] | None = None,
    on_hangup: Callable[[], None] | None = None,
    until: Callable[[], str] | None = None,
) -> str:
    """Serve until SIGINT or SIGTERM, then end within grace_s + close_s. Blocks; call it in the main thread.

    `on_listening` hears the address once requests are answered, `on_hangup` each SIGHUP. `until` is asked twice a
    second, must not block, and ends the serving, as the first signal does, when it gives a reason; that is returned,
    else "". Closes `listener`, not `client`. Raises ConfigError for an API key that no client could send.
    """
    app = create_app(client, tokenizer, api_key=api_key, limits=limits)

    async def main() -> str:
        stop, cut = asyncio.Event(), asyncio.Event()

        def on_signal() -> None:
            (cut if stop.is_set() else stop).set()

        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, on_signal)
        if on_hangup is not None:
            asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, on_hangup)
        watching = asyncio.create_task(_watch(until, stop)) if until else None
        await serve_app(app, listener, stop, cut, grace, on_listening)
        if watching is None:
            return ""
        watching.cancel()
        return watching.result() if watching.done() else ""

    return asyncio.run(main())


async def _watch(until: Callable[[], str], stop: asyncio.Event) -> str:
    """Set `stop` as soon as `until` gives a reason, which is returned."""
    while not (reason := until()):
        await asyncio.sleep(_WATCH_S)
    stop.set()
    return reason


async def serve_app(
    app: FastAPI,
    listener: socket.socket,
    stop: asyncio.Event,
    cut: asyncio.Event,
    grace: Grace,
    on_listening: Callable[[str], None] | None = None,
) -> None:
    """Serve `create_app`'s application in a running loop until `stop` is set; `cut` ends the waiting after it."""
    engine: Engine = app.state.engine
    server = _Server(
        # No log_config: what it logs goes where all else goes. Connection is built on h11, so that is what is used.
        uvicorn.Config(app, http=Connection, log_config=None, log_level="warning", access_log=False, lifespan="off"),
        on_started=lambda: on_listening(url_of(listener)) if on_listening else None,
    )
    running = asyncio.create_task(server.serve(sockets=[listener]))
    if await _first(stop, running, None):
        server.should_exit = True
        await _first(cut, running, grace.grace_s)
        engine.close()
        if not cut.is_set():
            await _first(cut, running, grace.close_s)
        server.cut()
    await running


async def _first(event: asyncio.Event, task: asyncio.Task[None], timeout_s: float | None) -> bool:
    """Wait for either, or the time; whether the event is set."""
    waiting = asyncio.create_task(event.wait())
    try:
        await asyncio.wait({waiting, task}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        waiting.cancel()
    return event.is_set()


class _Server(uvicorn.Server):
    """Leaves signals to us: uvicorn would raise them again when it is done, before the engine is closed."""

    def __init__(self, config: uvicorn.Config, on_started: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_started = on_started

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        raise AssertionError("signals are not uvicorn's here")

    def cut(self) -> None:
        """End what has not ended: connections that do not take their answer or never finish their question."""
        for task in tuple(self.server_state.tasks):
            task.cancel()
        for connection in tuple(self.server_state.connections):
            connection.transport.abort()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_started()
