"""Reinforcement learning of language models: tasks with rewards that a program can check."""
