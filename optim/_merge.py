"""POET's one clock: merging, forgetting moments, relaxed clipping."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from manifold_tying import linalg
from manifold_tying.optim._base import RiemannianOptimizer

_START_FROM_ZEROS = (RiemannianOptimizer, torch.optim.Adam)  # AdamW is an Adam
WATCHES = 4  # times between merges that the norm of the skew matrices is looked at: it costs a few products of a vector


class MergeSchedule:
    """Merge-then-reinitialize every so many optimizer steps, and what belongs to it. (POET, section 3.2 and appendix E.)

        schedule = MergeSchedule(model, optimizer, every=400)
        for batch in batches:
            loss(batch).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), schedule.clip(0.1))
            optimizer.step()
            schedule.step()

    At each merge R and P of every equivalence are folded into W0 and start again from the identity with other blocks; the
    optimizer's state of the skew vectors (moments, step count) is zeroed, since it belongs to the blocks before; and
    clipping is relaxed for some steps, in which the moments build up again. A few times in between, and at the merge, it
    warns where the skew matrices have grown too large for their map. The clock is in the state dict, the blocks follow
    from the seed and merge count of each equivalence: a resumed run merges when and as an uninterrupted one does.

    Args:
        model: with equivalences in it.
        optimizer: that trains their skew vectors; any that makes ``optimizer.state[p]`` where it is not there.
        every: steps between merges, T_m.
        relax_steps: for how many steps after a merge :meth:`clip` is relaxed.
        relaxed: by which factor. (The paper says for how long and not by how much.)
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        every: int = 400,
        *,
        relax_steps: int = 10,
        relaxed: float = 10.0,
    ) -> None:
        linalg.check_whole("every", every, 1)
        linalg.check_whole("relax_steps", relax_steps, 0)
        if not relaxed >= 1:
            raise ValueError(f"expected relaxed, the factor that clipping is relaxed by, to be >= 1, got {relaxed!r}")
        self.model = model
        self.optimizer = optimizer
        self.every = every
        self.relax_steps = relax_steps
        self.relaxed = relaxed
        self.steps = 0
        trained = {p for group in optimizer.param_groups for p in group["params"]}
        found = list(_equivalences(model))
        if not found:
            raise ValueError("the model has no equivalence to merge; call equivalence or equivalence_ on it first")
        if not any(stored.requires_grad for _, _, stored in found):
            raise ValueError("no skew vector requires gradients; call requires_grad_() on those that are to be trained")
        if missing := [path for path, _, stored in found if stored.requires_grad and stored not in trained]:
            raise ValueError(f"the optimizer does not train {', '.join(missing)}; build it after the equivalences")

    def step(self) -> bool:
        """Count one optimizer step; merge where it is due. Returns whether it was."""
        self.steps += 1
        merges = self.steps % self.every == 0
        if merges or self.steps % -(-self.every // WATCHES) == 0:
            linalg.reshard(self.model)
            found = list(_equivalences(self.model))
            if not found:
                raise ValueError("the model has no equivalence any more; stop stepping the schedule after materialize")
            kind = type(found[0][1])
            (kind.fold_all if merges else kind.watch_all)(found)
            for _, _, stored in found if merges else ():
                self._forget(stored)
        return merges

    def clip(self, norm: float) -> float:
        """The norm to clip gradients to at the coming step: ``relaxed`` times as much soon after a merge."""
        since = self.steps % self.every
        return norm * self.relaxed if self.steps >= self.every and since < self.relax_steps else norm

    def _forget(self, stored: Tensor) -> None:
        """Put the optimizer's state of a parameter back to what it was at the start."""
        if isinstance(
            self.optimizer, _START_FROM_ZEROS
        ):  # in place: a captured or compiled step holds on to the tensors
            for value in self.optimizer.state.get(stored, {}).values():
                value.zero_()
        else:
            self.optimizer.state.pop(stored, None)

    def state_dict(self) -> dict[str, Any]:
        """The clock."""
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set the clock."""
        self.steps = int(state["steps"])


def _equivalences(model: nn.Module) -> Iterator[tuple[str, Any, Tensor]]:
    """(full name, parametrization, stored vector) of whatever can be folded; found as param_groups finds manifolds."""
    for path, module in model.named_modules():
        if isinstance(module, parametrize.ParametrizationList) and hasattr(module[0], "fold_all"):
            yield (
                path.replace("parametrizations.", ""),
                module[0],
                dict(module.named_parameters(recurse=False))["original"],
            )
