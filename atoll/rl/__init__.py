"""Reinforcement learning: many policies, each with its own environment, and one pooled critic."""
