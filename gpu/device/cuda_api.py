"""What the CUDA device uses of torch.cuda, gathered in one object that a test can stand in for.

Owns the names, and the answer to whether there is a GPU at all. Importing it asks nothing of a GPU, and nothing else in
`gpu.device` may reach for torch.cuda by itself.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch

from gpu.device.protocol import DeviceError


@dataclass(frozen=True)
class CudaApi:
    """Streams, events and graphs are torch's own objects, or stand-ins with the same methods."""

    new_stream: Callable[[], Any]  # from torch's pool, which hands out the same streams again and again
    new_event: Callable[..., Any]  # enable_timing, blocking, external
    new_graph: Callable[[], Any]
    new_pool: Callable[[], Any]  # memory that graphs share
    set_stream: Callable[[Any], None]  # of the calling thread
    current_stream: Callable[[], Any]
    default_stream: Callable[[], Any]
    zeros: Callable[[tuple[int, ...], torch.dtype], torch.Tensor]  # queued on the current stream
    runtime: Any  # cudaHostRegister, cudaHostUnregister, cudaGetErrorString
    place: torch.device  # where memory lies
    capability: tuple[int, int]  # compute capability, major and minor
    taken: set[int] = field(default_factory=set)  # handles of streams that have an owner


@cache
def torch_cuda() -> CudaApi:
    """The real one, on the current GPU. Raises DeviceError if there is none."""
    if not torch.backends.cuda.is_built():
        raise DeviceError(f"torch {torch.__version__} is built without CUDA")
    if not torch.cuda.is_available():
        raise DeviceError("torch finds no NVIDIA GPU; see nvidia-smi and CUDA_VISIBLE_DEVICES")
    cuda = torch.cuda
    place = torch.device("cuda", cuda.current_device())

    def zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=place)

    return CudaApi(
        new_stream=cuda.Stream,
        new_event=cuda.Event,
        new_graph=cuda.CUDAGraph,
        new_pool=cuda.graph_pool_handle,
        set_stream=cuda.set_stream,
        current_stream=cuda.current_stream,
        default_stream=cuda.default_stream,
        zeros=zeros,
        runtime=cuda.cudart(),
        place=place,
        capability=cuda.get_device_capability(place),
    )
