"""Callbacks for Lightning: merges and clipping norms, resumption, and the logged drift."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import manifold_tying as mt
from manifold_tying.lightning import DriftCallback, MergeCallback
from manifold_tying.optim import RiemannianAdam, drift
from manifold_tying.poet import equivalences

pytestmark = [  # Lightning's own: on workers and batch sizes, and of torch's trees
    pytest.mark.filterwarnings("ignore::lightning.fabric.utilities.warnings.PossibleUserWarning"),
    pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec:FutureWarning"),
]


class Regression(LightningModule):
    """A rotated and an orthonormal layer."""

    def __init__(self, optimizer: Any = RiemannianAdam, count: int = 1) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(mt.equivalence(nn.Linear(8, 8), block_size=4, seed=3), mt.stiefel(nn.Linear(8, 8)))
        self.optimizer, self.count = optimizer, count
        self.logged_at: list[int] = []

    def log(self, *args: Any, **options: Any) -> None:
        self.logged_at.append(self.trainer.global_step)
        super().log(*args, **options)

    def training_step(self, batch: list[Tensor], _: int) -> Tensor:
        return (self.body(batch[0]) - batch[1]).square().mean()

    def configure_optimizers(self) -> Any:
        return [self.optimizer(self.parameters(), lr=1e-2) for _ in range(self.count)]


class Norms(Callback):
    """Notes the norm that every step clips to; may interrupt after step 5."""

    def __init__(self, interrupts: bool = False) -> None:
        self.seen: list[float] = []
        self.interrupts = interrupts

    def on_before_optimizer_step(self, trainer: Trainer, *_: Any) -> None:
        assert trainer.gradient_clip_val is not None
        self.seen.append(trainer.gradient_clip_val)

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if self.interrupts and trainer.global_step == 5:
            raise RuntimeError("interrupted")


class Drifts(Callback):
    """Notes the drift after every step."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        self.seen.append(max(drift(pl_module).values()))


def trainer_in(out: Path, callbacks: list[Callback], steps: int = 10, **options: Any) -> Trainer:
    kept = ModelCheckpoint(out / "kept", "{step}", every_n_train_steps=5, save_top_k=-1)
    return Trainer(
        accelerator="cpu", max_steps=steps, callbacks=[*callbacks, kept], default_root_dir=out, logger=CSVLogger(out),
        enable_progress_bar=False, enable_model_summary=False, **options,
    )  # fmt: skip


def batches() -> DataLoader[Any]:
    x, y = torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(1)).repeat(1, 16, 1)
    return DataLoader(TensorDataset(x, y), batch_size=4)


def trained(out: Path, resume: str | None = None) -> tuple[Regression, list[float], Trainer]:
    module, norms = Regression(), Norms()
    callbacks: list[Callback] = [MergeCallback(every=4, clip_ramp_steps=2), norms]
    trainer = trainer_in(out, callbacks, gradient_clip_val=1.0, accumulate_grad_batches=2)
    trainer.fit(module, batches(), ckpt_path=resume)
    return module, norms.seen, trainer


@pytest.mark.filterwarnings("ignore:The dirpath has changed")
def test_lightning_merges_clips_and_resumes(tmp_path: Path) -> None:
    whole, norms, trainer = trained(tmp_path / "whole")
    assert norms == pytest.approx([1, 1, 1, 1, 0.1, 0.55, 1, 1, 0.1, 0.55]) and trainer.gradient_clip_val == 1
    resumed, later, _ = trained(tmp_path / "resumed", str(tmp_path / "whole/kept/step=5.ckpt"))
    assert later == pytest.approx(norms[5:])
    for (_, a, _), (_, b, _) in zip(equivalences(whole), equivalences(resumed), strict=True):
        assert int(a.merges) == int(b.merges) == 2 and torch.equal(a.in_places, b.in_places)
    for name, value in whole.state_dict().items():
        torch.testing.assert_close(resumed.state_dict()[name], value, rtol=0, atol=1e-6)


def test_an_interrupted_training_leaves_the_users_norm(tmp_path: Path) -> None:
    norms = Norms(interrupts=True)
    trainer = trainer_in(tmp_path, [MergeCallback(every=4, clip_ramp_steps=2), norms], gradient_clip_val=1.0)
    with pytest.raises(RuntimeError, match="interrupted"):
        trainer.fit(Regression(), batches())
    assert norms.seen[-1] == pytest.approx(0.1) and trainer.gradient_clip_val == 1


@pytest.mark.filterwarnings("ignore:torch.optim.adam.Adam moved")
@pytest.mark.parametrize("optimizer", [RiemannianAdam, torch.optim.Adam])
def test_lightning_logs_drift(optimizer: Any, tmp_path: Path) -> None:
    drifts = Drifts()
    trainer = trainer_in(tmp_path, [DriftCallback(), drifts], 6, log_every_n_steps=2)
    trainer.fit(Regression(optimizer), batches())
    logged = (tmp_path / "lightning_logs/version_0/metrics.csv").read_text().split()
    head, rows = logged[0].split(","), [line.split(",") for line in logged[1:]]
    assert [int(row[head.index("step")]) for row in rows] == [1, 3, 5]  # Lightning counts from 0
    found = [float(row[head.index("drift")]) for row in rows]
    assert found == pytest.approx(drifts.seen[1::2], rel=1e-5)
    if optimizer is RiemannianAdam:
        assert max(found) < 1e-6
    else:
        assert found == sorted(found) and found[0] > 1e-4
    assert trainer.callback_metrics["drift"] == pytest.approx(found[-1])


def test_drift_is_measured_once_a_step(tmp_path: Path) -> None:
    module = Regression()
    trainer_in(tmp_path, [DriftCallback()], 6, log_every_n_steps=2, accumulate_grad_batches=2).fit(module, batches())
    assert module.logged_at == [2, 4, 6]


@pytest.mark.parametrize(
    ("callback", "module", "message"),
    [
        (DriftCallback(), "plain", "no weight that can drift"),
        (MergeCallback(), "plain", "no equivalence to merge"),
        (MergeCallback(), "two optimizers", "expected one optimizer, got 2"),
    ],
)
def test_what_cannot_work_is_refused_before_the_first_step(
    callback: Callback, module: str, message: str, tmp_path: Path
) -> None:
    built = Regression(torch.optim.SGD, 2 if module == "two optimizers" else 1)
    if module == "plain":
        built.body = nn.Sequential(nn.Linear(8, 8))
    else:
        built.automatic_optimization = False
    before = {name: value.clone() for name, value in built.state_dict().items()}
    trainer = trainer_in(tmp_path, [callback], 1, gradient_clip_val=None)
    with pytest.raises(ValueError, match=message):
        trainer.fit(built, batches())
    assert all(torch.equal(value, before[name]) for name, value in built.state_dict().items())
