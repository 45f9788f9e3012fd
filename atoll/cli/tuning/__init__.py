"""Fine-tuning: `atoll tune`.

May import what cli may. Start with `tune.py`.
"""
