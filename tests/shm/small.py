"""A small configuration and its segments, for the tests of shared memory."""

from __future__ import annotations

from typing import Any

from shm.config import ModelInfo, ServerConfig

MODEL: dict[str, Any] = {
    "name": "tiny",
    "path": "/models/tiny.gguf",
    "format": "gguf",
    "vocab_size": 128,
    "context_len": 256,
    "hidden_size": 16,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 4,
    "intermediate_size": 32,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "rms_eps": 1e-5,
    "tie_word_embeddings": True,
    "qk_norm": False,
    "eos_token_ids": (2,),
    "bos_token_id": 1,
}


def model(**changes: Any) -> ModelInfo:
    return ModelInfo(**{**MODEL, **changes})


def config(**changes: Any) -> ServerConfig:
    values: dict[str, Any] = {
        "model": model(),
        "served_model_name": "tiny",
        "host": "127.0.0.1",
        "port": 8000,
        "max_running": 4,
        "max_queued": 8,
        "kv_tokens": 512,
        "max_len": 64,
        "threads": 2,
    }
    return ServerConfig(**{**values, **changes})
