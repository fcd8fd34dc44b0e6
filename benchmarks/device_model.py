"""What a benchmark takes at least on an NVIDIA H100 or H200 that is not there: kernels, bytes, operations, memory and time.

    python -m benchmarks.device_model training_step --preset poet-60m --tokens 16384 --sequence-length 512 --dtype bfloat16
    python -m benchmarks.device_model --check benchmarks/results/equivalence-h200-bfloat16.json

Runs the second step of each contender of a benchmark, here ``benchmarks.training_step`` with its own options, on tensors
without values (FakeTensorMode). A kernel takes at least the time of the bytes that it reads and writes and of its operations,
at the rates of the data sheet. Forward, backward and an optimizer's step each take at least the time to launch their kernels.
So the least time is a bound, not a prediction: no fusion, no cache, no kernel at its peak. A value that the host reads is 1.

Columns: kernels launched; GB read and written; TFLOP; peak memory beyond what the step began with; what the host waits for; the
least times; the measured time and its ratio to the least, with ``--check``; the operations that take longest.
"""

# ruff: noqa: E402
from benchmarks._pretended import WAITS, install

install()  # before the first import of torch

import importlib
import json
import shlex
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple

import torch
import tyro
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from benchmarks._command import select
from experiments.comparison import markdown_table

LAUNCH = 4e-6  # seconds per kernel launched by PyTorch in eager mode
PHASES = ("forward", "backward", "step")
HEAD = "row, contender, kernels, GB, TFLOP, extra GB, waits, forward ms, backward ms, step ms, least ms".split(", ")


# Rates of the data sheets, dense: bytes per second, and operations per second by dtype, the same for both.
BANDWIDTH = {"h100": 3.35e12, "h200": 4.8e12}
RATES = {torch.bfloat16: 989e12, torch.float16: 989e12, torch.float32: 67e12, torch.float64: 67e12}
TF32 = 494e12
# Views, and operations that only reserve memory: no kernel.
_FREE = frozenset(
    "detach alias lift lift_fresh empty empty_like new_empty empty_strided new_empty_strided _unsafe_view view set_".split()
)
_GATHERS = frozenset("gather index_select embedding index".split())  # read no more than they return
_SCATTERS = frozenset("scatter_ scatter_add_ index_add_ index_copy_ index_put_ embedding_dense_backward".split())
_CUBIC = frozenset("linalg_inv_ex linalg_cholesky_ex cholesky_inverse linalg_lu_factor_ex".split())
_READS = {"_local_scalar_dense": 1, "equal": True, "allclose": True}


class Launch(NamedTuple):
    """A kernel; ``seconds`` is the least time of its work."""

    phase: str
    name: str
    bytes: float
    operations: float
    seconds: float


def _tensors(tree: Any) -> list[Tensor]:
    return [t for t in pytree.tree_leaves(tree) if isinstance(t, Tensor)]


def _storage(t: Tensor) -> int:
    return t.untyped_storage()._cdata


def _size(t: Tensor) -> int:
    entries = t.element_size()
    for length, stride in zip(t.shape, t.stride(), strict=True):
        entries *= length if stride else 1  # an expanded dimension is read once
    return entries


def _rate(inputs: list[Tensor]) -> float:
    dtype = next((t.dtype for t in inputs if t.is_floating_point() and t.ndim >= 2), torch.float32)
    return TF32 if dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision == "tf32" else RATES[dtype]


def _moved(func: Any, name: str, args: Any, kwargs: Any, inputs: list[Tensor], fresh: list[Tensor]) -> int:
    """Bytes read and written; ``fresh`` are the results in memory of their own."""
    named = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | kwargs
    targets = _tensors([named.get(a.name) for a in func._schema.arguments if a.alias_info and a.alias_info.is_write])
    if name in _GATHERS:
        return 2 * sum(map(_size, targets + fresh)) + sum(_size(t) for t in inputs if not t.is_floating_point())
    if name in _SCATTERS:
        return 3 * sum(_size(t) for t in inputs if not any(t is target for target in targets))
    if name.startswith("_fused_adam"):
        return 7 * sum(map(_size, args[0]))  # four tensors read, three written
    unread = {id(t) for t in targets} if name.endswith("copy_") or func._overloadname == "out" else set()
    return sum(map(_size, targets + fresh)) + sum(_size(t) for t in inputs if id(t) not in unread)


def _operations(func: Any, name: str, args: Any, kwargs: Any, inputs: list[Tensor], result: Any) -> float:
    if func.overloadpacket in flop_registry:
        others = {key: value for key, value in kwargs.items() if key != "out"}
        return flop_registry[func.overloadpacket](*args, **others, out_val=result)
    if name in ("addmm_", "baddbmm_"):
        return 2 * args[1].numel() * args[2].shape[-1]
    if name in ("linalg_solve_triangular", "cholesky_solve"):
        return inputs[1].numel() * inputs[0].shape[-1]
    return 2 * inputs[0].numel() * inputs[0].shape[-1] if name in _CUBIC else 0.0


class Recorder(TorchDispatchMode):
    """Lists the kernels launched on CUDA tensors, what the host waits for, and the peak of memory."""

    def __init__(self, bandwidth: float) -> None:
        super().__init__()
        self.bandwidth = bandwidth
        self.live, self.stepping = 0, False
        self.held: weakref.WeakSet[Any] = weakref.WeakSet()
        self.reset()

    def reset(self) -> None:
        self.launches: list[Launch] = []
        self.waits: Counter[str] = Counter()
        self.began = self.peak = self.live

    def __enter__(self) -> Any:
        ways = (register_optimizer_step_pre_hook, True), (register_optimizer_step_post_hook, False)
        self.hooks = [register(lambda *_, on=on: setattr(self, "stepping", on)) for register, on in ways]
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        for hook in self.hooks:
            hook.remove()
        super().__exit__(*error)

    def _hold(self, t: Tensor) -> None:
        storage, size = t.untyped_storage(), t.untyped_storage().nbytes()
        if storage not in self.held:
            self.held.add(storage)
            weakref.finalize(storage, self._add, -size)
            self._add(size)

    def _add(self, size: int) -> None:
        self.live += size
        self.peak = max(self.peak, self.live)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name, inputs = func._schema.name.removeprefix("aten::"), _tensors((args, kwargs))
        result = _READS[name] if name in _READS else func(*args, **kwargs)
        outputs = _tensors(result)
        for t in outputs:
            t.constant = None  # type: ignore[attr-defined]  # or FakeTensorMode computes the values that it knows, on "cuda"
        devices, stored = {t.device.type for t in inputs + outputs}, set(map(_storage, inputs))
        if "cuda" not in devices:
            return result
        for t in outputs:
            self._hold(t)
        if (name in WAITS or (name == "_to_copy" and len(devices) > 1)) and not kwargs.get("non_blocking"):
            self.waits[name] += 1
        fresh = [t for t in outputs if _storage(t) not in stored]
        is_view = outputs and not fresh and not func._schema.is_mutable and name != "_to_copy"
        if name in _FREE or name.startswith("prim") or is_view:
            return result
        size = _moved(func, name, args, kwargs, inputs, fresh)
        operations = _operations(func, name, args, kwargs, inputs, result)
        in_backward = torch._C._current_graph_task_id() != -1
        phase = "step" if self.stepping else "backward" if in_backward else "forward"
        seconds = max(size / self.bandwidth, operations / _rate(inputs))
        self.launches.append(Launch(phase, name, size, operations, seconds))
        return result

    def cells(self, measured: float | None) -> list[str]:
        """A row of the table, from the kernels on; ``measured`` in milliseconds."""
        least, by_name = dict.fromkeys(PHASES, 0.0), Counter[str]()
        for launch in self.launches:
            least[launch.phase] += launch.seconds
            by_name[launch.name] += launch.seconds  # type: ignore[assignment]
        for phase, count in Counter(launch.phase for launch in self.launches).items():
            least[phase] = max(least[phase], LAUNCH * count)
        total = 1e3 * sum(least.values())
        return [
            str(len(self.launches)),
            f"{sum(launch.bytes for launch in self.launches) / 1e9:.2f}",
            f"{sum(launch.operations for launch in self.launches) / 1e12:.3f}",
            f"{(self.peak - self.began) / 1e9:.2f}",
            ", ".join(f"{name} x{count}" for name, count in self.waits.items()) or "none",
            *(f"{1e3 * seconds:.2f}" for seconds in (*least.values(), sum(least.values()))),
            *([] if measured is None else [f"{measured:.2f}", f"{measured / total:.1f}"]),
            ", ".join(f"{name} {1e3 * seconds:.2f} ms" for name, seconds in by_name.most_common(3)),
        ]


def model(benchmark: str, arguments: Sequence[str], gpu: str, results: dict[str, Any] | None) -> Iterator[list[str]]:
    """Rows of the table; with ``results``, contenders by row, for those that have a time."""
    module = importlib.import_module(f"benchmarks.{benchmark}")
    Options: Callable[..., Any] = getattr(module, "StepOptions", module.Options)
    options = tyro.cli(Options, args=[*arguments, "--device", "cuda"])
    for row in module.rows(options):
        if (results is not None and row.label not in results) or (chosen := select(row, options)) is None:
            continue
        with FakeTensorMode(allow_non_fake_inputs=True):  # the contenders of a row share tensors
            torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor(..., device="cuda") then copies, as on a GPU
            for contender in chosen.contenders:
                measured = results and results[row.label].get(contender.name, {}).get("milliseconds")
                if results is not None and measured is None:
                    continue
                try:
                    with Recorder(BANDWIDTH[gpu]) as recorder:
                        step = contender.build()
                        step()  # makes the optimizer's state
                        recorder.reset()
                        step()
                    cells = recorder.cells(measured)
                except Exception as error:  # not installed, compiled, or of a class that has no fake
                    cells = [f"{type(error).__name__}: {str(error).splitlines()[0][:80]}"]
                yield [row.label, contender.name, *cells]


@dataclass(frozen=True)
class ModelOptions:
    """What to model; other options go to the benchmark."""

    benchmark: tyro.conf.Positional[str] = ""
    """riemannian_step, maps, equivalence, interface, training_step or poet_step."""
    gpu: Literal["h100", "h200"] = "h200"
    check: tuple[Path, ...] = ()
    """Instead: results of benchmarks on this GPU, whose times to compare with the model's."""


def main(arguments: Sequence[str] | None = None) -> None:
    options, others = tyro.cli(ModelOptions, description=__doc__, args=arguments, return_unknown_args=True)
    head = [*HEAD, *(["measured ms", "ratio"] if options.check else []), "longest"]
    # module.to() swaps tensors, but none that FakeTensorMode has a weak reference to
    torch.utils.weakref = SimpleNamespace(getweakrefs=lambda _: ())  # type: ignore[assignment]
    body = [] if options.check else list(model(options.benchmark, others, options.gpu, None))
    for result in (json.loads(path.read_text()) for path in options.check):
        for command in dict.fromkeys(row["command"] for row in result["rows"]):
            known = {row["row"]: row["contenders"] for row in result["rows"] if row["command"] == command}
            body += model(result["benchmark"], shlex.split(command)[3:], options.gpu, known)
    print(markdown_table(head, [[*cells, *[""] * (len(head) - len(cells))] for cells in body], left=2))


if __name__ == "__main__":
    main()
