"""`report.html`: the plots and tables of a run in one file. Loads no torch.

May import train.results.
Start with `report.py`.
"""
