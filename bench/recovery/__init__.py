"""What the loss and the return of a machine cost, beside torchft: `python -m bench.recovery`."""
