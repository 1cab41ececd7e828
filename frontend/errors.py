"""Errors as a client sees them: one exception, one JSON shape (OpenAI's), the same for every route and every cause.

Owns the shape and the mapping from exceptions to it. May never put what the client sent into a message unbounded, and
never lets a framework's own error body out.
"""

from __future__ import annotations

import http
from typing import Any

import orjson
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from starlette.exceptions import HTTPException

RETRY_AFTER_SECONDS = 1


class ApiError(Exception):
    """An answer that is an error: HTTP `status`, and the `message`, `param` and `code` of OpenAI's error object."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code

    def body(self) -> dict[str, Any]:
        """OpenAI's error object, for a JSON body or an event of a stream."""
        return {
            "error": {
                "message": self.message,
                "type": _type_of(self.status),
                "param": self.param,
                "code": self.code,
            }
        }

    def response(self) -> Response:
        headers: dict[str, str] = {}
        if self.status in (429, 503):
            headers["retry-after"] = str(RETRY_AFTER_SECONDS)
        if self.status == 401:
            headers["www-authenticate"] = "Bearer"
        return json_response(self.body(), self.status, headers)


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    return ApiError(400, message, param, code)


def poison(stage: str, deaths: int) -> ApiError:
    """A request that `stage` was working on whenever it died, and alone in the end."""
    return ApiError(
        500, f"given up: the {stage} process died {deaths} times while it worked on this request", code="poison"
    )


def json_response(content: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(orjson.dumps(content), status, headers, media_type="application/json")


def install(app: FastAPI) -> None:
    """Makes every error that leaves `app` one of OpenAI's shape, the framework's own (404, 405, ...) included."""
    app.add_exception_handler(ApiError, _api_error)
    app.add_exception_handler(HTTPException, _http_exception)
    app.add_exception_handler(RequestValidationError, _validation_error)
    app.add_exception_handler(Exception, _bug)


async def _api_error(_request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error.response()


async def _http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    where = f"{request.method} {request.url.path[:200]}"
    if error.status_code == 404:
        return ApiError(404, f"there is no {where}", code="not_found").response()
    phrase = http.HTTPStatus(error.status_code).phrase.lower()
    response = ApiError(error.status_code, f"{where}: {phrase}", code=phrase.replace(" ", "_")).response()
    for name, value in (error.headers or {}).items():
        response.headers[name] = value
    return response


async def _validation_error(_request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    return bad_request(first["msg"], ".".join(str(part) for part in first["loc"])).response()


async def _bug(_request: Request, _error: Exception) -> Response:
    # The traceback goes to stderr: the framework raises the exception again behind this answer.
    return ApiError(500, "internal error of the server", code="internal_error").response()


def _type_of(status: int) -> str:
    if status == 401:
        return "authentication_error"
    if status == 429:
        return "rate_limit_error"
    return "server_error" if status >= 500 else "invalid_request_error"
