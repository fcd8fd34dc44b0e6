"""What a person sees at the end of an ablation: findings, a table, curves and one self-contained page."""

from ._curves import plot_curves as plot_curves
from ._experiment import Experiment as Experiment
from ._experiment import Run as Run
from ._findings import findings as findings
from ._page import write_report as write_report
from ._reading import load_experiment as load_experiment
from ._terminal import summary_table as summary_table
