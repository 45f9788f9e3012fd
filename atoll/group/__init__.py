"""Who is alive this round, and how their tensors meet: alone, in memory, direct or relayed."""
