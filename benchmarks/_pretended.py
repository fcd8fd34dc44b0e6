"""A CUDA device that a CPU build of torch takes for real: code paths for GPUs run without a GPU.

:func:`install` compiles 20 lines of C++ that register a device guard and CUDA hooks which do nothing, so that the dispatcher,
autograd's engine and autocast accept "cuda". Tensors on it are another matter: ``tests/pretended_device.py`` makes them of CPU
tensors, :mod:`benchmarks.device_model` of shapes alone.
"""

import ctypes
import hashlib
import importlib.util
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

_SOURCE = r"""
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
using namespace c10;
struct Guard final : impl::NoOpDeviceGuardImpl<DeviceType::CUDA> {
  static Device only() { return Device(DeviceType::CUDA, 0); }
  static Stream stream() { return Stream(Stream::DEFAULT, only()); }
  Device getDevice() const override { return only(); }
  Device exchangeDevice(Device) const override { return only(); }
  Stream getStream(Device) const noexcept override { return stream(); }
  void record(void**, const Stream&, const DeviceIndex, const EventFlag) const override {}
};
struct Hooks final : at::CUDAHooksInterface {
  Hooks(at::CUDAHooksArgs) {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  int getNumGPUs() const override { return 1; }
  DeviceIndex deviceCount() const override { return 1; }
  DeviceIndex getCurrentDevice() const override { return 0; }
  at::Generator getNewGenerator(DeviceIndex) const override { return at::detail::createCPUGenerator(); }
};
namespace at { using CUDAHooks = Hooks; C10_REGISTER_CLASS(CUDAHooksRegistry, CUDAHooks, CUDAHooks) }
namespace c10::impl { C10_REGISTER_GUARD_IMPL(CUDA, Guard) }
"""

# Operations whose kernel, or whose caller, reads a result on the host.
WAITS = frozenset(
    "_local_scalar_dense nonzero equal is_nonzero _unique2 unique_dim unique_consecutive masked_select bincount histc "
    "_linalg_check_errors _linalg_eigh _linalg_svd linalg_eig _linalg_eigvals linalg_lstsq linalg_matrix_exp".split()
)


def install() -> None:
    """Register the device, before torch is imported: torch asks for its CUDA hooks once, at import."""
    if "torch" in sys.modules:
        raise RuntimeError("expected install() before the first import of torch; start a new process")
    found = importlib.util.find_spec("torch")
    assert found is not None and found.submodule_search_locations is not None, "torch is installed"
    root = Path(found.submodule_search_locations[0])
    digest = hashlib.sha256((_SOURCE + (root / "version.py").read_text()).encode()).hexdigest()[:16]
    library = Path(tempfile.gettempdir()) / f"pretended-cuda-{os.getuid()}-{digest}.so"
    if not library.exists():
        with tempfile.TemporaryDirectory() as folder:
            source, draft = Path(folder) / "device.cpp", library.with_suffix(f".{os.getpid()}")
            source.write_text(_SOURCE)
            options = ["-O1", "-std=c++20", "-shared", "-fPIC", f"-I{root}/include", f"-L{root}/lib"]
            subprocess.run(["g++", source, *options, "-lc10", "-ltorch_cpu", "-o", draft], check=True)
            os.replace(draft, library)
    ctypes.CDLL(str(root / "lib" / "libtorch_cpu.so"), ctypes.RTLD_GLOBAL)
    ctypes.CDLL(str(library))
    _answer()


def _answer() -> None:
    """What ``torch.cuda`` answers in Python, where a CPU build has no bindings."""
    import torch
    import torch._dynamo.trace_rules

    torch._dynamo.trace_rules.get_torch_obj_rule_map()  # looks at the functions of torch.cuda, once: before they change
    answers: dict[str, Any] = {
        "is_available": True, "is_initialized": True, "is_bf16_supported": True, "is_current_stream_capturing": False,
        "device_count": 1, "current_device": 0, "max_memory_allocated": 0, "memory_allocated": 0,
        "get_device_name": "a pretended device", "get_device_capability": (9, 0), "get_rng_state": torch.zeros(16).byte(),
        "current_stream": "the only one", "mem_get_info": (1 << 40, 1 << 40),
        "Event": SimpleNamespace(record=lambda *_: None, query=lambda: False),  # the device is always behind
    }  # fmt: skip
    nothing = "_lazy_init init set_device empty_cache reset_peak_memory_stats synchronize set_rng_state manual_seed"
    for name, answer in (answers | dict.fromkeys([*nothing.split(), "manual_seed_all"])).items():
        setattr(torch.cuda, name, lambda *_, answer=answer, **__: answer)
