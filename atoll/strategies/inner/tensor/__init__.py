"""Tensor parallelism: layers split over ranks by heads, features, vocabulary and sequence.

May import the parent package, which imports this only in `parallelize.py`. Start reading at
`plans.py` (how each layer is split), then `tensor.py` (the implementation).
"""
