"""The two answer formats of OpenAI's API, chat and text: chunks of a stream and whole answers, as plain dictionaries.

Owns field names and nothing else. May never look at an engine or a connection.
"""

from __future__ import annotations

import secrets
import time
from typing import Any

from frontend.rows import Exchange, Row
from frontend.schema import Work


def usage_of(exchange: Exchange) -> dict[str, Any]:
    """Token counts over all choices; the completion counts include the end-of-sequence token.

    Where tokens were drafted, OpenAI's details of the completion say how many were taken and how many not, and
    `accept_length` how many tokens a step with drafts brought.
    """
    prompt = sum(row.prompt_tokens for row in exchange.rows)
    completion = sum(row.count for row in exchange.rows)
    usage: dict[str, Any] = {"prompt_tokens": prompt, "completion_tokens": completion}
    usage["total_tokens"] = prompt + completion
    steps, drafted, accepted = (sum(numbers) for numbers in zip(*(row.drafts for row in exchange.rows), strict=True))
    if steps:
        usage["completion_tokens_details"] = {
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": drafted - accepted,
            "accept_length": round(1 + accepted / steps, 3),
        }
    return usage


class ChatShape:
    """chat.completion and chat.completion.chunk. With `return_token_ids` ids come as in vLLM's extension."""

    def __init__(self, work: Work, model: str) -> None:
        self._ids = work.return_token_ids
        self._head = {"id": f"chatcmpl-{secrets.token_hex(16)}", "created": int(time.time()), "model": model}
        self._usage = {"usage": None} if work.include_usage else {}

    def opening(self, row: Row) -> dict[str, Any] | None:
        chunk = self._chunk(row, {"role": "assistant", "content": ""}, None)
        if self._ids:
            chunk["prompt_token_ids"] = row.prompt_ids
        return chunk

    def piece(self, row: Row, text: str, ids: list[int]) -> dict[str, Any]:
        return self._chunk(row, {"content": text}, None, ids)

    def closing(self, row: Row, ids: list[int]) -> dict[str, Any]:
        return self._chunk(row, {}, row.finish, ids)

    def usage(self, exchange: Exchange) -> dict[str, Any]:
        return {**self._head, "object": "chat.completion.chunk", "choices": [], "usage": usage_of(exchange)}

    def whole(self, exchange: Exchange) -> dict[str, Any]:
        choices = []
        for row in exchange.rows:
            choice: dict[str, Any] = {
                "index": row.index,
                "message": {"role": "assistant", "content": "".join(row.text), "refusal": None},
                "logprobs": None,
                "finish_reason": row.finish,
            }
            if self._ids:
                choice["token_ids"] = row.ids
            choices.append(choice)
        answer = {**self._head, "object": "chat.completion", "choices": choices, "usage": usage_of(exchange)}
        if self._ids:
            answer["prompt_token_ids"] = exchange.rows[0].prompt_ids
        return answer

    def _chunk(
        self, row: Row, delta: dict[str, str], finish: str | None, ids: list[int] | None = None
    ) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": row.index, "delta": delta, "logprobs": None, "finish_reason": finish}
        if self._ids and ids is not None:
            choice["token_ids"] = ids
        return {**self._head, "object": "chat.completion.chunk", "choices": [choice], **self._usage}


class TextShape:
    """text_completion, streamed and whole. With `return_token_ids` ids come as in vLLM's extension."""

    def __init__(self, work: Work, model: str) -> None:
        self._ids = work.return_token_ids
        self._head = {
            "id": f"cmpl-{secrets.token_hex(16)}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": model,
        }
        self._usage = {"usage": None} if work.include_usage else {}
        self._told: set[int] = set()  # choices whose prompt ids were sent

    def opening(self, row: Row) -> dict[str, Any] | None:
        return None

    def piece(self, row: Row, text: str, ids: list[int]) -> dict[str, Any]:
        return self._chunk(row, text, None, ids)

    def closing(self, row: Row, ids: list[int]) -> dict[str, Any]:
        return self._chunk(row, "", row.finish, ids)

    def usage(self, exchange: Exchange) -> dict[str, Any]:
        return {**self._head, "choices": [], "usage": usage_of(exchange)}

    def whole(self, exchange: Exchange) -> dict[str, Any]:
        choices = []
        for row in exchange.rows:
            choice: dict[str, Any] = {
                "index": row.index,
                "text": "".join(row.text),
                "logprobs": None,
                "finish_reason": row.finish,
            }
            if self._ids:
                choice["token_ids"] = row.ids
                choice["prompt_token_ids"] = row.prompt_ids
            choices.append(choice)
        return {**self._head, "choices": choices, "usage": usage_of(exchange)}

    def _chunk(self, row: Row, text: str, finish: str | None, ids: list[int]) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": row.index, "text": text, "logprobs": None, "finish_reason": finish}
        if self._ids:
            choice["token_ids"] = ids
            if row.index not in self._told:
                self._told.add(row.index)
                choice["prompt_token_ids"] = row.prompt_ids
        return {**self._head, "choices": [choice], **self._usage}


Shape = ChatShape | TextShape


def shape_of(work: Work, model: str) -> Shape:
    return ChatShape(work, model) if work.kind == "chat" else TextShape(work, model)
