"""What is done with a trained model: `atoll export`, `push`, `chat`, `evaluate`.

May import what cli may. Start with `export.py`.
"""
