"""A model split into stages, which a batch passes through in microbatches.

May import the parent package, which imports this only in `divide.py`. Start reading at
`pipeline.py`; `cuts.py` decides the cuts, `shapes.py` the transfers between stages.
"""
