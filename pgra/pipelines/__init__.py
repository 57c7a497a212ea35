"""Methods whole, each reading like its paper's algorithm."""
