"""Verbs that predict a job before it runs: `atoll plan`, `atoll simulate` and `atoll rehearse`."""
