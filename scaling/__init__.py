"""Scaling laws of looped language models: from a run table to φ with its interval.

Works on any run table (see `runs`), without the rest of the project and without torch.
"""

from .analysis import Analysis, analyse
from .bootstrap import PhiInterval, bootstrap
from .fit import ChinchillaFit, JointFit, fit_chinchilla, fit_joint
from .frontier import architectures, frontier, optimum
from .isoflops import IsoFlopsMinimum, isoflops_minima
from .laws import Chinchilla, JointLaw
from .outputs import write_outputs
from .runs import collect_runs, read_table, write_table
from .split import SPLITS, split_parameters
from .table import RunTable

__all__ = [
    "SPLITS",
    "Analysis",
    "Chinchilla",
    "ChinchillaFit",
    "IsoFlopsMinimum",
    "JointFit",
    "JointLaw",
    "PhiInterval",
    "RunTable",
    "analyse",
    "architectures",
    "bootstrap",
    "collect_runs",
    "fit_chinchilla",
    "fit_joint",
    "frontier",
    "isoflops_minima",
    "optimum",
    "read_table",
    "split_parameters",
    "write_outputs",
    "write_table",
]
