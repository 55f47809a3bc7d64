"""The run table, one row a run: read, checked, split into N_once and N_rec, written.

What `training` and `model_cards` take from `scaling` is here alone.
"""

from .checks import is_finished, left_out, status_of
from .files import SCHEMA_VERSION, collect_runs, prepare, read_object, read_table
from .formats import read_raw, write_table

__all__ = [
    "SCHEMA_VERSION",
    "collect_runs",
    "is_finished",
    "left_out",
    "prepare",
    "read_object",
    "read_raw",
    "read_table",
    "status_of",
    "write_table",
]
