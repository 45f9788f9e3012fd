"""A model cut into stages, which a batch goes through in microbatches.

May import the inner room; nothing outside of it imports this but divide.py.
Start with pipeline.py; cuts.py decides where, shapes.py what crosses a border.
"""
