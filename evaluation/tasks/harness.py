"""What the YAML files name, also for an `lm_eval` that runs outside the checkout."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from evaluation.task import LoopedTask, OwnShots  # noqa: E402

__all__ = ["LoopedTask", "OwnShots"]
