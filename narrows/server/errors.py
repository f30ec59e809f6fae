"""Every error in OpenAI's shape: {"error": {"message", "type", "param", "code"}}."""

import json
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException

from narrows.errors import NarrowsError, QueueFull, RequestError, Unavailable


class ModelNotFound(NarrowsError):
    """The request names a model that is not served here (HTTP 404)."""


class ContextExceeded(RequestError):
    """Prompt and output together do not fit the model (HTTP 400)."""


class GenerationFailed(NarrowsError):
    """The engine could not finish a request (HTTP 500)."""


class ClientGone(Exception):
    """The other side closed the connection: there is nobody to answer."""


def status_of(error: NarrowsError) -> HTTPStatus:
    """The HTTP status an error is answered with."""
    match error:
        case RequestError():
            return HTTPStatus.BAD_REQUEST
        case ModelNotFound():
            return HTTPStatus.NOT_FOUND
        case QueueFull():
            return HTTPStatus.TOO_MANY_REQUESTS
        case Unavailable():
            return HTTPStatus.SERVICE_UNAVAILABLE
        case _:
            return HTTPStatus.INTERNAL_SERVER_ERROR


def payload_of(error: NarrowsError) -> dict[str, Any]:
    """The JSON body that tells of an error, also as an event in the middle of a stream."""
    match error:
        case ContextExceeded():
            return payload(str(error), param=error.field, code="context_length_exceeded")
        case RequestError():
            return payload(str(error), param=error.field)
        case ModelNotFound():
            return payload(str(error), param="model", code="model_not_found")
        case QueueFull():
            return payload(str(error), type="rate_limit_error", code="queue_full")
        case Unavailable():
            return payload(str(error), type="server_error", code="unavailable")
        case _:
            return payload(str(error), type="server_error", code="generation_failed")


def payload(
    message: str, *, type: str = "invalid_request_error", param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    return {"error": {"message": message, "type": type, "param": param, "code": code}}


class ErrorResponse(JSONResponse):
    """ASCII only: a message may quote what a client sent, which need not be text that UTF-8 can carry."""

    def render(self, content: Any) -> bytes:
        return json.dumps(content).encode("ascii")


def from_validation(errors: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The body for what pydantic found wrong: its first complaint, under the name the sender used."""
    first = errors[0]
    path = [str(part) for part in first["loc"] if part != "body"]
    context = first.get("ctx", {})
    if first["type"] == "json_invalid":
        return payload(f"the body is not JSON: {context['error']} at character {first['loc'][-1]}")
    if "field" in context:
        path.append(context["field"])
    if not path:
        return payload("the body must be a JSON object, sent with Content-Type: application/json")
    param = ".".join(path)
    message = "is required" if first["type"] == "missing" else first["msg"]
    return payload(f"{param}: {message}", param=param)


def install(app: FastAPI) -> None:
    """Answer every exception of `app`'s routes, and every route it does not have, in OpenAI's shape."""

    @app.exception_handler(NarrowsError)
    async def known(_: Request, error: NarrowsError) -> Response:
        status = status_of(error)
        retry = status in (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE)
        return ErrorResponse(payload_of(error), status, headers={"Retry-After": "1"} if retry else None)

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> Response:
        return ErrorResponse(from_validation(error.errors()), HTTPStatus.BAD_REQUEST)

    @app.exception_handler(HTTPException)
    async def routing(request: Request, error: HTTPException) -> Response:
        message = str(error.detail)
        if error.status_code in (HTTPStatus.NOT_FOUND, HTTPStatus.METHOD_NOT_ALLOWED):
            message = f"{message}: {request.method} {request.url.path}"
        return ErrorResponse(payload(message), error.status_code, headers=dict(error.headers or {}))

    @app.exception_handler(ClientGone)
    async def gone(_request: Request, _error: ClientGone) -> Response:
        return Response(status_code=499)  # the usual number for it; nobody receives it

    @app.exception_handler(Exception)
    async def bug(_: Request, error: Exception) -> Response:
        body = payload(f"internal error: {type(error).__name__}", type="server_error", code="internal_error")
        # The exception goes on to uvicorn, which logs it and closes the connection: the client must not use it again.
        return ErrorResponse(body, HTTPStatus.INTERNAL_SERVER_ERROR, headers={"Connection": "close"})
