"""Strategies, inner pipeline: pipeline stages of a model: cuts, schedules and their timing.

It may import strategies/inner. Start reading at `pipeline.py`.
"""
