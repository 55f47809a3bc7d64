"""Scaling laws of looped language models: from a run table to φ with its interval, and to Δφ.

Works on any run table (see `runs`), without the rest of the project and without torch. Folders import in
one direction: solver, runs, fits, optima, comparison, planning, reports.
"""

from .comparison.compare import Comparison, compare
from .comparison.pairing import variant_table
from .fits.bootstrap import PhiInterval, bootstrap
from .fits.criteria import LawComparison, compare_laws
from .fits.fit import ChinchillaFit, JointFit, fit_chinchilla, fit_joint
from .fits.iso_parameter import IsoParameterFit, fit_iso_parameter
from .fits.per_architecture import FloorComparison, fit_floors
from .fits.profile import PhiProfile, profile_phi
from .fits.saturation import SaturationFit, fit_saturation
from .fits.sensitivity import SplitSensitivity, split_sensitivity
from .optima.frontier import architectures, frontier, optimum
from .optima.isoflops import IsoFlopsMinimum, isoflops_minima
from .planning.design import Grid, iso_depth, planned_runs
from .planning.forecast import Forecast, simulate
from .planning.noise import Noise
from .planning.planned import Plan, plan
from .reports.analysis import Analysis, analyse
from .reports.axes import AxisFit, axis_fits
from .reports.findings import Findings, findings
from .reports.full_report import FullReport, full_report
from .reports.write import write_outputs
from .runs import collect_runs, read_table, write_table
from .runs.split import SPLITS, split_parameters
from .runs.table import RunTable
from .solver.laws import Chinchilla, JointLaw

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
