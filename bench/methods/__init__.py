"""Every method on one small language model, at equal tokens: `python -m bench.methods`."""
