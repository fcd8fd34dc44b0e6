"""Detects NaN and Inf gradients: before the step on a CPU, without a sync on a GPU."""

from typing import Literal

import torch
from torch import Tensor

from manifold_tying.distributed import Reduce, mesh_reduce, no_reduce

NonFinite = Literal["raise", "skip", "ignore"]
_LARGE = 1e18  # sums of squares of smaller float32 numbers cannot overflow


class NonFiniteGuard:
    """Decides whether a step may use its gradients.

    Immediate: the host reads one number. Deferred, without a sync: ``found_inf`` (1 if a gradient of this step is not finite,
    else 0) masks the update on the device, and the host reads it at one of the next steps, once it has arrived. A step that is
    captured in a CUDA graph is masked without a report.
    """

    def __init__(self, nonfinite: NonFinite) -> None:
        self.nonfinite = nonfinite
        self.found_inf: Tensor | None = None
        self.needs_rescaling = False
        """Whether squares of this step's gradients may overflow."""
        self._pending: list[tuple[Tensor, list[str], torch.cuda.Event | None]] = []

    def check(self, names: list[str], gradients: list[Tensor], deferred: bool, reduce: Reduce = no_reduce) -> bool:
        """Whether to run the update; with "raise", a ValueError names the bad parameters.

        ``reduce`` sums over the ranks that hold the gradients, so that all of them decide alike.
        """
        if not is_captured():
            self._read()
        self.found_inf, self.needs_rescaling = None, False
        for name, gradient in zip(names, gradients, strict=True):
            if gradient.is_sparse:
                raise ValueError(f"parameter {name} has a sparse gradient; use dense ones (sparse=False)")
        if not gradients:
            return True
        if deferred:
            # The maximum of an empty tensor is undefined.
            gradients = [g if g.numel() else g.new_zeros(1) for g in gradients]
            nans = reduce(torch.stack(torch._foreach_norm(gradients, float("inf"))) * 0)  # 0 for what is finite
            self.found_inf = nans.sum().float().nan_to_num_(1)
            if not is_captured():
                event = torch.cuda.Event() if nans.is_cuda else None
                self._pending.append((nans.to("cpu", non_blocking=True), names, event))
                if event is not None:
                    event.record(torch.cuda.current_stream(nans.device))
            return True
        # One fast pass over the gradients gives the sum of their norms, the one number that the host reads.
        device, norms = gradients[0].device, torch._foreach_norm(gradients)
        size = norms[0] if len(norms) == 1 else torch.stack([norm.to(device) for norm in norms]).sum()
        self.needs_rescaling = not float(reduce(size)) < _LARGE
        if not self.needs_rescaling:
            return True
        bad = reduce(torch.stack([(~g.isfinite()).any().float().to(device) for g in gradients]))
        bad_names = [name for name, is_bad in zip(names, bad.tolist(), strict=True) if is_bad]
        if bad_names and self.nonfinite != "skip":
            raise ValueError(_message("the", bad_names))
        return not bad_names

    def finish(self) -> None:
        """Wait for the checks of the last steps and read them."""
        for _, _, event in self._pending:
            if event is not None:
                event.synchronize()
        self._read()

    def _read(self) -> None:
        while self._pending and (self._pending[0][2] is None or self._pending[0][2].query()):
            nans, names, _ = self._pending.pop(0)
            if self.nonfinite != "skip" and (bad := nans.isnan()).any():
                bad_names = [name for name, is_bad in zip(names, bad.tolist(), strict=True) if is_bad]
                raise ValueError(_message("at an earlier step the", bad_names))


def is_captured() -> bool:
    """Whether what runs now is recorded as a CUDA graph. Without a GPU, torch built for CUDA cannot be asked."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def rescale_to_range(gradient: Tensor, p: Tensor) -> Tensor:
    """Scale down a point's gradient so that sums of squares of its projection cannot overflow.

    Both moments see the scaled gradient, as if it had been clipped. ``gradient`` is this rank's part.
    """
    largest = torch.finfo(gradient.dtype).max
    limit: float = 0.5 * (largest / p.numel()) ** 0.5  # squares of such entries sum to at most largest / 4
    mine = gradient.abs().amax() if gradient.numel() else gradient.new_zeros((), dtype=gradient.real.dtype)
    return gradient * (limit / largest / mesh_reduce([p])(mine / largest)).clamp(max=1)


def _message(when: str, names: list[str]) -> str:
    return (
        f"{when} gradient of parameter {', '.join(names[:5])}{', ...' if len(names) > 5 else ''} holds NaN or Inf; the update "
        "was skipped. Lower the learning rate, clip gradients, or pass nonfinite='skip' to skip such steps silently"
    )
