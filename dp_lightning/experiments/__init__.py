"""Grids of runs: where they run, and the tables and figures that are made from their results."""
