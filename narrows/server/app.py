"""The HTTP application: OpenAI's routes, and a few of our own, over a Client and a Tokenizer."""

import asyncio
from dataclasses import replace
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse

from narrows import __version__
from narrows.errors import ConfigError, RequestError
from narrows.runtime.client import Client
from narrows.server import errors
from narrows.server.answers import ChatShape, CompletionShape
from narrows.server.generate import Call, Engine, Limits, check, check_length, make_id
from narrows.server.guard import Guard
from narrows.server.json_body import JsonRoute
from narrows.server.respond import respond, unless_gone
from narrows.server.schemas import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from narrows.server.tokenizer import Tokenizer

_DEFAULT_MAX_TOKENS = 16  # of /v1/completions, as OpenAI has it; a chat may fill the context


def create_app(
    client: Client, tokenizer: Tokenizer, *, api_key: str | None = None, limits: Limits | None = None
) -> FastAPI:
    """An application that owns neither `client` nor `tokenizer`: closing them is its caller's business.

    With `api_key`, every route but /health, /ready, /metrics and /version asks for it. `app.state.engine` is the
    Engine, whose `close` ends what is open. Raises ConfigError for a key that no client could send.
    """
    if api_key is not None and (not api_key or api_key != api_key.strip()):
        what = "begins or ends with white space" if api_key.strip() else "is empty"
        raise ConfigError(f"api_key: {what}; give another one, or leave it out to serve without")
    limits = limits or Limits()
    engine = Engine(client, tokenizer)
    app = FastAPI(title="Narrows", version=__version__)
    app.state.engine = engine
    app.router.route_class = JsonRoute
    app.add_middleware(Guard, api_key=api_key, limits=limits)
    errors.install(app)
    _add_generation(app, engine, limits)
    _add_models(app, client)
    _add_tokenization(app, engine)
    _add_operations(app, client)
    return app


def _add_generation(app: FastAPI, engine: Engine, limits: Limits) -> None:
    model, tokenizer = engine.client.model, engine.tokenizer

    @app.post("/v1/chat/completions", response_model=None)
    async def chat(body: ChatRequest, http: Request) -> Response:
        _check_model(body.model, engine.client)
        params = body.sampling()
        prompt = await unless_gone(http.receive, asyncio.to_thread(_chat_tokens, engine, body))
        call = Call(
            make_id("chatcmpl"),
            (tuple(prompt),),
            params,
            body.n,
            body.include_stop_str_in_output,
            body.skip_special_tokens,
        )
        call = check(call, model, limits, "messages", body.max_tokens_name)
        shape = ChatShape(tokenizer, body.logprobs)
        return await respond(http, engine, call, shape, streamed=body.stream, include_usage=body.include_usage)

    @app.post("/v1/completions", response_model=None)
    async def completions(body: CompletionRequest, http: Request) -> Response:
        _check_model(body.model, engine.client)
        params = body.sampling()
        prompts = await unless_gone(
            http.receive, asyncio.to_thread(_prompt_tokens, engine, body.prompt, body.add_special_tokens)
        )
        call = Call(
            make_id("cmpl"),
            prompts,
            params,
            body.n,
            body.include_stop_str_in_output,
            body.skip_special_tokens,
        )
        call = check(call, model, limits, "prompt", "max_tokens")
        if params.max_tokens is None:
            room = model.max_model_len - max(len(prompt) for prompt in prompts)
            call = replace(call, params=replace(call.params, max_tokens=min(_DEFAULT_MAX_TOKENS, room)))
        texts = [prompt if isinstance(prompt, str) else tokenizer.decode(prompt, False) for prompt in body.prompt]
        echoed = [text for text in texts for _ in range(body.n)] if body.echo else []
        shape = CompletionShape(tokenizer, body.logprobs, echoed)
        return await respond(http, engine, call, shape, streamed=body.stream, include_usage=body.include_usage)


def _add_models(app: FastAPI, client: Client) -> None:
    def card() -> dict[str, Any]:
        model = client.model
        return {
            "id": model.name,
            "object": "model",
            "created": 0,
            "owned_by": "narrows",
            "max_model_len": model.max_model_len,
        }

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [card()]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        _check_model(name, client)
        return card()


def _add_tokenization(app: FastAPI, engine: Engine) -> None:
    model, tokenizer = engine.client.model, engine.tokenizer

    @app.post("/tokenize")
    async def tokenize(body: TokenizeRequest) -> dict[str, Any]:
        _check_model(body.model, engine.client)
        ids, strings = await asyncio.to_thread(_tokenize, engine, body)
        return {
            "count": len(ids),
            "max_model_len": model.max_model_len,
            "tokens": ids,
            "token_strs": strings,
        }

    @app.post("/detokenize")
    async def detokenize(body: DetokenizeRequest) -> dict[str, str]:
        _check_model(body.model, engine.client)
        if len(body.tokens) > model.max_model_len:
            raise RequestError("tokens", f"{len(body.tokens)} of them; this model has {model.max_model_len} at most")
        if outside := [id for id in body.tokens if not 0 <= id < model.vocab_size]:
            raise RequestError("tokens", f"{outside[0]} is outside the vocabulary (0 to {model.vocab_size - 1})")
        return {"prompt": await asyncio.to_thread(tokenizer.decode, body.tokens, False)}


def _add_operations(app: FastAPI, client: Client) -> None:
    # Plain functions run in a thread: what the client does to answer may block.
    @app.head("/health", include_in_schema=False)
    @app.get("/health")
    async def health() -> dict[str, str]:
        """Alive: answered as long as the process can answer at all."""
        return {"status": "alive"}

    @app.head("/ready", response_model=None, include_in_schema=False)
    @app.get("/ready", response_model=None)
    def ready() -> Response:
        """Whether a request sent now could be served."""
        status = client.status()
        if status.ready:
            return JSONResponse({"status": "ready"})
        body = errors.payload(status.reason or "not ready", type="server_error", code="unavailable")
        return JSONResponse({"status": "not ready"} | body, 503)

    @app.get("/metrics", response_model=None)
    def metrics() -> Response:
        return PlainTextResponse(client.metrics(), media_type="text/plain; version=0.0.4")

    @app.get("/version")
    async def version() -> dict[str, str]:
        return {"version": __version__}


def _check_model(name: str | None, client: Client) -> None:
    if name is not None and name != client.model.name:
        raise errors.ModelNotFound(f"model {name!r} is not served here; this server has {client.model.name!r}")


# These run in a thread, since texts may be long.


def _chat_tokens(engine: Engine, body: ChatRequest) -> list[int]:
    tokenizer = engine.tokenizer
    text = _render(tokenizer, body)
    check_length(text, tokenizer, engine.client.model, "messages")
    return tokenizer.encode(text, add_special_tokens=False)


def _prompt_tokens(
    engine: Engine, prompts: list[str | list[int]], add_special_tokens: bool
) -> tuple[tuple[int, ...], ...]:
    """Token ids of each prompt; those already given as ids stay as they are."""
    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    for text in texts:
        check_length(text, engine.tokenizer, engine.client.model, "prompt")
    return tuple(
        tuple(engine.tokenizer.encode(prompt, add_special_tokens) if isinstance(prompt, str) else prompt)
        for prompt in prompts
    )


def _tokenize(engine: Engine, body: TokenizeRequest) -> tuple[list[int], list[str] | None]:
    """Token ids, and how they are written if that is asked for."""
    tokenizer = engine.tokenizer
    if body.messages is not None:
        text, name, special = _render(tokenizer, body), "messages", bool(body.add_special_tokens)
    else:
        assert body.prompt is not None
        text, name, special = body.prompt, "prompt", body.add_special_tokens is not False
    check_length(text, tokenizer, engine.client.model, name)
    ids = tokenizer.encode(text, special)
    return ids, [tokenizer.token(id) for id in ids] if body.return_token_strs else None


def _render(tokenizer: Tokenizer, body: ChatRequest | TokenizeRequest) -> str:
    """The conversation as the model's template writes it."""
    return tokenizer.render_chat(
        [message.for_template() for message in body.messages or ()],
        add_generation_prompt=body.add_generation_prompt,
        variables=body.chat_template_kwargs,
    )
