"""What a tensor plan says, and what is refused before anything is sent."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from atoll.config.mesh import MeshShape
from atoll.errors import ConfigError
from atoll.models import build_model
from atoll.strategies.inner.options import InnerOptions
from atoll.strategies.inner.tensor.plans import plan_of, splits
from tests.island.tensor.cases import SIZES, Case, family, make


def recipe(tensor: int = 2, **words: Any) -> InnerOptions:
    return InnerOptions(shape=MeshShape(tensor=tensor), **words)


def refused(case: Case, wanted: InnerOptions) -> str:
    model, *_ = make(case)
    with pytest.raises(ConfigError) as caught:
        plan_of(model, wanted)
    return str(caught.value)


PERCEPTRON = Case(kind="perceptron")


class TestSplits:
    def test_every_split_parameter_of_the_gpt_has_its_dimension(self) -> None:
        model, *_ = make(Case(options={"layers": 1}))
        assert splits(model, recipe()) == {
            "embedding.weight": 0,
            "blocks.0.queries_keys_values.weight": 0,
            "blocks.0.merge.weight": 1,
            "blocks.0.up.weight": 0,
            "blocks.0.down.weight": 1,
        }

    def test_biases_go_with_the_outputs_of_a_column_layer_only(self) -> None:
        model, *_ = make(PERCEPTRON)
        plan = {"first": "column", "second": "row"}
        assert splits(model, recipe(plan=plan)) == {
            "first.weight": 0, "first.bias": 0, "second.weight": 1,
        }  # fmt: skip

    def test_embedding_and_output_stay_whole_without_vocabulary(self) -> None:
        model, *_ = make(Case(options={"tie": False}))
        found = splits(model, recipe(vocabulary=False))
        assert not {"embedding.weight", "head.weight"} & set(found)
        assert {"embedding.weight", "head.weight"} <= set(splits(model, recipe()))

    def test_one_tensor_rank_has_everything(self) -> None:
        model, *_ = make(PERCEPTRON)
        assert splits(model, recipe(1)) == {}


class TestWhereFrom:
    def test_a_plan_of_the_job_file_comes_before_the_models_own(self) -> None:
        model, *_ = make(Case())
        found = plan_of(model, recipe(plan={"*.up": "column", "blocks.*.down": "row"}))
        assert set(found.words) == {f"blocks.{n}.{part}" for n in (0, 1) for part in ("up", "down")}

    def test_a_later_pattern_overrules_an_earlier_one(self) -> None:
        model, *_ = make(Case())
        plan = {"*.up": "column", "*.down": "row", "blocks.1.*": "replicate"}
        words = plan_of(model, recipe(plan=plan)).words
        assert words["blocks.0.up"] == "column"
        assert words["blocks.1.up"] == "replicate"

    def test_dotted_keys_of_a_job_file_are_tables_in_tables(self) -> None:
        model, *_ = make(Case(options={"layers": 1}))
        plan = {"blocks": {"0": {"up": "column", "down": "row"}}}
        assert plan_of(model, recipe(plan=plan)).words == {
            "blocks.0.up": "column", "blocks.0.down": "row",
        }  # fmt: skip

    def test_transformers_own_words_become_ours(self) -> None:
        model, *_ = make(Case(kind="Qwen3ForCausalLM"))
        words = plan_of(model, recipe()).words
        assert words["inner.model.layers.0.self_attn.q_proj"] == "column"
        assert words["inner.model.layers.1.mlp.down_proj"] == "row"
        assert words["inner.model.layers.0.self_attn.k_norm"] == "inside"
        assert words["inner.lm_head"] == words["inner.model.embed_tokens"] == "vocabulary"

    def test_the_library_models_of_the_table_are_split_like_that(self) -> None:
        model = build_model(
            "transformers", vocab_size=32, context=8,
            config={
                "model_type": "llama", "vocab_size": 32, "hidden_size": 16, "head_dim": 4,
                "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 4,
                "num_key_value_heads": 2, "max_position_embeddings": 8,
            },
        )  # fmt: skip
        words = plan_of(model, recipe()).words
        assert words["model.layers.0.self_attn.q_proj"] == "column"
        assert words["lm_head"] == words["model.embed_tokens"] == "vocabulary"

    @pytest.mark.parametrize(
        ("kind", "options", "part"),
        [
            ("MixtralForCausalLM", {"num_local_experts": 2}, r"mlp\.experts.*'packed_colwise'"),
        ],
    )
    def test_unknown_transformers_plans_are_refused_by_name(
        self, kind: str, options: dict[str, int], part: str
    ) -> None:
        import transformers

        library: Any = transformers
        build = getattr(library, kind)
        config: Any = {
            "vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
            "num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0, **options,
        }  # fmt: skip
        model = build(build.config_class(**config))
        with pytest.raises(ConfigError, match=r"cannot be split.*model\.layers\.\*\." + part):
            plan_of(model, recipe())

    def test_well_known_names_will_do(self) -> None:
        class Half(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.up_proj, self.down_proj = nn.Linear(4, 8), nn.Linear(8, 4)

        model = nn.Sequential(Half(), Half())
        assert plan_of(model, recipe()).words == {
            f"{n}.{name}": word
            for n in (0, 1)
            for name, word in (("up_proj", "column"), ("down_proj", "row"))
        }

    def test_gather_and_slice_split_layers_with_whole_features(self) -> None:
        model = build_model("transformers", config=family("phi3"), context=8)
        words = plan_of(model, recipe()).words
        assert words["model.layers.0.self_attn.qkv_proj"] == "gather"
        assert words["model.layers.1.mlp.down_proj"] == "slice"
        found = splits(model, recipe())
        assert found["model.layers.0.mlp.gate_up_proj.weight"] == 0
        assert found["model.layers.0.self_attn.o_proj.weight"] == 1
        odd = build_model("transformers", config=family("phi3", num_key_value_heads=1), context=8)
        assert "gather" in plan_of(odd, recipe()).words.values(), "heads stay whole"
        with pytest.raises(ConfigError, match=r"16 input features of .*o_proj, 3 tensor ranks"):
            plan_of(odd, recipe(3, vocabulary=False))


class TestRefusals:
    def test_convolutions_are_not_split_and_what_does_it_is_told(self) -> None:
        model = build_model("resnet", classes=4, width=8, groups=4)
        wanted = InnerOptions(shape=MeshShape(shard=2, tensor=2))
        with pytest.raises(ConfigError, match="convolutions are not split") as caught:
            plan_of(model, wanted)
        assert "the mesh shard=4 in [island]" in str(caught.value)

    def test_a_model_without_a_plan_is_told_its_layers(self) -> None:
        told = refused(PERCEPTRON, recipe())
        assert "there is no tensor plan for this model" in told
        assert "first, second, last" in told

    def test_an_unknown_module_gets_the_nearest_name(self) -> None:
        plan = {"blocks.*.upp": "column", "blocks.*.down": "row"}
        told = refused(Case(), recipe(plan=plan))
        assert "'blocks.*.upp'" in told
        assert "did you mean 'blocks.*.up'?" in told

    @pytest.mark.parametrize("word", ["colum", 3])
    def test_an_unknown_word_gets_the_nearest_one(self, word: object) -> None:
        told = refused(PERCEPTRON, recipe(plan={"first": word, "second": "row"}))
        assert f"unknown word of a tensor plan; given: {str(word)!r}" in told
        assert (word != "colum") or "did you mean 'column'?" in told

    def test_only_linear_layers_are_columns(self) -> None:
        told = refused(PERCEPTRON, recipe(plan={"dropout": "column", "second": "row"}))
        assert "cannot make 'dropout' 'column'; given: Dropout; expected: Linear" in told

    def test_columns_need_rows_behind_them(self) -> None:
        told = refused(PERCEPTRON, recipe(plan={"first": "column"}))
        assert "never puts them together" in told

    @pytest.mark.parametrize(
        ("case", "tensor", "given", "remedy"),
        [
            (Case(), 3, "4 attention heads (heads), 3 tensor ranks", "tensor = 2"),
            (Case(), 8, "4 attention heads (heads), 8 tensor ranks", "tensor = 4"),
            (
                Case(kind="llama", options={"kv_heads": 2}), 4,
                "2 attention heads (kv_heads), 4 tensor ranks", "tensor = 2",
            ),
            (
                Case(kind="LlamaForCausalLM"), 4,
                "2 attention heads (num_key_value_heads), 4 tensor ranks", "tensor = 2",
            ),
            (
                Case(options={"vocab_size": 33}), 2, "33 tokens of embedding, 2 tensor ranks",
                "tensor = 1 in [island] mesh or vocabulary = false",
            ),
        ],
    )  # fmt: skip
    def test_what_cannot_be_divided_is_told_with_its_numbers(
        self, case: Case, tensor: int, given: str, remedy: str
    ) -> None:
        told = refused(case, recipe(tensor))
        assert given in told
        assert remedy in told

    def test_features_that_cannot_be_divided_name_the_layer(self) -> None:
        told = refused(PERCEPTRON, recipe(5, plan={"first": "column", "second": "row"}))
        assert "24 output features of first, 5 tensor ranks" in told
        assert "tensor = 4" in told

    def test_an_odd_vocabulary_is_no_matter_when_it_stays_whole(self) -> None:
        model, *_ = make(Case(options={"vocab_size": 33}))
        assert "vocabulary" in plan_of(model, recipe(vocabulary=False))

    def test_a_plan_without_words_for_the_sequence_cannot_cut_it(self) -> None:
        plan = {"first": "column", "second": "row"}
        told = refused(PERCEPTRON, recipe(plan=plan, sequence=True))
        assert "along the sequence" in told
        assert "sequence = false" in told


def test_the_sizes_of_these_tests_can_be_divided_by_four() -> None:
    assert all(SIZES[name] % 4 == 0 for name in ("width", "heads", "vocab_size", "context"))
