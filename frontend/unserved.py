"""The parameters that other servers know and this one does not serve: what value of each changes nothing.

Owns the table. A parameter in it may carry its neutral value and nothing else; a parameter that is neither here nor in
the schema is unknown. Both are refused by name, because a parameter that is ignored in silence is a wrong answer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from frontend.errors import ApiError, bad_request

# null is neutral everywhere and not repeated here. Sources: OpenAI's API reference, vLLM's and SGLang's protocols.
_COMMON: dict[str, tuple[Any, ...]] = {
    "allowed_token_ids": ((),),
    "bad_words": ((),),
    "best_of": (1,),
    "bootstrap_host": (),
    "bootstrap_port": (),
    "bootstrap_room": (),
    "cache_salt": (),
    "custom_logit_processor": (),
    "custom_params": (),
    "detokenize": (True,),
    "dynatemp_range": (0,),
    "ebnf": (),
    "early_stopping": (False,),
    "frequency_penalty": (0,),
    "grammar": (),
    "guided_choice": (),
    "guided_decoding_backend": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_whitespace_pattern": (),
    "include_stop_str_in_output": (False,),
    "json_schema": (),
    "kv_transfer_params": ({},),
    "length_penalty": (1,),
    "logit_bias": ({},),
    "logits_processors": ((),),
    "lora_path": (),
    "min_tokens": (0,),
    "mirostat": (0,),
    "n": (1,),
    "no_stop_trim": (False,),
    "presence_penalty": (0,),
    "priority": (0,),
    "prompt_logprobs": (),
    "regex": (),
    "repetition_penalty": (1,),
    "response_format": ({"type": "text"},),
    "return_hidden_states": (False,),
    "return_tokens_as_token_ids": (False,),
    "session_params": ({},),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "stop_regex": ((),),
    "structured_outputs": (),
    "truncate_prompt_tokens": (),
    "typical_p": (1,),
    "use_beam_search": (False,),
    "vllm_xargs": ({},),
}

CHAT: dict[str, tuple[Any, ...]] = _COMMON | {
    "add_generation_prompt": (True,),
    "add_special_tokens": (False,),
    "audio": (),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "documents": ((),),
    "echo": (False,),
    "function_call": ("none",),
    "functions": ((),),
    "include_reasoning": (True,),
    "logprobs": (False,),
    "media_io_kwargs": ({},),
    "mm_processor_kwargs": ({},),
    "modalities": (("text",),),
    "moderation": (),
    "parallel_tool_calls": (True,),
    "prediction": (),
    "reasoning_effort": (),
    "separate_reasoning": (True,),
    "stream_reasoning": (True,),
    "thinking": (),
    "tool_choice": ("none", "auto"),
    "tools": ((),),
    "top_logprobs": (0,),
    "verbosity": (),
    "web_search_options": (),
}

COMPLETION: dict[str, tuple[Any, ...]] = _COMMON | {
    "add_special_tokens": (True,),
    "echo": (False,),
    "logprobs": (),
    "prompt_embeds": (),
    "suffix": ("",),
}

TOKENIZE: dict[str, tuple[Any, ...]] = {
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "mm_processor_kwargs": ({},),
    "return_token_strs": (False,),
    "tools": ((),),
}

DETOKENIZE: dict[str, tuple[Any, ...]] = {}

STREAM_OPTIONS: dict[str, tuple[Any, ...]] = {
    "chunk_include_usage": (False,),
    "continuous_usage_stats": (False,),
    "include_obfuscation": (False,),
}

MESSAGE: dict[str, tuple[Any, ...]] = {
    "annotations": ((),),
    "audio": (),
    "function_call": (),
    "reasoning": ("",),
    "reasoning_content": ("",),
    "refusal": (),
    "tool_call_id": (),
    "tool_calls": ((),),
}

# Notes of the client about the request: they cannot change the answer, whatever they say.
_NOTES: dict[str, Callable[[Any], bool]] = {
    "metadata": lambda v: isinstance(v, dict),
    "prompt_cache_key": lambda v: isinstance(v, str),
    "prompt_cache_retention": lambda v: isinstance(v, str),
    "request_id": lambda v: isinstance(v, str),
    "rid": lambda v: isinstance(v, str),
    "safety_identifier": lambda v: isinstance(v, str),
    "service_tier": lambda v: v in ("auto", "default"),
    "store": lambda v: v is False,
    "user": lambda v: isinstance(v, str),
}


def refuse_unserved(extras: Mapping[str, Any], table: Mapping[str, tuple[Any, ...]], where: str = "") -> None:
    """Raises ApiError (400, names the parameter) unless every one of `extras` carries a value that changes nothing."""
    for name, value in extras.items():
        error = _verdict(name, value, table, where)
        if error is not None:
            raise error


def _verdict(name: str, value: Any, table: Mapping[str, tuple[Any, ...]], where: str) -> ApiError | None:
    param = f"{where}.{name}" if where else name
    if name in table:
        if value is None or any(_same(value, neutral) for neutral in table[name]):
            return None
        return bad_request(f"{param} is not served yet: leave it out", param, "unsupported_parameter")
    if not where and name in _NOTES:
        if value is None or _NOTES[name](value):
            return None
        return bad_request(f"{param} has a value that is not served", param, "unsupported_value")
    shown = param if len(param) <= 100 else param[:100] + "..."
    return bad_request(f"unknown parameter: {shown}", shown, "unknown_parameter")


def _same(value: Any, neutral: Any) -> bool:
    """Equality without Python's True == 1; a tuple in the table stands for a JSON array."""
    if isinstance(neutral, tuple):
        return isinstance(value, list) and value == list(neutral)
    if isinstance(value, bool) or isinstance(neutral, bool):
        return value is neutral
    return bool(value == neutral)
