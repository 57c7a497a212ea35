"""Studies: grids of runs, what evidence is worth, what a run has yet to read."""
