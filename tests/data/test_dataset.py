import itertools
import time
from pathlib import Path

import pytest
import torch

from atoll.data import BatchStream, Shards, load_dataset
from atoll.errors import DataError
from atoll.models import GPT, GPTConfig


@pytest.fixture
def spec(tmp_path: Path) -> str:
    # Every line occurs once, so that text can be found in one part only.
    (tmp_path / "text.txt").write_bytes(b"".join(b"line %07d\n" % n for n in range(20_000)))
    return f"files:{tmp_path}/*.txt"


def test_no_shard_contains_held_out_text(spec: str) -> None:
    dataset = load_dataset(spec, seed=3)
    shards = Shards(dataset.train, slots=2, context=32, seed=3)
    trained = set()
    for slot in range(2):
        stream = BatchStream(shards, slot=slot, batch=shards.num_windows(slot))
        trained |= {bytes(row) for row in next(stream)[0].tolist()}
    lines = {line for row in trained for line in row.split(b"\n")[1:-1]}
    inputs = (inputs for inputs, _ in dataset.held_out.batches(context=32, batch=99))
    held = {
        line for batch in inputs for r in batch.tolist() for line in bytes(r).split(b"\n")[1:-1]
    }
    assert len(held) > 500
    assert not held & lines


def test_members_with_the_same_files_agree_on_the_digest(spec: str) -> None:
    assert load_dataset(spec, seed=3).digest == load_dataset(spec, seed=3).digest
    assert load_dataset(spec, seed=3).digest != load_dataset(spec, seed=4).digest


def test_a_different_file_changes_the_digest(spec: str, tmp_path: Path) -> None:
    before = load_dataset(spec, seed=3).digest
    (tmp_path / "text.txt").write_bytes((tmp_path / "text.txt").read_bytes() + b"!")
    assert load_dataset(spec, seed=3).digest != before


def test_byte_pair_losses_can_be_compared_per_byte(spec: str) -> None:
    dataset = load_dataset(spec, seed=3, tokenizer="bpe:300")
    text = dataset.tokenizer.decode(dataset.held_out.tokens)
    assert dataset.held_out.bytes_per_token == len(text) / len(dataset.held_out.tokens)
    assert load_dataset(spec, seed=3).held_out.bytes_per_token == 1.0


def test_evaluation_covers_the_held_out_text_once(spec: str) -> None:
    held_out = load_dataset(spec, seed=3).held_out
    batches = list(held_out.batches(context=32, batch=10))
    inputs = torch.cat([inputs for inputs, _ in batches]).flatten()
    targets = torch.cat([targets for _, targets in batches]).flatten()
    assert torch.equal(inputs, held_out.tokens[: len(inputs)].long())
    assert torch.equal(targets, held_out.tokens[1 : len(inputs) + 1].long())
    assert len(held_out.tokens) - len(inputs) <= 32


def test_limited_evaluation_is_spread_over_the_text(spec: str) -> None:
    held_out = load_dataset(spec, seed=3).held_out
    whole = torch.cat([inputs for inputs, _ in held_out.batches(context=32, batch=10)])
    some = torch.cat([x for x, _ in held_out.batches(context=32, batch=10, limit_tokens=320)])
    assert len(some) == 10
    found = [int((whole == row).all(dim=1).nonzero()[0, 0]) for row in some]
    gaps = [later - earlier for earlier, later in itertools.pairwise(found)]
    assert max(gaps) - min(gaps) <= 1
    assert found[-1] + max(gaps) >= len(whole) - 1


def test_too_little_held_out_text_names_both_sizes(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_bytes(b"x" * 600)
    dataset = load_dataset(f"files:{tmp_path}/*.txt", seed=1)
    with pytest.raises(DataError, match=r"given: 64 tokens; expected: at least 65"):
        list(dataset.held_out.batches(context=64, batch=1))


def test_batches_cost_far_less_than_the_step_they_feed(spec: str) -> None:
    dataset = load_dataset(spec, seed=3)
    model = GPT(GPTConfig())
    stream = BatchStream(Shards(dataset.train, slots=1, context=64, seed=3), slot=0, batch=16)
    batch = next(stream)
    step_s, batch_s = [], []
    for _ in range(9):
        started = time.perf_counter()
        model.loss(*batch).backward()  # type: ignore[no-untyped-call]
        step_s.append(time.perf_counter() - started)
        started = time.perf_counter()
        batch = next(stream)
        batch_s.append(time.perf_counter() - started)
    assert min(batch_s) < min(step_s) / 20
