"""POET's merge schedule: merging, resetting moments, clipping after a merge."""

import math

import torch
from torch import Tensor, nn

from manifold_tying import distributed, precision
from manifold_tying.optim.adam import RiemannianAdam
from manifold_tying.poet import check_drift, equivalences, merge_all

_ZERO_INITIAL_STATE = (RiemannianAdam, torch.optim.Adam)  # AdamW is an Adam
MERGE_EVERY = 400  # POET's T_m
DRIFT_CHECKS = 4  # checks of R and P between merges; each forms them once


class MergeSchedule:
    """Merge-then-reinitialize every N optimizer steps. (POET, section 3.2 and appendix E.)

        schedule = MergeSchedule(model, optimizer, every=400)
        for batch in batches:
            loss(batch).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), schedule.clip(0.1))
            optimizer.step()
            schedule.step()

    Each merge multiplies R and P of every equivalence into W0 and restarts them at the identity with new blocks. The
    optimizer's state of the skew vectors (moments, step count) belongs to the old blocks, so it is zeroed. Adam takes its
    largest steps without moments, so :meth:`clip` lowers the clipping norm after a merge and then raises it again. At each
    merge and a few times in between, the schedule warns if the skew matrices have grown too large for their map.

    The state dict holds the step count; the blocks follow from the seed and merge count of each equivalence. A resumed run
    therefore merges exactly like an uninterrupted one.

    Args:
        model: contains equivalences.
        optimizer: trains the skew vectors; it must recreate missing ``optimizer.state[p]``.
        every: steps between merges, T_m; the default is the paper's.
        clip_ramp_steps: steps after a merge until :meth:`clip` returns the full norm again.
        clip_factor: factor on the norm right after a merge; below 1 clips harder, above 1 less.
        clip_until_step: last step at which :meth:`clip` changes the norm. The defaults are those of POET's code.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        every: int = MERGE_EVERY,
        *,
        clip_ramp_steps: int = 10,
        clip_factor: float = 0.1,
        clip_until_step: int = 2000,
    ) -> None:
        precision.check_int("every", every, 1)
        precision.check_int("clip_ramp_steps", clip_ramp_steps, 0)
        precision.check_int("clip_until_step", clip_until_step, 0)
        if not 0 < clip_factor < math.inf:
            raise ValueError(f"expected clip_factor to be positive and finite, got {clip_factor!r}")
        self.model = model
        self.optimizer = getattr(optimizer, "optim", optimizer)  # ZeroRedundancyOptimizer's own state is empty
        self.every = every
        self.clip_ramp_steps, self.clip_factor, self.clip_until_step = clip_ramp_steps, clip_factor, clip_until_step
        self.steps = 0
        trained = {p for group in optimizer.param_groups for p in group["params"]}
        found = equivalences(model)
        if not found:
            raise ValueError("the model has no equivalence to merge; call equivalence or equivalence_ on it first")
        if not any(stored.requires_grad for _, _, stored in found):
            raise ValueError("no skew vector requires gradients; call requires_grad_() on those to train")
        if missing := [path for path, _, stored in found if stored.requires_grad and stored not in trained]:
            raise ValueError(f"the optimizer does not train {', '.join(missing)}; build it after the equivalences")

    def step(self) -> bool:
        """Count one optimizer step and merge if it is due. Returns whether it merged."""
        self.steps += 1
        merges = self.steps % self.every == 0
        if merges or self.steps % -(-self.every // DRIFT_CHECKS) == 0:
            distributed.reshard_fsdp(self.model)
            found = equivalences(self.model)
            if not found:
                raise ValueError("the model has no equivalence any more; do not step the schedule after materialize")
            if merges:
                merge_all(found)
                for _, _, stored in found:
                    self._reset_state(stored)
            else:
                check_drift(found)
        return merges

    def clip(self, norm: float) -> float:
        """Clipping norm for the next step: ``clip_factor`` times norm after a merge, rising back to norm."""
        since = self.steps % self.every
        if not (self.every <= self.steps <= self.clip_until_step and since < self.clip_ramp_steps):
            return norm
        return norm * (self.clip_factor + (1 - self.clip_factor) * since / self.clip_ramp_steps)

    def _reset_state(self, stored: Tensor) -> None:
        """Reset the optimizer's state of a parameter to its initial values."""
        if isinstance(self.optimizer, _ZERO_INITIAL_STATE):
            # In place: a captured or compiled step refers to these tensors.
            for value in self.optimizer.state.get(stored, {}).values():
                value.zero_()
        else:
            self.optimizer.state.pop(stored, None)

    def state_dict(self) -> dict[str, int]:
        """The step count."""
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Restore the step count."""
        self.steps = state["steps"]
