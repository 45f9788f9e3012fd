import dataclasses
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from atoll.checkpoint import describe, save_weights
from atoll.data import ByteTokenizer
from atoll.errors import CheckpointError, ConfigError, DataError
from atoll.models import GPT, GPTConfig
from atoll.paths.layout import weights_name
from atoll.routing.features import FeatureModel
from atoll.routing.folder import FEATURES, ROUTER, PathFolder, open_paths
from atoll.routing.router import Router
from atoll.routing.writing import Sampling, choose_path, continue_text
from atoll.train.results.sample import load_model

CONFIG = GPTConfig(layers=2, width=16, heads=2, context=32, tie=False)
BYTES = ByteTokenizer()


def ids(text: str) -> torch.Tensor:
    return BYTES.encode(text.encode())


def router_of(reader: FeatureModel) -> Router:
    """Return a router of 2 x 3 modules: digits to path 4, everything else to path 1."""
    digits = reader.features([ids("0123456789012345")], BYTES)[0].astype(float)
    letters = reader.features([ids("abcdefghijklmnop")], BYTES)[0].astype(float)
    weight, bias = np.zeros((6, 16)), np.full(6, -1e9)
    weight[4], weight[1] = digits - letters, letters - digits
    bias[4] = -(digits - letters) @ (digits + letters) / 2
    bias[1] = -bias[4]
    return Router((2, 3), weight, bias, prefix=16, tokenizer=BYTES.to_json())


def write_run(folder: Path, reader: FeatureModel) -> PathFolder:
    """Write what a run of 2 x 3 modules leaves."""
    about = describe("gpt", options=dataclasses.asdict(CONFIG), tokenizer=BYTES.to_json())
    for path in range(6):
        torch.manual_seed(path)
        model = GPT(CONFIG)
        torch.nn.init.normal_(model.head.weight)
        save_weights(folder / weights_name(path), model.state_dict(), about=about)
    router_of(reader).write(folder / ROUTER)
    options = {"layers": 1, "width": 16, "heads": 2, "context": 32, "tie": False}
    small = describe("gpt", options=options, tokenizer=BYTES.to_json())
    save_weights(folder / FEATURES, reader.model.state_dict(), about=small)
    return open_paths(folder)


@pytest.fixture
def made(tmp_path: Path, reader: FeatureModel) -> PathFolder:
    return write_run(tmp_path, reader)


def test_a_folder_gives_back_what_was_written(made: PathFolder) -> None:
    assert (made.num_paths, made.router.modules, made.router.prefix) == (6, (2, 3), 16)
    assert made.tokenizer.to_json() == BYTES.to_json()
    assert made.reader().prefix == 16


def test_only_the_file_of_the_path_is_read(made: PathFolder) -> None:
    plain, _ = load_model(made.folder / weights_name(4))
    for path in {0, 1, 2, 3, 5}:
        (made.folder / weights_name(path)).write_bytes(b"no weights")
    text = ids("some text").long()[None]
    assert torch.equal(made.load(4)(text), plain(text))
    found = continue_text(made, ids("31415926"), Sampling(tokens=5, seed=3))
    assert found.paths == (4,)
    with pytest.raises(CheckpointError):
        made.load(5)


def test_the_router_may_be_beside_the_shards(made: PathFolder, tmp_path: Path) -> None:
    (tmp_path / "shards").mkdir()
    for name in (ROUTER, FEATURES):
        (made.folder / name).rename(tmp_path / "shards" / f"mine.{name}")
    with pytest.raises(CheckpointError, match="nothing routes"):
        open_paths(made.folder)
    found = open_paths(made.folder, shards=tmp_path / "shards" / "mine.safetensors")
    assert choose_path(found, ids("31415926535897932384626")) == 4


def test_a_prompt_is_routed_by_its_prefix(made: PathFolder) -> None:
    assert choose_path(made, ids("31415926535897932384626")) == 4
    assert choose_path(made, ids("a word or two of text")) == 1
    assert choose_path(made, ids("7")) == 4
    assert choose_path(made, ids("3141592653589793 and then only letters follow")) == 4


def test_text_is_written_by_the_chosen_path(made: PathFolder) -> None:
    found = continue_text(made, ids("31415926"), Sampling(tokens=20, seed=3))
    expected = made.load(4).generate(
        ids("31415926").long()[None], tokens=20, generator=torch.Generator().manual_seed(3)
    )
    assert found.paths == (4,)
    assert torch.equal(found.ids, expected[0])


def test_the_path_is_chosen_again_from_the_text_so_far(made: PathFolder) -> None:
    found = continue_text(made, ids("31415926"), Sampling(tokens=50, seed=1, every=20))
    assert found.paths[0] == 4
    assert len(found.paths) == 3
    assert len(found.ids) == 58
    for stretch, path in enumerate(found.paths[1:], start=1):
        seen = found.ids[: 8 + 20 * stretch][-32:]
        assert made.router.choose(made.reader().features([seen], BYTES))[0] == path


def test_a_given_path_is_not_chosen(made: PathFolder) -> None:
    assert continue_text(made, ids("31415926"), Sampling(tokens=5, every=2, path=0)).paths == (0,)
    with pytest.raises(ConfigError, match="no such path"):
        continue_text(made, ids("1"), Sampling(tokens=5, path=6))
    with pytest.raises(ConfigError, match="nothing to continue"):
        choose_path(made, ids(""))


def test_other_folders_are_refused(made: PathFolder, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="not a folder of paths"):
        open_paths(tmp_path / "empty")
    (made.folder / ROUTER).write_bytes(b"{")
    with pytest.raises(DataError, match="router cannot be read"):
        open_paths(made.folder)


def test_a_path_of_another_tokenizer_is_refused(made: PathFolder) -> None:
    replace(made.router, tokenizer='{"format": "other"}').write(made.folder / ROUTER)
    with pytest.raises(CheckpointError, match="other tokens"):
        replace(made, router=replace(made.router, tokenizer="other")).load(0)
