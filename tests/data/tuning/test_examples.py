"""Examples are rendered, masked, compared, packed and dealt."""

from __future__ import annotations

import json
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from atoll.data import BatchStream, Cursor
from atoll.data.tuning.conversations import conversation_of
from atoll.data.tuning.dataset import ExampleSet, ExampleShards, load_examples
from atoll.data.tuning.options import ExampleOptions
from atoll.data.tuning.packing import IGNORED, pack_rows
from atoll.data.tuning.rendering import Rendered, Renderer
from atoll.errors import ConfigError, DataError
from tests.models.tiny import count_chat, save_tiny, tiny_tokenizer

pytest.importorskip("transformers", reason="pip install 'atoll[hf]'")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return tiny_tokenizer(save_tiny(tmp_path_factory.mktemp("tiny")))


def write(file: Path, records: list[dict[str, Any]]) -> str:
    file.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return str(file)


def load(tokenizer: Any, *data: str, **changes: Any) -> ExampleSet:
    options = {"context": 64, "seed": 3, "held_out": 0.1, **changes}
    return load_examples(ExampleOptions(data=data, **options), tokenizer)


def trained_text(tokenizer: Any, rendered: Rendered) -> str:
    text: str = tokenizer.decode(rendered.ids[rendered.trained])
    return text


def test_only_answers_are_trained_on(tokenizer: Any) -> None:
    renderer = Renderer(tokenizer, template="", completion_only=True)
    turns = [*count_chat(3)["messages"], *count_chat(5)["messages"]]
    rendered = renderer.render(conversation_of({"messages": turns}))
    assert trained_text(tokenizer, rendered) == (
        "the answer is 3<|im_end|>\nthe answer is 5<|im_end|>\n"
    )
    whole = Renderer(tokenizer, template="", completion_only=False)
    assert whole.render(conversation_of({"messages": turns})).trained.all()


def test_a_completion_follows_its_prompt_untouched(tokenizer: Any) -> None:
    renderer = Renderer(tokenizer, template="", completion_only=True)
    rendered = renderer.render(conversation_of({"prompt": "1 + 1 =", "completion": " 2"}))
    assert tokenizer.decode(rendered.ids) == "1 + 1 = 2<|im_end|>"
    assert trained_text(tokenizer, rendered) == " 2<|im_end|>"


def test_answers_that_a_template_rewrites_are_not_trained_on(tokenizer: Any) -> None:
    last_only = (
        "{% for m in messages %}{% if loop.last or m['role'] == 'user' %}[{{ m['content'] }}]"
        "{% else %}[...]{% endif %}{% endfor %}"
    )
    renderer = Renderer(tokenizer, template=last_only, completion_only=True)
    turns = [*count_chat(3)["messages"], *count_chat(5)["messages"]]
    rendered = renderer.render(conversation_of({"messages": turns}))
    assert rendered.rewritten == 1
    assert trained_text(tokenizer, rendered) == "[the answer is 5]"


def test_a_model_without_a_template_says_what_to_do(tokenizer: Any, tmp_path: Path) -> None:
    plain = tiny_tokenizer(save_tiny(tmp_path, template=""))
    data = write(tmp_path / "a.jsonl", [count_chat(n) for n in range(9)])
    with pytest.raises(ConfigError, match=r"no chat template.*chatml"):
        load(plain, data)
    assert load(plain, data, template="chatml").digest == load(tokenizer, data).digest


def test_rows_hold_every_example_once_whole(tokenizer: Any, tmp_path: Path) -> None:
    found = load(tokenizer, write(tmp_path / "a.jsonl", [count_chat(n) for n in range(50)]))
    held, train = ([e for r in range(len(rows)) for e in rows.examples(r)]
                   for rows in (found.held_out, found.train))  # fmt: skip
    assert sorted([*held, *train]) == list(range(50))
    assert len(held) == 5
    inputs, targets = found.train.batch(np.arange(len(found.train)))
    for (ids, positions), wanted in zip(inputs, targets, strict=True):
        starts = (positions == 0).nonzero().flatten().tolist()
        for start, end in zip(starts, [*starts[1:], len(ids)], strict=True):
            mine = wanted[start:end]
            answer = mine[mine != IGNORED].tolist()
            if answer:
                text = tokenizer.decode([int(ids[start]), *ids[start + 1 : end].tolist()])
                assert tokenizer.decode(answer).startswith("the answer is")
                assert text.startswith("<|im_start|>user\ncount")


def test_packing_needs_fewer_rows_than_one_each() -> None:
    lengths = np.array([5, 3, 8, 2, 6, 1], dtype=np.int64)
    order = np.arange(6, dtype=np.int64)
    flat, bounds = pack_rows(lengths, order, length=8, pack=True)
    rows = [flat[a:b].tolist() for a, b in pairwise(bounds)]
    assert rows == [[0, 1], [2], [3, 4], [5]]
    assert len(pack_rows(lengths, order, length=8, pack=False)[1]) - 1 == 6


def test_members_share_no_row_and_miss_none(tokenizer: Any, tmp_path: Path) -> None:
    found = load(tokenizer, write(tmp_path / "a.jsonl", [count_chat(n) for n in range(90)]))
    whole = {row.numpy().tobytes() for row in found.train.batch(np.arange(len(found.train)))[0]}
    dealt: list[bytes] = []
    shards = ExampleShards(found.train, slots=3, seed=3)
    for slot in range(3):
        for number in range(shards.num_windows(slot)):
            row = np.zeros((2, 64), dtype=np.int64)
            part = shards.batch(slot, np.array([number]))[0][0].numpy()
            row[:, : part.shape[1]] = part
            row[1, part.shape[1] :] = np.arange(64 - part.shape[1])
            dealt.append(row.tobytes())
    assert len(dealt) == len(set(dealt)) == len(found.train) == len(whole)


def test_a_stream_goes_on_bit_for_bit_from_its_cursor(tokenizer: Any, tmp_path: Path) -> None:
    data = write(tmp_path / "a.jsonl", [count_chat(n) for n in range(60)])
    shards = ExampleShards(load(tokenizer, data).train, slots=2, seed=3)
    stream = BatchStream(shards, slot=1, batch=3)
    for _ in range(7):  # beyond the first pass
        next(stream)
    saved = json.loads(json.dumps(stream.cursor.to_dict()))
    again = ExampleShards(load(tokenizer, data).train, slots=2, seed=3)  # read anew from the file
    other = BatchStream(again, slot=1, batch=3, cursor=Cursor.from_dict(saved))
    for _ in range(9):
        assert all(map(np.array_equal, next(stream), next(other)))


def test_weights_repeat_and_thin_out_files(tokenizer: Any, tmp_path: Path) -> None:
    one = write(tmp_path / "a.jsonl", [count_chat(n) for n in range(40)])
    two = write(tmp_path / "b.jsonl", [count_chat(n) for n in range(100, 180)])
    found = load(tokenizer, one, two, weights=[2.5, 0.5], held_out=0.0001)
    counts = Counter(e for row in range(len(found.train)) for e in found.train.examples(row))
    first = [counts[example] for example in range(40)]
    second = [counts[example] for example in range(40, 120)]
    assert set(first) <= {0, 2, 3}  # 0: the one that was held out
    assert set(second) <= {0, 1}
    assert 90 <= sum(first) <= 115
    assert 25 <= sum(second) <= 55


def test_repeated_and_unusable_records_are_reported(tokenizer: Any, tmp_path: Path) -> None:
    records = [count_chat(n % 20) for n in range(40)]
    records += [{"x": 1}, {"prompt": "long " * 99, "completion": "cut off"}]
    quality = load(tokenizer, write(tmp_path / "a.jsonl", records)).quality
    assert (quality.records, quality.kept, quality.equal) == (42, 20, 20)
    assert (quality.unreadable, quality.short, quality.truncated) == (1, 1, 1)
    said = "\n".join(quality.sentences())
    assert "20 left out: equal" in said
    assert "record 41" in said
    kept = load(tokenizer, str(tmp_path / "a.jsonl"), deduplicate=False).quality
    assert kept.kept == 40


def test_similar_texts_are_left_out_only_on_request(tokenizer: Any, tmp_path: Path) -> None:
    pytest.importorskip("datasketch", reason="pip install 'atoll[tune]'")
    words = " ".join(f"word{n}" for n in range(60))
    other = " ".join(f"thing{n}" for n in range(60))
    data = write(tmp_path / "a.jsonl", [{"text": t} for t in (words, words + " end", other)])
    assert load(tokenizer, data, context=999).quality.kept == 3
    found = load(tokenizer, data, context=999, near_duplicates=0.8).quality
    assert (found.kept, found.similar) == (2, 1)


def test_a_long_text_is_cut_into_pieces_that_lose_nothing(tokenizer: Any, tmp_path: Path) -> None:
    text = " ".join(f"count {n}" for n in range(300))
    (tmp_path / "a.txt").write_text(text, encoding="utf-8")
    found = load(tokenizer, str(tmp_path / "a.txt"))
    ids = tokenizer(text)["input_ids"]
    assert found.quality.trained_tokens == len(ids)  # the first is no target, the end mark is
    assert found.quality.longest == 65


def test_too_few_examples_are_refused(tokenizer: Any, tmp_path: Path) -> None:
    data = write(tmp_path / "a.jsonl", [count_chat(1), count_chat(1)])
    with pytest.raises(DataError, match="too few examples"):
        load(tokenizer, data)
    data = write(tmp_path / "a.jsonl", [count_chat(1), count_chat(2)])
    with pytest.raises(DataError, match="too few examples to train on"):
        ExampleShards(load(tokenizer, data).train, slots=2, seed=1)
