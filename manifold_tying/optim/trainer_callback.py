"""Callbacks for the Trainer of transformers: POET's merge schedule, and the distance of weights from their manifolds."""

from typing import Any

from torch import nn
from transformers import Trainer, TrainerCallback

from manifold_tying.optim.distances import drift
from manifold_tying.optim.merge import MERGE_EVERY, MergeSchedule
from manifold_tying.poet import keep_plain_weights


class MergeCallback(TrainerCallback):
    """Runs a :class:`MergeSchedule` in the Trainer: merges, and lowers the clipping norm after each merge.

        mt.equivalence_(model, block_size=64)
        Trainer(model, args, train_dataset=data, callbacks=[MergeCallback(every=400)]).train()

    The schedule follows the Trainer's step count, so a run resumed from a checkpoint merges at the same steps.

    Args:
        every: optimizer steps between merges; the default is that of :class:`MergeSchedule`.
        options: options of :class:`MergeSchedule`.
    """

    def __init__(self, every: int = MERGE_EVERY, **options: Any) -> None:
        self.every = every
        self.options = options
        self.schedule: MergeSchedule | None = None
        self.norm = self.lowered = 0.0

    def on_train_begin(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        model: nn.Module = parts["model"]
        optimizer = getattr(parts["optimizer"], "optimizer", parts["optimizer"])  # accelerate wraps it
        self.schedule = MergeSchedule(model, optimizer, self.every, **self.options)
        self.schedule.load_state_dict({"steps": state.global_step})
        if args.max_grad_norm != self.lowered:  # else an interrupted training left it so
            self.norm = args.max_grad_norm
        keep_plain_weights(model)

    def on_step_begin(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        if self.schedule is not None:
            args.max_grad_norm = self.lowered = self.schedule.clip(self.norm)

    def on_step_end(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        if self.schedule is not None:
            self.schedule.step()

    def on_train_end(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        args.max_grad_norm = self.norm


class DriftCallback(TrainerCallback):
    """Logs "drift", the largest of :func:`drift`, whenever the Trainer logs the loss.

        trainer.add_callback(DriftCallback(trainer))

    The numbers are in the Trainer's log history, so a run resumed from a checkpoint keeps the earlier ones.

    Args:
        trainer: the Trainer, whose ``log`` reaches all its reports.

    Raises:
        ValueError: when training starts, if the model has neither a point nor an equivalence.
    """

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        if not drift(parts["model"]):
            raise ValueError("the model has no weight that can drift; constrain it first, or leave DriftCallback out")

    def on_step_end(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        if control.should_log:
            self.trainer.log({"drift": max(drift(parts["model"]).values())})
            control.should_log = True  # log has cleared it

    on_epoch_end = on_step_end
