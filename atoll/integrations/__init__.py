"""What other people's training loops need to train with others; each imported where it is used.

May import run.
Start with the file of your trainer.
"""
