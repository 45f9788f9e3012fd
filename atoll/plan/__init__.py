"""What a job needs, predicted before it runs: bytes per rank, and seconds per batch of a pipeline.

May import strategies, train, island and the rooms below them, except models. For memory torch makes
meta tensors only. Start with memory.py; for pipelines with pipelines.py, which loads no torch.
"""
