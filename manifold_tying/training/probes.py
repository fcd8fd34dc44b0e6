"""POET's diagnostics of a run: spectra, and rotation and orthogonality of R and P."""

from typing import Any

import torch
from torch import Tensor, nn

from manifold_tying import diagnostics, precision
from manifold_tying.diagnostics import entropy_of
from manifold_tying.optim import MergeSchedule
from manifold_tying.poet import Side, equivalences, rotated_columns, rotated_rows
from manifold_tying.training.hf_model import Model
from manifold_tying.training.processes import gathered

QUANTILES = 11  # of the singular values: the smallest, the deciles, the largest


class Probes:
    """Measures every linear layer of the middle block, one weight of each kind, at every evaluation of a run.

    For any body: spectrum and hyperspherical energy of W. For a POET body also R and P, the products over all merges,
    R <- R_t R and P <- P P_t, so that W = R W0 P with the initial W0; and the largest e_orth of the factors since the last
    measurement, over all weights of the model. e_orth peaks just before a merge, which resets it. (POET, figures 1, 2 and
    10 to 16.)

    Call :meth:`step` after the optimizer's step and before the schedule's.
    """

    def __init__(self, model: Model, schedule: MergeSchedule | None) -> None:
        middle = len(model.blocks) // 2
        parts = model.blocks[middle].named_modules()
        linears = ((name, part) for name, part in parts if isinstance(part, nn.Linear) and ".lora_" not in name)
        self._layers = {f"blocks.{middle}.{name}": part for name, part in linears}
        self._schedule = schedule
        self._model = model
        self._find_equivalences()
        self._blocks = list(model.blocks) if self._equivalences else [model.blocks[middle]]
        self._errors = torch.zeros(len(self._equivalences), 2, dtype=torch.float64)  # of R and of P
        self._rotations = {  # R (m, m) and P (n, n) over all merges
            name: [torch.eye(size, device=part.ordered_base.device) for size in part.ordered_base.shape]
            for name, (part, _) in self._equivalences.items()
            if name in self._layers
        }

    def _find_equivalences(self) -> None:
        """Repeated at each use: FSDP2 replaces the parameters while they are gathered."""
        found = equivalences(self._model)
        self._equivalences = {path.removesuffix(".weight"): (part, stored) for path, part, stored in found}

    @torch.no_grad()
    def step(self) -> None:
        """Accumulate R and P if the schedule's next step will merge them."""
        if self._schedule is not None and (self._schedule.steps + 1) % self._schedule.every == 0:
            with gathered(*self._blocks):
                self._find_equivalences()
                self._update_errors()
                for name, totals in self._rotations.items():
                    for total, new in zip(totals, self._turned(name), strict=True):
                        total.copy_(new)

    @torch.no_grad()
    def measure(self) -> dict[str, Any]:
        """{"orthogonality_error": the model's largest since the last call or None, "weights": {name: numbers}}.

        Collective under FSDP2: it gathers the measured blocks.
        """
        with gathered(*self._blocks):
            self._find_equivalences()
            self._update_errors()
            weights = {name: _spectrum(layer.weight) for name, layer in self._layers.items()}
            for place, name in enumerate(self._equivalences):
                if name in self._rotations:
                    errors = self._errors[place].tolist()
                    for side, turned, error in zip("RP", self._turned(name), errors, strict=True):
                        weights[name][side] = {**_turning(turned), "orthogonality_error": error}
        largest = self._errors.max().item() if len(self._errors) else None
        self._errors.zero_()
        return {"orthogonality_error": largest, "weights": weights}

    def state_dict(self) -> dict[str, Tensor]:
        """The accumulated tensors themselves, contiguous."""
        named = {f"{name}.{side}": of[place] for name, of in self._rotations.items() for place, side in enumerate("RP")}
        return {**named, "errors": self._errors}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        for key, value in self.state_dict().items():
            value.copy_(state[key])

    def _sides(self, name: str) -> tuple[Side, Side]:
        part, stored = self._equivalences[name]
        return part.sides(stored)

    def _turned(self, name: str) -> tuple[Tensor, Tensor]:
        """R and P over all merges and the current factors."""
        (total_R, total_P), (R, P) = self._rotations[name], self._sides(name)
        with precision.full_precision(total_R.device):
            return rotated_rows(total_R, *R), rotated_columns(total_P, *P)

    def _update_errors(self) -> None:
        for place, (name, (part, _)) in enumerate(self._equivalences.items()):
            for side, (blocks, _), n in zip(range(2), self._sides(name), part.ordered_base.shape, strict=True):
                squares = [(G.shape[-1] * diagnostics.orthogonality_error(G) ** 2).sum() for G in blocks]
                error = (sum(squares, torch.zeros(())) / n).sqrt()
                self._errors[place, side] = max(self._errors[place, side].item(), error.item())


def _turning(R: Tensor) -> dict[str, float]:
    vector, trace = diagnostics.vector_probe(R), diagnostics.trace_probe(R)
    return {"vector": vector.item(), "trace": trace.mean.item(), "trace_std": trace.std.item()}


def _spectrum(weight: Tensor) -> dict[str, Any]:
    sigma = diagnostics.singular_values(weight)
    levels = torch.linspace(0, 1, QUANTILES, dtype=sigma.dtype, device=sigma.device)
    return {
        "singular_values": torch.quantile(sigma, levels).tolist(),
        "svd_entropy": entropy_of(sigma).item(),
        "hyperspherical_energy": diagnostics.hyperspherical_energy(weight).item(),
    }
