"""Atoll turns the computers people already have into one training cluster."""

__version__ = "0.1.0"
