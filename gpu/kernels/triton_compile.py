"""Compilation of Triton kernels for GPUs that need not be there, and what the compiled code takes of them.

Owns the limits of the supported targets and the reading of cubins. Says what is wrong with a kernel; it never launches
one, and needs a process without TRITON_INTERPRET.
"""

import re
import struct
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from gpu.kernels.triton_spec import KernelSpec, collect_specs

TARGETS = (80, 90, 100)  # compute capabilities: A100, H100 and H200, B200
WARP = 32
# What one block may have, from the table of technical specifications per compute capability.
SHARED_BYTES = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}
REGISTERS = 65536
REGISTERS_OF_A_THREAD = 255
THREADS = 1024
_RESOURCES = re.compile(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)")
# Machine code since sm_70: instructions of 128 bits, the lowest 12 of which say what it does. A test holds these two,
# a load from local memory and a store to it, against the disassembler, which takes a second for every kernel.
INSTRUCTION_WORDS, OPCODE = 2, 0xFFF
LDL, STL = 0x983, 0x387


@dataclass(frozen=True)
class Usage:
    """What one compiled kernel takes."""

    registers: int  # of one thread
    stack: int  # bytes of one thread
    local: int  # bytes of one thread
    spills: int  # instructions that touch local memory
    shared: int  # bytes of one block
    threads: int  # of one block

    def excesses(self, capability: int) -> list[str]:
        """What is wrong with it on a GPU of `capability`, a sentence each."""
        wrong = []
        if self.stack or self.local or self.spills:
            wrong.append(f"spills: stack {self.stack} B, local {self.local} B, {self.spills} instructions")
        if self.registers > REGISTERS_OF_A_THREAD or self.registers * self.threads > REGISTERS:
            wrong.append(f"{self.registers} registers x {self.threads} threads are more than a block may have")
        if self.threads > THREADS:
            wrong.append(f"{self.threads} threads are more than a block may have")
        if self.shared > SHARED_BYTES[capability]:
            wrong.append(f"{self.shared} bytes of shared memory; a block may have {SHARED_BYTES[capability]}")
        return wrong


def source_of(spec: KernelSpec) -> ASTSource:
    """The spec in Triton's form, as its launch path would make it. Raises ValueError for names that do not fit."""
    names = spec.kernel.arg_names
    given = [*spec.signature, *spec.constants]
    if sorted(given) != sorted(names):
        raise ValueError(f"{spec.name}: arguments {sorted(given)} are given, the kernel takes {sorted(names)}")
    if unknown := set(spec.aligned) - set(spec.signature):
        raise ValueError(f"{spec.name}: {sorted(unknown)} are no arguments that can be aligned")
    plain = {parameter.name for parameter in spec.kernel.params if parameter.do_not_specialize}
    if wrong := plain & set(spec.aligned):
        raise ValueError(f"{spec.name}: a launch never specialises {sorted(wrong)}")
    attributes = {
        (place,): [["tt.divisibility", 16]] if name in spec.aligned else []
        for place, name in enumerate(names)
        if name not in plain and not spec.signature.get(name, "").startswith(("fp", "bf"))
    }
    signature = {name: spec.signature.get(name, "constexpr") for name in names}
    places = {(names.index(name),): value for name, value in spec.constants.items()}
    return ASTSource(spec.kernel, signature, dict(sorted(places.items())), attributes)


def compile_spec(spec: KernelSpec, capability: int) -> Any:
    """The compiled kernel for compute capability `capability` (90 is 9.0), from Triton's cache if it is there."""
    return triton.compile(source_of(spec), target=GPUTarget("cuda", capability, WARP), options=dict(spec.options))


def usage_of(compiled: Any) -> Usage:
    """What a triton.CompiledKernel takes. Raises RuntimeError when its cubin cannot be read."""
    registers, stack, local, spills = read_cubin(compiled.asm["cubin"])
    metadata = compiled.metadata
    return Usage(registers, stack, local, spills, metadata.shared, metadata.num_warps * WARP)


def measure(place: int, capability: int) -> Usage:
    """Compile the spec at `place` of `collect_specs()`: what other processes can be asked to do."""
    return usage_of(compile_spec(collect_specs()[place], capability))


def read_cubin(cubin: bytes) -> tuple[int, int, int, int]:
    """Registers, bytes of stack, bytes of local memory and spilling instructions of a thread."""
    resources = cuda_tool("cuobjdump", cubin, "--dump-resource-usage")
    found = _RESOURCES.search(resources)
    if found is None:
        raise RuntimeError(f"no resource usage in what cuobjdump printed: {resources[:500]}")
    registers, stack, _, local = map(int, found.groups())
    opcodes = np.concatenate([np.frombuffer(code, "<u8")[::INSTRUCTION_WORDS] & OPCODE for code in _code_of(cubin)])
    return registers, stack, local, int(np.isin(opcodes, (LDL, STL)).sum())


def cuda_tool(name: str, cubin: bytes, *arguments: str) -> str:
    """What `name`, one of the CUDA tools that Triton ships, prints about a cubin. Raises RuntimeError if it fails."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run([tool, *arguments, file.name], capture_output=True, text=True, check=False, timeout=60)
    if done.returncode:
        raise RuntimeError(f"{name} failed: {done.stderr.strip()[:500]}")
    return done.stdout


def _code_of(cubin: bytes) -> Iterator[bytes]:
    """The code sections of a cubin, which is a 64-bit ELF file."""
    (sections,) = struct.unpack_from("<Q", cubin, 0x28)
    size, count, names = struct.unpack_from("<3H", cubin, 0x3A)
    # name, type, flags, address, offset, bytes
    headers = [struct.unpack_from("<2I4Q", cubin, sections + number * size) for number in range(count)]
    for name, _, _, _, offset, length in headers:
        if cubin[headers[names][4] + name :].startswith(b".text."):
            yield cubin[offset : offset + length]
