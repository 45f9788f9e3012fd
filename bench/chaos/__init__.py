"""Random faults for many minutes on a real hub and real workers: `python -m bench.chaos`."""
