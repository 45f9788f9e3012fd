"""One stage of a model in one process, for microbatches that may come in any order.

May import the parent package and `pipeline`; knows no network. Start reading at `runner.py`;
`stage.py` cuts the model, `activations.py` encodes what passes between stages.
"""
