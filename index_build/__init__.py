"""The program that builds a first-stage index: `python -m index_build`."""
