"""Training runs and ablations. Needs the packages of the extra ``train``."""

from manifold_tying._extra import needs_extra as _needs_extra

with _needs_extra("train", "training and the command line need"):
    from manifold_tying.training.ablation import AblateConfig as AblateConfig
    from manifold_tying.training.ablation import ablate as ablate
    from manifold_tying.training.build import load_model as load_model
    from manifold_tying.training.checkpoint import checkpoints as checkpoints
    from manifold_tying.training.config import Settings as Settings
    from manifold_tying.training.config import TrainConfig as TrainConfig
    from manifold_tying.training.loop import train as train
    from manifold_tying.training.recipes import resolve as resolve
    from manifold_tying.training.sample import sample as sample
