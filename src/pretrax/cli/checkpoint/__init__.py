"""Inspect, compare, average and export checkpoints."""
