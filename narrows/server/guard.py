"""What every HTTP request passes before the application sees it: the API key and the limit on its body."""

import asyncio
import hmac
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from narrows.server.errors import ClientGone, ErrorResponse, payload

OPEN_PATHS = frozenset({"/health", "/ready", "/metrics", "/version"})  # probes and scrapers carry no key
_DRAIN_S = 30.0


class Guard:
    """ASGI middleware. Reads the body itself, so that no more than `max_body_bytes` of it is ever kept."""

    def __init__(self, app: ASGIApp, api_key: str | None, max_body_bytes: int) -> None:
        self._app = app
        self._api_key = api_key
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        if scope["path"] not in OPEN_PATHS and not self._has_key(headers):
            body = payload(
                "the API key is missing or wrong; send it as Authorization: Bearer KEY", code="invalid_api_key"
            )
            await _refuse(HTTPStatus.UNAUTHORIZED, body, {"WWW-Authenticate": "Bearer"}, scope, receive, send)
            return
        try:
            content = await self._read(headers, receive)
        except ClientGone:
            return
        if content is None:
            body = payload(
                f"the body is larger than {self._max_body_bytes} bytes, the most this server reads",
                code="body_too_large",
            )
            await _refuse(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, body, {}, scope, receive, send)
            return

        pending: list[Message] = [{"type": "http.request", "body": content, "more_body": False}]

        async def replay() -> Message:
            return pending.pop() if pending else await receive()

        await self._app(scope, replay, send)

    def _has_key(self, headers: Headers) -> bool:
        if self._api_key is None:
            return True
        scheme, _, key = headers.get("authorization", "").partition(" ")
        # Compared in constant time, so that the time taken tells nothing about the key.
        return scheme.lower() == "bearer" and hmac.compare_digest(key.strip().encode("latin-1"), self._api_key.encode())

    async def _read(self, headers: Headers, receive: Receive) -> bytes | None:
        """The whole body, or None as soon as it is known to be too large."""
        declared = headers.get("content-length", "")
        if declared.isdecimal() and int(declared) > self._max_body_bytes:
            return None
        content = bytearray()
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            content += message.get("body", b"")
            if len(content) > self._max_body_bytes:
                return None
            if not message.get("more_body", False):
                return bytes(content)


async def _refuse(
    status: HTTPStatus,
    body: Mapping[str, Any],
    headers: Mapping[str, str],
    scope: Scope,
    receive: Receive,
    send: Send,
) -> None:
    """Answer, then read on and drop what still comes, for a while.

    Closing a socket with unread data resets the connection, and the client, still sending, would lose the answer.
    """
    response = ErrorResponse(body, status, headers={**headers, "Connection": "close"})
    await send({"type": "http.response.start", "status": response.status_code, "headers": response.raw_headers})
    await send({"type": "http.response.body", "body": response.body, "more_body": True})
    # A client that waits for "100 Continue" sends nothing more after this answer.
    if "100-continue" not in Headers(scope=scope).get("expect", "").lower():
        try:
            async with asyncio.timeout(_DRAIN_S):
                while (await receive()).get("more_body", False):
                    pass
        except TimeoutError:
            pass  # it has had its chance
    await send({"type": "http.response.body", "body": b"", "more_body": False})
