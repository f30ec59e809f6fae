"""What every HTTP request passes before the application sees it: the API key and the limits on its body."""

import asyncio
import hmac
from collections.abc import Mapping
from http import HTTPStatus

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from narrows.server.errors import ClientGone, ErrorResponse, payload
from narrows.server.generate import Limits

OPEN_PATHS = frozenset({"/health", "/ready", "/metrics", "/version"})  # probes and scrapers carry no key
_DRAIN_S = 30.0


class _Refusal(Exception):
    """The answer instead of the application's. With `drain` the rest of the body is read first."""

    def __init__(
        self,
        status: HTTPStatus,
        message: str,
        code: str,
        *,
        type: str = "invalid_request_error",
        headers: Mapping[str, str] | None = None,
        drain: bool = True,
    ) -> None:
        super().__init__(message)
        self.response = ErrorResponse(
            payload(message, type=type, code=code), status, headers={**(headers or {}), "Connection": "close"}
        )
        self.drain = drain


class Guard:
    """ASGI middleware. Reads bodies itself, so that never more of them is kept than `limits` allow."""

    def __init__(self, app: ASGIApp, api_key: str | None, limits: Limits) -> None:
        self._app = app
        self._api_key = api_key
        self._limits = limits
        self._max_unread = max(limits.max_unread_bytes, limits.max_body_bytes)  # else the largest could never come
        self._unread = 0  # bytes of bodies that are still coming

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        try:
            if scope["path"] not in OPEN_PATHS:
                self._check_key(headers)
            content = await self._read(headers, receive)
        except ClientGone:
            return
        except _Refusal as refusal:
            await _refuse(refusal, headers, receive, send)
            return

        pending: list[Message] = [{"type": "http.request", "body": content, "more_body": False}]

        async def replay() -> Message:
            return pending.pop() if pending else await receive()

        await self._app(scope, replay, send)

    def _check_key(self, headers: Headers) -> None:
        if self._api_key is None:
            return
        scheme, _, key = headers.get("authorization", "").partition(" ")
        # Compared in constant time, so that the time taken tells nothing about the key.
        right = hmac.compare_digest(key.strip().encode("latin-1"), self._api_key.encode())
        if scheme.lower() != "bearer" or not right:
            raise _Refusal(
                HTTPStatus.UNAUTHORIZED,
                "the API key is missing or wrong; send it as Authorization: Bearer KEY",
                "invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )

    async def _read(self, headers: Headers, receive: Receive) -> bytes:
        """The whole body. Raises _Refusal as soon as it is known that it will not be read, ClientGone."""
        declared = headers.get("content-length", "")
        if declared.isdecimal() and int(declared) > self._limits.max_body_bytes:
            raise self._too_large()
        content = bytearray()
        try:
            while True:
                message = await self._next(receive)
                piece, more = message.get("body", b""), message.get("more_body", False)
                if len(content) + len(piece) > self._limits.max_body_bytes:
                    raise self._too_large(drain=more)
                if not more:
                    return bytes(content + piece)
                if self._unread + len(piece) > self._max_unread:
                    raise _Refusal(
                        HTTPStatus.SERVICE_UNAVAILABLE,
                        f"bodies of {self._max_unread} bytes in all are on their way already, the most this server "
                        "holds; try again later",
                        "busy_reading",
                        type="server_error",
                        headers={"Retry-After": "1"},
                    )
                content += piece
                self._unread += len(piece)
        finally:
            self._unread -= len(content)

    async def _next(self, receive: Receive) -> Message:
        try:
            async with asyncio.timeout(self._limits.body_timeout_s):
                message = await receive()
        except TimeoutError:
            raise _Refusal(
                HTTPStatus.REQUEST_TIMEOUT,
                f"nothing more of the body came for {self._limits.body_timeout_s:g} seconds",
                "body_timeout",
                drain=False,
            ) from None
        if message["type"] == "http.disconnect":
            raise ClientGone
        return message

    def _too_large(self, *, drain: bool = True) -> _Refusal:
        return _Refusal(
            HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
            f"the body is larger than {self._limits.max_body_bytes} bytes, the most this server reads",
            "body_too_large",
            drain=drain,
        )


async def _refuse(refusal: _Refusal, headers: Headers, receive: Receive, send: Send) -> None:
    """Answer, then read on and drop what still comes, for a while.

    Closing a socket with unread data resets the connection, and the client, still sending, would lose the answer.
    """
    response = refusal.response
    await send({"type": "http.response.start", "status": response.status_code, "headers": response.raw_headers})
    await send({"type": "http.response.body", "body": response.body, "more_body": True})
    # A client that waits for "100 Continue" sends nothing more after this answer.
    if refusal.drain and "100-continue" not in headers.get("expect", "").lower():
        try:
            async with asyncio.timeout(_DRAIN_S):
                while (await receive()).get("more_body", False):
                    pass
        except TimeoutError:
            pass  # it has had its chance
    await send({"type": "http.response.body", "body": b"", "more_body": False})
