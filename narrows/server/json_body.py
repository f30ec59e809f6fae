"""Bodies as JSON, strictly: what is not JSON is refused with its cause, and never as an internal error."""

import json
import sys
from collections.abc import Callable, Coroutine
from typing import Any, NoReturn

from fastapi import HTTPException, Request, Response
from fastapi.routing import APIRoute


class JsonRoute(APIRoute):
    """A route whose body is read by `parse`."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def parsed(request: Request) -> Response:
            return await handle(_JsonRequest(request.scope, request.receive))

        return parsed


class _JsonRequest(Request):
    async def json(self) -> Any:
        return parse(await self.body())


def parse(content: bytes) -> Any:
    """The value that UTF-8 JSON stands for. Raises JSONDecodeError, and HTTPException (400) for all else."""
    try:
        return json.loads(content.decode("utf-8-sig"), parse_constant=_refuse_constant)
    except UnicodeDecodeError as error:
        raise _refusal(f"is not UTF-8 text: {error.reason} at byte {error.start}") from error
    except RecursionError as error:
        raise _refusal("is nested too deeply") from error
    except json.JSONDecodeError:
        raise  # the framework knows it, and so does errors.from_validation
    except ValueError as error:  # the only other one: Python does not read such numbers
        raise _refusal(f"has a whole number of more than {sys.get_int_max_str_digits()} digits") from error


def _refuse_constant(name: str) -> NoReturn:
    raise _refusal(f"is not JSON: {name} is not one of its numbers")


def _refusal(problem: str) -> HTTPException:
    return HTTPException(400, f"the body {problem}")
