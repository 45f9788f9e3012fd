"""How one optimizer step is computed."""
