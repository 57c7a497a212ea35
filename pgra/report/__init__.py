"""Finished runs as numbers, tables and pages."""
