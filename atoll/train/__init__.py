"""The built-in trainer: loop, metrics, evaluation, summary and report."""
