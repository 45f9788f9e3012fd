"""How messages cross: one connection to the hub that keeps itself alive. Never loads torch."""
