"""What a person sees at the end of an ablation: findings, a table, curves and one self-contained page."""

from manifold_tying.training.report._comparison import load_experiments as load_experiments
from manifold_tying.training.report._experiment import Experiment as Experiment
from manifold_tying.training.report._experiment import Run as Run
from manifold_tying.training.report._findings import findings as findings
from manifold_tying.training.report._page import write_report as write_report
from manifold_tying.training.report._reading import load_experiment as load_experiment
from manifold_tying.training.report._terminal import shown as shown
from manifold_tying.training.report._terminal import summary_table as summary_table
