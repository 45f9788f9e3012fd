"""Examples to fine-tune on: read, rendered as a chat, de-duplicated, packed into rows and dealt.

May import errors and the rest of data.
Start with `dataset.py`: `load_examples` calls the others in order.
"""
