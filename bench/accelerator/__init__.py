"""What this machine's accelerator does for Atoll: `python -m bench.accelerator`."""
