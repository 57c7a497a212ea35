"""Corpora, tasks and their splits, from files, the hub and packages."""
