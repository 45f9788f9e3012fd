"""Commands that predict a job before it runs: `atoll plan`, `atoll simulate` and `atoll rehearse`.

May import what cli may, and of cli the views, jobs and access. Start with `plan.py`.
"""
