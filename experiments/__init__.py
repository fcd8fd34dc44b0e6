"""The two papers' comparisons as recipes, each one command, at the size that is asked for."""

from experiments.recipes import RECIPES as RECIPES
from experiments.recipes import ReproduceConfig as ReproduceConfig
from experiments.recipes import reproduce as reproduce
