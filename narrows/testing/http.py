"""The real server on a real socket, in a thread of the test's own process."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from narrows.runtime.client import Client
from narrows.server.app import create_app
from narrows.server.generate import Limits
from narrows.server.serve import Grace, bind, serve_app
from narrows.server.tokenizer import Tokenizer


@dataclass(slots=True)
class Serving:
    """A running server. `stop` begins its shutdown, as a signal would; leaving `serving` does so too, and waits."""

    url: str
    loop: asyncio.AbstractEventLoop
    stopping: asyncio.Event

    def stop(self) -> None:
        self.loop.call_soon_threadsafe(self.stopping.set)


@contextmanager
def serving(
    client: Client,
    tokenizer: Tokenizer,
    *,
    api_key: str | None = None,
    limits: Limits | None = None,
    grace_s: float = 0.0,
    close_s: float = 5.0,
) -> Iterator[Serving]:
    """Serve `client` on a free port of this machine. Closes neither client nor tokenizer."""
    app = create_app(client, tokenizer, api_key=api_key, limits=limits)
    listener = bind("127.0.0.1", 0)
    started = threading.Event()
    running: list[Serving] = []

    async def main() -> None:
        stop = asyncio.Event()

        def on_listening(url: str) -> None:
            running.append(Serving(url, asyncio.get_running_loop(), stop))
            started.set()

        await serve_app(app, listener, stop, asyncio.Event(), Grace(grace_s, close_s), on_listening)

    thread = threading.Thread(target=lambda: asyncio.run(main()), name="server")
    thread.start()
    try:
        assert started.wait(20), "the server did not start"
        yield running[0]
    finally:
        if running and thread.is_alive():
            running[0].stop()
        thread.join()
