"""The two papers' comparisons as recipes, each one command, at the size that is asked for."""

from manifold_tying.training.papers.recipes import RECIPES as RECIPES
from manifold_tying.training.papers.recipes import ReproduceConfig as ReproduceConfig
from manifold_tying.training.papers.recipes import reproduce as reproduce
