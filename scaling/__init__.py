"""Scaling laws of looped language models: from a run table to φ with its interval, and to Δφ.

Works on any run table (see `runs`), without the rest of the project and without torch. A function has
the name of its module where it is the module's one purpose: `scaling.compare` is the function.
"""

from .analysis import Analysis, analyse
from .axes import AxisFit, axis_fits
from .bootstrap import PhiInterval, bootstrap
from .compare import Comparison, compare
from .criteria import LawComparison, compare_laws
from .design import Grid, iso_depth, planned_runs
from .findings import Findings, findings
from .fit import ChinchillaFit, JointFit, fit_chinchilla, fit_joint
from .forecast import Forecast, simulate
from .frontier import architectures, frontier, optimum
from .full_report import FullReport, full_report
from .iso_parameter import IsoParameterFit, fit_iso_parameter
from .isoflops import IsoFlopsMinimum, isoflops_minima
from .laws import Chinchilla, JointLaw
from .noise import Noise
from .outputs import write_outputs
from .pairing import variant_table
from .per_architecture import FloorComparison, fit_floors
from .planned import Plan, plan
from .profile import PhiProfile, profile_phi
from .runs import collect_runs, read_table, write_table
from .saturation import SaturationFit, fit_saturation
from .sensitivity import SplitSensitivity, split_sensitivity
from .split import SPLITS, split_parameters
from .table import RunTable

__all__ = [
    "SPLITS",
    "Analysis",
    "AxisFit",
    "Chinchilla",
    "ChinchillaFit",
    "Comparison",
    "Findings",
    "FloorComparison",
    "Forecast",
    "FullReport",
    "Grid",
    "IsoFlopsMinimum",
    "IsoParameterFit",
    "JointFit",
    "JointLaw",
    "LawComparison",
    "Noise",
    "PhiInterval",
    "PhiProfile",
    "Plan",
    "RunTable",
    "SaturationFit",
    "SplitSensitivity",
    "analyse",
    "architectures",
    "axis_fits",
    "bootstrap",
    "collect_runs",
    "compare",
    "compare_laws",
    "findings",
    "fit_chinchilla",
    "fit_floors",
    "fit_iso_parameter",
    "fit_joint",
    "fit_saturation",
    "frontier",
    "full_report",
    "iso_depth",
    "isoflops_minima",
    "optimum",
    "plan",
    "planned_runs",
    "profile_phi",
    "read_table",
    "simulate",
    "split_parameters",
    "split_sensitivity",
    "variant_table",
    "write_outputs",
    "write_table",
]
