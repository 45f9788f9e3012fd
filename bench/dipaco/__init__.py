"""DiPaCo beside a dense model and independent experts: `python -m bench.dipaco`."""
