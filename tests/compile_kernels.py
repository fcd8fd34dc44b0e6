"""Compile every kernel for a GPU, which Triton does without one. Its interpreter accepts more than its compiler."""

import inspect
from types import ModuleType

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime import JITFunction

from manifold_tying.kernels import _triton_cross_entropy, _triton_rotation

INTEGERS = {"stride", "V", "ignore_index", "T", "n", "width", "b"}
POINTERS = {"targets": "*i64", "place": "*i64", "losses": "*fp32", "vectors": "*fp32"}
CONSTANTS = {"WRITE": True, "BLOCK": 8192, "BT": 64, "BC": 64, "B": 64}


def kernels(module: ModuleType) -> list[JITFunction]:
    found = (value for name, value in vars(module).items() if not name.startswith("_"))
    return [value for value in found if isinstance(value, JITFunction)]


def compile_for(kernel: JITFunction, dtype: str) -> None:
    signature = {}
    for name in inspect.signature(kernel.fn).parameters:
        known = "i32" if name in INTEGERS else POINTERS.get(name, f"*{dtype}")
        signature[name] = "constexpr" if name in CONSTANTS else known
    constants = {(i,): CONSTANTS[name] for i, name in enumerate(signature) if name in CONSTANTS}
    compiled = triton.compile(ASTSource(kernel, signature, constants), target=GPUTarget("cuda", 90, 32))
    assert compiled.asm["cubin"]


if __name__ == "__main__":
    for module in (_triton_cross_entropy, _triton_rotation):
        for kernel in kernels(module):
            compile_for(kernel, "bf16")
            print(kernel.__name__)
