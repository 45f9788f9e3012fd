"""Adapters on a base in 4 bits, with bitsandbytes, on the processor too; or why not."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from atoll.checkpoint import DirectoryStore
from atoll.errors import ConfigError
from atoll.export.opened import open_model
from atoll.group.in_process.groups import MemoryGroups
from atoll.models.pretrained import CausalLMConfig, make_pretrained
from atoll.train.build import build
from tests.models.tiny import count_chats, save_tiny
from tests.train.test_tuned import _one_at_a_time, spec_of, train

__all__ = ["_one_at_a_time"]

pytest.importorskip("transformers", reason="pip install 'atoll[hf]'")
pytest.importorskip("peft", reason="pip install 'atoll[tune]'")
INSTALLED = importlib.util.find_spec("bitsandbytes") is not None
needed = pytest.mark.skipif(not INSTALLED, reason="pip install bitsandbytes")


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("pretrained"))


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return count_chats(tmp_path_factory.mktemp("data") / "chats.jsonl")


@pytest.fixture(autouse=True)
def _as_bitsandbytes_found_it() -> Iterator[None]:
    """Keep the number of threads, which the library sets."""
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.mark.skipif(INSTALLED, reason="bitsandbytes is installed")
def test_without_its_library_qlora_says_what_is_needed(pretrained: Path, chats: Path) -> None:
    spec = spec_of(pretrained, chats, method="qlora")
    with pytest.raises(ConfigError, match="4 bits needs a library") as caught:
        build(spec, member="w0", slot=0, num_slots=1)
    assert str(caught.value.remedy).startswith("pip install bitsandbytes")


def test_a_gguf_file_is_refused_in_four_bits(pretrained: Path) -> None:
    adapter = {"method": "qlora"}
    config = CausalLMConfig(source=str(pretrained), gguf="model.gguf", adapter=adapter)
    with pytest.raises(ConfigError, match="a GGUF file cannot be put into 4 bits"):
        make_pretrained(config)


@needed
def test_the_base_has_four_bits_and_learns_with_adapters(
    pretrained: Path, chats: Path, tmp_path: Path
) -> None:
    spec = spec_of(pretrained, chats, method="qlora")
    built = build(spec, member="w0", slot=0, num_slots=2)
    base: Any = built.model.get_submodule("model.layers.0.self_attn.q_proj.base_layer")
    assert (base.weight.dtype, base.weight.numel()) == (torch.uint8, 32 * 32 // 2)
    store = DirectoryStore(tmp_path / "store", job="j")
    first, second = train(spec, tmp_path / "whole", store=store)
    assert first["digest"] == second["digest"]
    assert first["loss_final"] < 0.95 * first["first_loss_sum"] / first["first_tokens"]

    middle = MemoryGroups(2, start_round=3)
    again = train(spec, tmp_path / "again", groups=middle, store=store, resume_round=3)
    assert [one["digest"] for one in again] == [first["digest"]] * 2

    whole = open_model(tmp_path / "whole" / "w0" / "model.safetensors").whole()
    assert {parameter.dtype for parameter in whole.parameters()} == {torch.float32}
