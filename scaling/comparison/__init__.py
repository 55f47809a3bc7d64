"""Δφ: a variant against its baseline, and what the difference means."""
