"""Models that come with Atoll; any other PyTorch model works as well."""

from atoll.models.gpt import GPT, GPTConfig
from atoll.models.table import MODELS, ModelRow, build_model

__all__ = ["GPT", "MODELS", "GPTConfig", "ModelRow", "build_model"]
