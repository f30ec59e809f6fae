"""One client's connection: uvicorn's, which also answers a client that is done with sending, and drops a silent one.

A client may close its sending side once its request is out (`nc -N` does) and still wait for the answer. To this side
that looks like a client that is gone: both send FIN. Only writing tells them apart, since who is gone answers with a
reset. While no answer has begun, `100 Continue` is written for that: HTTP/1.1 has clients skip it (RFC 9110, 15.2).
"""

import asyncio

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

_FIRST_PROBE_S = 0.1  # each later wait is twice as long, so that a patient client sees few of them


class Connection(H11Protocol):
    """HTTP/1.1 over a socket."""

    head_timeout_s = 30.0  # a connection that has sent no request, or a part of its head, is closed after this silence

    _half_closed = False
    _probe: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._limit_silence()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if (self.cycle is None or self.cycle.response_complete) and self.timeout_keep_alive_task is None:
            self._limit_silence()

    def eof_received(self) -> bool:  # type: ignore[override]
        """Whether the connection stays open for writing: while a request that came in whole has no answer yet."""
        self._half_closed = self._owes_answer()
        if self._half_closed:
            self._ask_whether_gone(_FIRST_PROBE_S)
        return self._half_closed

    def on_response_complete(self) -> None:
        super().on_response_complete()  # begins the next request, if it has come already
        if self._half_closed and not self._owes_answer():
            self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self._probe is not None:
            self._probe.cancel()

    def _owes_answer(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete and not self.cycle.more_body

    def _ask_whether_gone(self, wait_s: float) -> None:
        """Write something that a waiting client skips. The write after the one that was reset ends the connection."""
        if self.transport.is_closing() or not self._owes_answer():
            return
        if not self.cycle.response_started and self.conn.their_http_version == b"1.1":
            self.transport.write(
                self.conn.send(h11.InformationalResponse(status_code=100, headers=[], reason="Continue"))
            )
        self._probe = self.loop.call_later(wait_s, self._ask_whether_gone, 2 * wait_s)

    def _limit_silence(self) -> None:
        """By uvicorn's own timer of idle connections, which it stops at the next byte."""
        if not self.transport.is_closing():
            self.timeout_keep_alive_task = self.loop.call_later(self.head_timeout_s, self.timeout_keep_alive_handler)
