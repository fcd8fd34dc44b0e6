"""Optimizers for parameters on manifolds, with torch.optim's interface."""

from typing import TYPE_CHECKING, Any

from manifold_tying._extra import needs_extra
from manifold_tying.optim.adam import RiemannianAdam as RiemannianAdam
from manifold_tying.optim.distances import drift as drift
from manifold_tying.optim.groups import param_groups as param_groups
from manifold_tying.optim.merge import MERGE_EVERY as MERGE_EVERY
from manifold_tying.optim.merge import MergeSchedule as MergeSchedule
from manifold_tying.optim.muon import RiemannianMuon as RiemannianMuon
from manifold_tying.optim.sgd import RiemannianSGD as RiemannianSGD

if TYPE_CHECKING:
    from manifold_tying.optim.trainer_callback import DriftCallback as DriftCallback
    from manifold_tying.optim.trainer_callback import MergeCallback as MergeCallback
else:

    def __getattr__(name: str) -> Any:
        """Lazy import: callbacks import transformers, which nothing else here needs."""
        if name not in ("DriftCallback", "MergeCallback"):
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        with needs_extra("huggingface", f"{name} needs"):
            from manifold_tying.optim.trainer_callback import DriftCallback, MergeCallback

        return DriftCallback if name == "DriftCallback" else MergeCallback
