"""Metrics, intervals and reports."""
