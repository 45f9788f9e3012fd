"""Whether this moment is a good one for work: battery, network, owner, lid, sleep, quiet hours."""
