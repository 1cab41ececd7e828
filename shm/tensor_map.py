"""Read-only memory maps of model files: what a tensor is, and which tensors a Llama or a Qwen3 has.

Owns the tensor record that the GGUF and the safetensors parser produce, the element types that the server reads, and
the names and shapes of a model's tensors in both formats. Maps files shared and read-only, so that every process that
looks at a model uses the same page cache. Never writes to a file, never converts a tensor (gpu.models.weights does),
and never trusts a length or an offset that a file states: what does not fit is a ModelError with one clear line.
"""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from shm.config import ModelInfo

# Kind of element -> (elements in a block, bytes of a block), as ggml lays them out.
BLOCKS: dict[str, tuple[int, int]] = {
    "F32": (1, 4),
    "F16": (1, 2),
    "BF16": (1, 2),
    "Q8_0": (32, 34),
    "Q4_0": (32, 18),
    "Q4_1": (32, 20),
}
ELEMENTS_MAX = 1 << 40
MESSAGE_CHARS_MAX = 1000

# Parts of one decoder layer: HF name -> GGUF name, below model.layers.N. and blk.N.
LAYER_PARTS = {
    "input_layernorm.weight": "attn_norm.weight",
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
}
EMBEDDING, FINAL_NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"
WHOLE_PARTS = {EMBEDDING: "token_embd.weight", FINAL_NORM: "output_norm.weight", HEAD: "output.weight"}


class ModelError(Exception):
    """A model cannot be used, for a reason that its user can mend: one line that says what and where."""

    def __init__(self, message: str) -> None:
        # A file's own words are in it, and it ends on a terminal.
        line = "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in message)
        super().__init__(line if len(line) <= MESSAGE_CHARS_MAX else line[:MESSAGE_CHARS_MAX] + "...")


@dataclass(frozen=True)
class TensorEntry:
    """One tensor of a mapped file. shape: outermost first (rows, columns); data: uint8 view of its raw bytes in the
    map.

    kind is a key of BLOCKS, or any other name that a safetensors file uses for a type that the server does not read.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    data: NDArray[np.uint8]


def map_file(path: Path) -> mmap.mmap:
    """Map a whole file read-only. Raises ModelError for a missing, empty or LFS pointer file."""
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size == 0:
                raise ModelError(f"{path}: the file is empty")
            mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    except FileNotFoundError:
        raise ModelError(f"{path}: no such file") from None
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: cannot be read ({error})") from None
    if mapped[:24] == b"version https://git-lfs.":
        raise ModelError(f"{path}: a Git LFS pointer, not the file itself; fetch it with `git lfs pull`")
    return mapped


def tensor_bytes(kind: str, shape: tuple[int, ...]) -> int:
    """Bytes of a tensor. Raises ValueError for a shape that no tensor can have or that does not fill whole blocks."""
    block, block_bytes = BLOCKS[kind]
    elements = 1
    for size in shape:
        elements *= size
        if size < 1 or elements > ELEMENTS_MAX:
            raise ValueError(f"has the impossible shape {list(shape)}")
    if block > 1 and (not shape or shape[-1] % block):
        raise ValueError(f"has shape {list(shape)}, whose rows are not whole {kind} blocks of {block} elements")
    return elements // block * block_bytes


def gguf_name(hf_name: str) -> str:
    """model.layers.3.mlp.up_proj.weight -> blk.3.ffn_up.weight. Raises KeyError for a name that no Llama has."""
    if hf_name in WHOLE_PARTS:
        return WHOLE_PARTS[hf_name]
    _, _, layer, part = hf_name.split(".", 3)
    return f"blk.{layer}.{LAYER_PARTS[part]}"


def llama_tensors(info: ModelInfo) -> dict[str, tuple[int, ...]]:
    """HF name -> shape (rows, columns) of every tensor that the model needs: a Llama's, with qk_norm a Qwen3's.

    lm_head only where it is not tied.
    """
    hidden, q_width, kv_width = info.hidden_size, info.num_heads * info.head_dim, info.num_kv_heads * info.head_dim
    layer: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (q_width, hidden),
        "self_attn.k_proj.weight": (kv_width, hidden),
        "self_attn.v_proj.weight": (kv_width, hidden),
        "self_attn.o_proj.weight": (hidden, q_width),
        "post_attention_layernorm.weight": (hidden,),
        "mlp.gate_proj.weight": (info.intermediate_size, hidden),
        "mlp.up_proj.weight": (info.intermediate_size, hidden),
        "mlp.down_proj.weight": (hidden, info.intermediate_size),
    }
    if info.qk_norm:
        layer |= {"self_attn.q_norm.weight": (info.head_dim,), "self_attn.k_norm.weight": (info.head_dim,)}
    tensors: dict[str, tuple[int, ...]] = {EMBEDDING: (info.vocab_size, hidden)}
    for index in range(info.num_layers):
        tensors |= {f"model.layers.{index}.{part}": shape for part, shape in layer.items()}
    tensors[FINAL_NORM] = (hidden,)
    if not info.tie_word_embeddings:
        tensors[HEAD] = (info.vocab_size, hidden)
    return tensors


def check_tensors(info: ModelInfo, entries: dict[str, TensorEntry]) -> None:
    """Make sure that `entries` (by the names of the file's own format) hold what the model needs. Raises ModelError."""
    for hf_name, shape in llama_tensors(info).items():
        name = gguf_name(hf_name) if info.format == "gguf" else hf_name
        entry = entries.get(name)
        if entry is None:
            raise ModelError(f"{info.path}: tensor {name} is missing")
        if entry.kind not in BLOCKS:
            supported = ", ".join(BLOCKS)
            raise ModelError(
                f"{info.path}: tensor {name} has type {entry.kind}, which is not supported ({supported} are)"
            )
        if entry.shape != shape:
            is_shape, wanted = list(entry.shape), list(shape)
            raise ModelError(f"{info.path}: tensor {name} has shape {is_shape} where the configuration wants {wanted}")
