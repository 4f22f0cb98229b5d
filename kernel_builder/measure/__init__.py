"""Measure a built kernel beside its peers: correctness against float64, cold-cache device time and host overhead."""
