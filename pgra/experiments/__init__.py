"""Experiments over runs: grids, searches, streams with a memory, label consistency."""
