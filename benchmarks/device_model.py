"""A training step on a GPU that is not there: kernels, bytes, operations, peak memory and the least time, by phase.

    python -m benchmarks.device_model --device h200 --preset pit-0.3b --tokens 8192 --interface pit-free

Runs the step on tensors without values (FakeTensorMode) on a pretended CUDA device. A kernel takes at least the time of the
bytes that it reads and writes and of its operations, at the device's rates; a phase at least the time to launch its kernels. So
the least time is a bound, not a prediction: no fusion, no cache, no kernel at its peak.

Columns: kernels launched; GB read and written; TFLOP; the least time in ms; peak memory in GB beyond what the phase began with;
the operations that make the host wait, which should be none.
"""

import importlib
import json
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from benchmarks._pretended import WAITS, install

LAUNCH = 4e-6  # seconds per kernel launched by PyTorch in eager mode


@dataclass(frozen=True)
class Device:
    """Rates of a data sheet, dense: bytes per second, and operations per second by dtype."""

    bandwidth: float
    bfloat16: float
    tf32: float
    float32: float
    float64: float


DEVICES = {
    "h100": Device(3.35e12, 989e12, 494e12, 67e12, 67e12),
    "h200": Device(4.8e12, 989e12, 494e12, 67e12, 67e12),
    "a100": Device(2.0e12, 312e12, 156e12, 19.5e12, 19.5e12),
}
# Views, and operations that only reserve memory: no kernel.
_FREE = frozenset(
    "detach alias lift lift_fresh empty empty_like new_empty empty_strided new_empty_strided _unsafe_view view set_".split()
)
_GATHERS = frozenset("gather index_select embedding index".split())  # read no more than they return
_SCATTERS = frozenset("scatter_ scatter_add_ index_add_ index_copy_ index_put_ embedding_dense_backward".split())


@dataclass
class Phase:
    """What was launched in one phase of a step."""

    kernels: Counter[str] = field(default_factory=Counter)
    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    bytes: float = 0.0
    operations: float = 0.0
    began: int = 0
    peak: int = 0
    waits: list[str] = field(default_factory=list)

    @property
    def least(self) -> float:
        """Seconds: the work, or the launches if those take longer."""
        return max(sum(self.seconds.values()), LAUNCH * self.kernels.total())


def recorder(device: Device) -> Any:
    """A dispatch mode with an attribute ``phase`` that counts what runs on CUDA tensors."""
    import torch
    from torch.utils import _pytree as pytree
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils.flop_counter import flop_registry

    def size(t: torch.Tensor) -> int:
        entries = 1
        for length, stride in zip(t.shape, t.stride(), strict=True):
            entries *= length if stride else 1  # an expanded dimension is read once
        return entries * t.element_size()

    def rate(inputs: list[torch.Tensor]) -> float:
        dtype = next((t.dtype for t in inputs if t.is_floating_point() and t.ndim >= 2), torch.float32)
        if dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision == "tf32":
            return device.tf32
        return device.bfloat16 if dtype.itemsize == 2 else device.float64 if dtype.itemsize == 8 else device.float32

    class Recorder(TorchDispatchMode):
        phase = Phase()
        live = 0

        def __init__(self) -> None:
            super().__init__()
            self.known: dict[int, weakref.ref[Any]] = {}

        def _hold(self, t: torch.Tensor) -> None:
            storage = t.untyped_storage()
            key, held = storage._cdata, storage.nbytes()
            if key in self.known and self.known[key]() is not None:
                return

            def release(_: Any) -> None:
                self.live -= held
                self.known.pop(key, None)

            self.known[key] = weakref.ref(storage, release)
            self.live += held
            self.phase.peak = max(self.phase.peak, self.live)

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = kwargs or {}
            result = func(*args, **kwargs)
            inputs = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
            outputs = [t for t in pytree.tree_leaves(result) if isinstance(t, torch.Tensor)]
            if not any(t.device.type == "cuda" for t in inputs + outputs):
                return result
            name, phase = func._schema.name.removeprefix("aten::"), self.phase
            for t in outputs:
                self._hold(t)
            if name in WAITS or (name == "_to_copy" and len({t.device.type for t in inputs + outputs}) > 1):
                phase.waits += [] if kwargs.get("non_blocking") else [name]
            stored = {t.untyped_storage()._cdata for t in inputs}
            written = [a.name for a in func._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
            is_view = not written and outputs and all(t.untyped_storage()._cdata in stored for t in outputs)
            if name in _FREE or name.startswith("prim") or (is_view and name != "_to_copy"):
                return result
            named = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | kwargs
            targets = [t for n in written for t in pytree.tree_leaves(named.get(n)) if isinstance(t, torch.Tensor)]
            fresh = [t for t in outputs if t.untyped_storage()._cdata not in stored]
            moved = sum(map(size, targets + fresh))
            if name in _GATHERS:
                moved += sum(map(size, outputs)) + sum(size(t) for t in inputs if not t.is_floating_point())
            elif name in _SCATTERS:
                moved = 3 * sum(size(t) for t in inputs if not any(t is target for target in targets))
            elif name.startswith("_fused_adam"):
                moved = 7 * sum(map(size, args[0]))  # four tensors read, three written
            else:
                kept = {id(t) for t in targets} if name.endswith("copy_") or func._overloadname == "out" else set()
                moved += sum(size(t) for t in inputs if id(t) not in kept)
            operations = 0.0
            if func.overloadpacket in flop_registry:
                others = {key: value for key, value in kwargs.items() if key != "out"}
                operations = flop_registry[func.overloadpacket](*args, **others, out_val=result)
            elif name in ("addmm_", "baddbmm_"):
                operations = 2 * args[1].numel() * args[2].shape[-1]
            elif name in ("linalg_inv_ex", "linalg_cholesky_ex", "cholesky_inverse", "linalg_lu_factor_ex"):
                operations = 2 * inputs[0].numel() * inputs[0].shape[-1]
            elif name in ("linalg_solve_triangular", "cholesky_solve"):
                operations = inputs[1].numel() * inputs[0].shape[-1]
            phase.kernels[name] += 1
            phase.seconds[name] += max(moved / device.bandwidth, operations / rate(inputs))
            phase.bytes += moved
            phase.operations += operations
            return result

    return Recorder()


@dataclass(frozen=True)
class ModelOptions:
    """What to model."""

    device: Literal["h100", "h200", "a100"] = "h200"
    preset: str = "poet-60m"
    interface: tuple[str, ...] = ("transpose", "pit-free", "pit-trainable")
    """Token interfaces, one table each."""
    body: Literal["adamw", "poet-block", "poet-full"] = "adamw"
    tokens: int = 8192
    """Tokens per step."""
    sequence_length: int = 1024
    slowest: int = 3
    """Kernels to name for each phase, by their least time."""
    check: tuple[Path, ...] = ()
    """Instead: results of benchmarks on a GPU, whose times to compare with the model's."""


def phases(options: ModelOptions, interface: str) -> dict[str, Phase]:
    """Forward, backward and step of a model built as ``manifold-tying train`` builds it, in bfloat16 autocast."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    from manifold_tying.training import Settings, TrainConfig, resolve
    from manifold_tying.training.build import build_merges, build_optimizer, build_reference_model

    settings = Settings(preset=options.preset, device="cuda", body=options.body)
    config: Any = resolve(TrainConfig(out=Path("unused"), interface=interface, settings=settings))  # type: ignore[arg-type]
    found: dict[str, Phase] = {}
    with FakeTensorMode(allow_non_fake_inputs=True), recorder(DEVICES[options.device]) as recording:

        def record(name: str, run: Callable[[], Any]) -> Any:
            recording.phase = found[name] = Phase(began=recording.live, peak=recording.live)
            return run()

        with torch.device("meta"):
            model = build_reference_model(config)
        for module in model.modules():
            for name, p in module.named_parameters(recurse=False):
                setattr(
                    module,
                    name,
                    torch.nn.Parameter(torch.empty(p.shape, dtype=p.dtype, device="cuda"), p.requires_grad),
                )
            for name, b in module.named_buffers(recurse=False):
                module._buffers[name] = torch.empty(b.shape, dtype=b.dtype, device="cuda")
        optimizer = build_optimizer(model, config.settings)
        merges = build_merges(model, optimizer, config.settings)
        shape = (options.tokens // options.sequence_length, options.sequence_length)
        ids = torch.randint(model.interface.vocab_size, shape, device="cuda")

        def forward() -> torch.Tensor:
            with torch.autocast("cuda", torch.bfloat16):
                return model.loss(ids, ids.roll(-1, 1))

        def step() -> None:
            optimizer.step()
            if merges is not None:
                merges.step()

        for _ in range(2):  # the first step makes the optimizer's state
            optimizer.zero_grad()
            loss = record("forward", forward)
            record("backward", loss.backward)
            record("step", step)
            del loss
    return found


def table(title: str, found: dict[str, Phase], slowest: int) -> str:
    """Markdown."""
    lines = [
        f"## {title}",
        "",
        "| phase | kernels | GB | TFLOP | least ms | peak GB | waits | most of the time |",
        "|---|" + "---:|" * 6 + "---|",
    ]
    for name, phase in found.items():
        waits = ", ".join(f"{key} x{count}" for key, count in Counter(phase.waits).items()) or "none"
        slow = sorted(phase.seconds.items(), key=lambda pair: -pair[1])[:slowest]
        top = ", ".join(f"{op} x{phase.kernels[op]} {1e3 * seconds:.2f} ms" for op, seconds in slow)
        lines.append(
            f"| {name} | {phase.kernels.total()} | {phase.bytes / 1e9:.2f} | {phase.operations / 1e12:.3f} | "
            f"{1e3 * phase.least:.2f} | {(phase.peak - phase.began) / 1e9:.2f} | {waits} | {top} |"
        )
    kernels, least = sum(p.kernels.total() for p in found.values()), sum(p.least for p in found.values())
    lines.append(f"| all | {kernels} | | | {1e3 * least:.2f} | | | |")
    return "\n".join(lines)


def check(path: Path, device: Device) -> str:
    """Measured and least times of the contenders in a result file, as Markdown; those that need values are left out."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    from benchmarks._command import Options
    from benchmarks._harness import Unavailable

    class Pretended(Options):
        def normal(self, seed: int, *shape: int) -> torch.Tensor:
            return torch.randn(*shape, device=self.device)

    result = json.loads(path.read_text())
    known = {row["row"]: row["contenders"] for row in result["rows"]}
    benchmark = importlib.import_module(f"benchmarks.{result['benchmark']}")
    lines, left = (
        [
            f"## {path.name}",
            "",
            "| row | contender | kernels | least ms | measured | ratio |",
            "|---|---|" + "---:|" * 4,
        ],
        0,
    )
    with torch.device("cuda"):
        for row in benchmark.rows(Pretended(device="cuda", dtype=result["dtype"])):
            for contender in row.contenders:
                measured = known.get(row.label, {}).get(contender.name, {})
                if "milliseconds" not in measured:
                    continue
                try:
                    with FakeTensorMode(allow_non_fake_inputs=True), recorder(device) as recording:
                        step = contender.build()
                        step()
                        recording.phase = Phase(began=recording.live, peak=recording.live)
                        step()
                except (RuntimeError, AttributeError, Unavailable):
                    left += 1
                    continue
                least, ms = 1e3 * recording.phase.least, measured["milliseconds"]
                kernels = recording.phase.kernels.total()
                lines.append(
                    f"| {row.label} | {contender.name} | {kernels} | {least:.2f} | {ms:.2f} | {ms / least:.1f} |"
                )
    return "\n".join([*lines, "", f"{left} contenders choose by values, or move modules, and are left out."])


def main(arguments: Sequence[str] | None = None) -> None:
    install()
    import tyro

    options = tyro.cli(ModelOptions, description=__doc__, args=arguments)
    for path in options.check:
        print(check(path, DEVICES[options.device]), end="\n\n")
    for interface in () if options.check else options.interface:
        title = f"{options.preset}, {interface}, {options.body}, {options.tokens} tokens, {options.device}"
        print(table(title, phases(options, interface), options.slowest), end="\n\n")


if __name__ == "__main__":
    main()
