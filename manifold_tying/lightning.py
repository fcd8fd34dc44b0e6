"""Callbacks for the Trainer of Lightning: POET's merge schedule, and the distance of weights from their manifolds."""

from typing import Any

from torch.optim import Optimizer

from manifold_tying._extra import needs_extra
from manifold_tying.optim import MERGE_EVERY, MergeSchedule, drift

with needs_extra("lightning", "callbacks for Lightning need"):
    from lightning import Callback, LightningModule, Trainer


class MergeCallback(Callback):
    """Runs a :class:`~manifold_tying.optim.MergeSchedule`: merges, and lowers the Trainer's clipping norm after each merge.

        mt.equivalence_(module.model, block_size=64)  # before configure_optimizers
        Trainer(callbacks=[MergeCallback(every=400)], gradient_clip_val=0.1).fit(module, data)

    The schedule follows the Trainer's ``global_step``, so a run resumed from a checkpoint merges at the same steps. Accumulated
    batches count as one step.

    Args:
        every: optimizer steps between merges; the default is that of :class:`~manifold_tying.optim.MergeSchedule`.
        options: options of :class:`~manifold_tying.optim.MergeSchedule`.

    Raises:
        ValueError: when training starts, for more than one optimizer, or where the schedule refuses the module.
    """

    def __init__(self, every: int = MERGE_EVERY, **options: Any) -> None:
        self.every, self.options = every, options
        self.schedule: MergeSchedule | None = None
        self.norm: float | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if len(trainer.optimizers) != 1:
            raise ValueError(
                f"expected one optimizer, got {len(trainer.optimizers)}: a merge clears the moments of one"
            )
        self.schedule = MergeSchedule(pl_module, trainer.optimizers[0], self.every, **self.options)
        self.schedule.load_state_dict({"steps": trainer.global_step})
        self.norm = trainer.gradient_clip_val

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        if self.schedule is not None and self.norm is not None:
            trainer.gradient_clip_val = self.schedule.clip(self.norm)

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if self.schedule is not None and self.schedule.steps < trainer.global_step:  # not between accumulated batches
            self.schedule.step()

    def on_train_end(self, trainer: Trainer, *_: Any) -> None:
        if self.schedule is not None:
            trainer.gradient_clip_val = self.norm

    def on_exception(self, trainer: Trainer, *_: Any) -> None:
        self.on_train_end(trainer)


class DriftCallback(Callback):
    """Logs "drift", the largest of :func:`~manifold_tying.optim.drift`, every ``log_every_n_steps`` of the Trainer.

    Raises:
        ValueError: when training starts, if the module has neither a point nor an equivalence.
    """

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not drift(pl_module):
            raise ValueError("the module has no weight that can drift; constrain it first, or leave DriftCallback out")
        self.step = trainer.global_step  # the newest one that was measured, or begun with

    def on_train_batch_end(self, trainer: Any, pl_module: LightningModule, *_: Any) -> None:
        step, every = trainer.global_step, trainer.log_every_n_steps
        if every and step % every == 0 and step != self.step:  # not between accumulated batches
            self.step = step
            pl_module.log("drift", max(drift(pl_module).values()))
