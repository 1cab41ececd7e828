"""The HTTP application: every route, the key check in front of them, and the bounded reading of bodies.

Owns paths, status codes and headers. May never hold a request's state (rows.py does) and never read more of a body than
the limit allows.
"""

from __future__ import annotations

import asyncio
import hmac
import time
from collections.abc import Callable
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import Response
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Receive, Scope, Send

from frontend import errors, schema
from frontend.engine import Engine
from frontend.errors import ApiError, json_response
from frontend.metrics import Exposition
from frontend.stream import Answer, until_gone
from shm.config import ServerConfig
from shm.limits import BODY_BYTES_MAX

OPEN_PATHS = ("/health",)


class KeyCheck:
    """Answers 401 unless a request to any path but /health carries the key."""

    def __init__(self, app: ASGIApp, api_key: str) -> None:
        assert api_key == api_key.strip(), "blanks at its ends do not survive in a header"
        self._app = app
        self._wanted = f"Bearer {api_key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS and not self._allowed(scope):
            error = ApiError(401, "missing or wrong API key: send Authorization: Bearer KEY", code="invalid_api_key")
            await error.response()(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _allowed(self, scope: Scope) -> bool:
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        if len(given) != 1:
            return False
        scheme, _, key = given[0].partition(b" ")
        # The scheme's name is case-insensitive (RFC 9110, section 11.1), the key is compared in constant time.
        return hmac.compare_digest(scheme.title() + b" " + key.strip(b" "), self._wanted)


def build_app(engine: Engine, exposition: Exposition) -> FastAPI:
    """The application in front of `engine`."""
    app = FastAPI(title="StepAhead", version="0.1.0", docs_url=None, redoc_url=None)
    errors.install(app)
    _describe_bodies(app)
    if engine.config.api_key is not None:
        app.add_middleware(KeyCheck, api_key=engine.config.api_key)
    _add_generation(app, engine)
    _add_tokens(app, engine)
    _add_models(app, engine)
    _add_operation(app, engine, exposition)
    return app


async def read_body(request: Request) -> bytes:
    """The body, at most BODY_BYTES_MAX bytes of it in memory. Raises ApiError 413 beyond, 400 if it is not JSON."""
    kind = request.headers.get("content-type", "")
    if kind.split(";")[0].strip().lower() != "application/json":
        # A page in a browser can send any other type, or none, to a local server without asking first.
        raise errors.bad_request("the header content-type must be application/json", code="unsupported_media_type")
    too_large = ApiError(413, f"the body may have at most {BODY_BYTES_MAX} bytes", code="body_too_large")
    length = request.headers.get("content-length", "")
    if length.isdigit() and (len(length) > 18 or int(length) > BODY_BYTES_MAX):
        raise too_large
    body = bytearray()
    try:
        async for chunk in request.stream():
            body += chunk
            if len(body) > BODY_BYTES_MAX:
                raise too_large
    except ClientDisconnect:
        raise errors.bad_request("the client left before the body was complete") from None
    return bytes(body)


def _body_of(model: type[BaseModel]) -> dict[str, Any]:
    """The OpenAPI description of a body that the handler reads and checks by itself."""
    described = {"$ref": f"#/components/schemas/{model.__name__}"}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": described}}}}


def _describe_bodies(app: FastAPI) -> None:
    """Adds the bodies that `_body_of` refers to to the OpenAPI document."""
    plain = app.openapi

    def openapi() -> dict[str, Any]:
        document = plain()
        _, bodies = models_json_schema(
            [(model, "validation") for model in schema.BODIES], ref_template="#/components/schemas/{model}"
        )
        document.setdefault("components", {}).setdefault("schemas", {}).update(bodies["$defs"])
        return document

    app.openapi = openapi  # type: ignore[method-assign]


def _add_generation(app: FastAPI, engine: Engine) -> None:
    @app.post("/v1/chat/completions", openapi_extra=_body_of(schema.ChatBody))
    async def chat_completions(request: Request) -> Response:
        work = await _work(request, engine, schema.chat_work)
        return Answer(engine, work)

    @app.post("/v1/completions", openapi_extra=_body_of(schema.CompletionBody))
    async def completions(request: Request) -> Response:
        work = await _work(request, engine, schema.completion_work)
        return Answer(engine, work)


async def _work(request: Request, engine: Engine, check: Any) -> schema.Work:
    try:
        work = check(await read_body(request), engine.config)
    except ApiError:
        engine.meter.outcome("rejected")
        raise
    assert isinstance(work, schema.Work)
    return work


def _add_tokens(app: FastAPI, engine: Engine) -> None:
    @app.post("/tokenize", openapi_extra=_body_of(schema.TokenizeBody))
    async def tokenize(request: Request) -> Response:
        answer = await _ask(request, engine, schema.tokenize_request)
        return json_response(
            {
                "count": answer["count"],
                "max_model_len": engine.config.max_len,
                "tokens": answer["tokens"],
                "token_strs": None,
            }
        )

    @app.post("/detokenize", openapi_extra=_body_of(schema.DetokenizeBody))
    async def detokenize(request: Request) -> Response:
        answer = await _ask(request, engine, schema.detokenize_request)
        return json_response({"prompt": answer["text"]})


async def _ask(
    request: Request, engine: Engine, check: Callable[[bytes, ServerConfig], dict[str, Any]]
) -> dict[str, Any]:
    """Puts the question in the body, as `check` makes it, to the engine, for as long as its client is there."""
    raw = await read_body(request)
    asking = asyncio.create_task(engine.ask(check(raw, engine.config), len(raw)))
    watch = asyncio.create_task(until_gone(request.receive))
    await asyncio.wait((asking, watch), return_when=asyncio.FIRST_COMPLETED)
    watch.cancel()
    if not asking.done():
        asking.cancel()
        raise errors.bad_request("the client left before the answer")
    return asking.result()


def _add_models(app: FastAPI, engine: Engine) -> None:
    config = engine.config
    card = {
        "id": config.served_model_name,
        "object": "model",
        "created": int(time.time()),
        "owned_by": "stepahead",
        "root": config.model.name,
        "parent": None,
        "max_model_len": config.max_len,
    }

    @app.head("/v1/models", include_in_schema=False)
    @app.get("/v1/models")
    async def models() -> Response:
        return json_response({"object": "list", "data": [card]})

    @app.head("/v1/models/{name:path}", include_in_schema=False)
    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        if name != config.served_model_name:
            raise schema.model_not_found(name)
        return json_response(card)


def _add_operation(app: FastAPI, engine: Engine, exposition: Exposition) -> None:
    @app.head("/health", include_in_schema=False)
    @app.get("/health")
    async def health() -> Response:
        """Liveness: answers from this process and shared memory alone, so that load can never make it fail."""
        if engine.failed:
            return json_response({"status": "failed", "reason": engine.failure, "stages": engine.stages}, 503)
        return json_response({"status": "ok", "stages": engine.stages})

    @app.head("/ready", include_in_schema=False)
    @app.get("/ready")
    async def ready() -> Response:
        """Whether requests are taken. While a process is being started again they are, and wait for it."""
        refusal = engine.refusal
        if refusal is None:
            status = "ready" if engine.whole else "recovering"
            return json_response({"status": status, "stages": engine.stages})
        body = {"status": refusal.code, "reason": refusal.message, "stages": engine.stages, **refusal.body()}
        return json_response(body, 503, {"retry-after": str(errors.RETRY_AFTER_SECONDS)})

    @app.head("/metrics", include_in_schema=False)
    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(exposition.text(), media_type=exposition.content_type)
