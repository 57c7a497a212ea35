"""Experiments over runs: grids, label consistency."""
