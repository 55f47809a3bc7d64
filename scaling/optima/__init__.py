"""What a law or the runs say about compute-optimal models: minima, frontiers, gaps, equal sizes."""
