"""Laws fitted to a run table, their intervals, and how they compare."""
