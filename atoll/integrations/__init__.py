"""Callbacks for other libraries' training loops; each module imports its library.

May import run and system.
Start with the file of your trainer.
"""
