"""The report of an ablation: findings, a table, curves and one self-contained page."""

from manifold_tying.training.report.comparison import load_experiments as load_experiments
from manifold_tying.training.report.findings import findings as findings
from manifold_tying.training.report.load import Experiment as Experiment
from manifold_tying.training.report.load import Run as Run
from manifold_tying.training.report.load import load_experiment as load_experiment
from manifold_tying.training.report.render import write_report as write_report
from manifold_tying.training.report.tables import shown as shown
from manifold_tying.training.report.tables import summary_table as summary_table
