"""Models that come with Atoll; any other PyTorch model works as well.

May import errors and model_hub.
Start with `registry.py` and `contract.py`.
"""

from atoll.models.causal_lm import CausalLM
from atoll.models.classifier import Classifier
from atoll.models.contract import Trainable
from atoll.models.custom import build_custom, check_context, is_custom
from atoll.models.gpt import GPT, GPTConfig
from atoll.models.gpt2 import GPT2, GPT2Config
from atoll.models.language import LanguageModel
from atoll.models.llama import Llama, LlamaConfig
from atoll.models.pretrained import CausalLMConfig
from atoll.models.registry import IMAGES, MODELS, TEXT, ModelRow, build_model, model_row
from atoll.models.resnet import ResNet, ResNetConfig
from atoll.models.restored import restored
from atoll.models.vit import ViT, ViTConfig

__all__ = [
    "GPT",
    "GPT2",
    "IMAGES",
    "MODELS",
    "TEXT",
    "CausalLM",
    "CausalLMConfig",
    "Classifier",
    "GPT2Config",
    "GPTConfig",
    "LanguageModel",
    "Llama",
    "LlamaConfig",
    "ModelRow",
    "ResNet",
    "ResNetConfig",
    "Trainable",
    "ViT",
    "ViTConfig",
    "build_custom",
    "build_model",
    "check_context",
    "is_custom",
    "model_row",
    "restored",
]
