"""What policies agree on by an outer strategy: their weights, and nothing that is counted."""

from __future__ import annotations

from torch import nn


class ParametersOf(nn.Module):
    """The very parameters of a module, without its buffers.

    Running means and variances of observations are no weights: a strategy that steps beyond a mean,
    as momentum does, would make variances negative. Each member keeps its own; those of one task
    come to the same.
    """

    def __init__(self, module: nn.Module) -> None:
        """Hold the parameters of a module."""
        super().__init__()
        for name, parameter in module.named_parameters():
            self.register_parameter(name.replace(".", "_"), parameter)
