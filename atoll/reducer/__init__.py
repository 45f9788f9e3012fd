"""The reducer: sums members' encoded vectors in fp32 and sends the mean back through the hub."""
