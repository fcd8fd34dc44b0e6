"""Optimizers for parameters on manifolds, with torch.optim's interface."""

from manifold_tying.optim._adam import RiemannianAdam as RiemannianAdam
from manifold_tying.optim._groups import param_groups as param_groups
from manifold_tying.optim._merge import MergeSchedule as MergeSchedule
from manifold_tying.optim._sgd import RiemannianSGD as RiemannianSGD
