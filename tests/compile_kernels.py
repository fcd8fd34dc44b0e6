"""Compile every kernel for a GPU, which Triton does without one. Its interpreter accepts more than its compiler."""

import inspect
from types import ModuleType

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime import JITFunction

from manifold_tying.kernels import _triton_cross_entropy, _triton_rotation
from manifold_tying.kernels._cross_entropy import BLOCK, WARPS

INTEGERS = {"stride", "V", "T", "n", "width", "b"}
POINTERS = {"targets": "*i64", "place": "*i64", "losses": "*fp32", "weights": "*fp32", "vectors": "*fp32"}
NUMBERS = dict.fromkeys(("z", "smoothing", "cap"), "fp32")
CONSTANTS = {"WRITE": True, "SMOOTH": True, "CAP": True, "BLOCK": BLOCK, "BT": 64, "BC": 64}
TILES = {"bf16": 64, "fp32": 32}
SHARED = 99 * 1024  # bytes that a program may have on an RTX 30 or 40; an H200 has 227 KB


def kernels(module: ModuleType) -> list[JITFunction]:
    found = (value for name, value in vars(module).items() if not name.startswith("_"))
    return [value for value in found if isinstance(value, JITFunction)]


def compile_for(kernel: JITFunction, dtype: str, options: dict[str, int]) -> None:
    constants = {**CONSTANTS, "B": TILES[dtype]}
    signature = {}
    for name in inspect.signature(kernel.fn).parameters:
        known = "i32" if name in INTEGERS else (POINTERS | NUMBERS).get(name, f"*{dtype}")
        signature[name] = "constexpr" if name in constants else known
    values = {(i,): constants[name] for i, name in enumerate(signature) if name in constants}
    compiled = triton.compile(ASTSource(kernel, signature, values), target=GPUTarget("cuda", 90, 32), options=options)
    assert compiled.asm["cubin"] and compiled.metadata.shared <= SHARED, (kernel, dtype, compiled.metadata.shared)


if __name__ == "__main__":
    options: dict[ModuleType, dict[str, int]] = {_triton_cross_entropy: {"num_warps": WARPS}, _triton_rotation: {}}
    for module in options:
        for kernel in kernels(module):
            for dtype in TILES:
                compile_for(kernel, dtype, options[module])
            print(kernel.__name__)
