"""Records are read from every kind of file alike; what cannot be read is named."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from atoll.data.tuning.conversations import Conversation, conversation_of
from atoll.data.tuning.records import find_files, read_records
from atoll.errors import DataError

ROWS = [{"question": f"what is {n}, ü?", "answer": f"it is\n{n}"} for n in range(5)]


def write(folder: Path, kind: str) -> Path:
    """Write ROWS as a file of this kind."""
    file = folder / f"rows.{kind}"
    if kind == "jsonl":
        file.write_text("".join(json.dumps(row) + "\n" for row in ROWS), encoding="utf-8")
    elif kind == "json":
        file.write_text(json.dumps(ROWS), encoding="utf-8")
    elif kind == "csv":
        with file.open("w", encoding="utf-8", newline="") as out:
            writer = csv.DictWriter(out, ["question", "answer"])
            writer.writeheader()
            writer.writerows(ROWS)
    else:
        parquet = pytest.importorskip("pyarrow.parquet", reason="pip install 'atoll[tune]'")
        import pyarrow

        parquet.write_table(pyarrow.Table.from_pylist(ROWS), file)
    return file


@pytest.mark.parametrize("kind", ["jsonl", "json", "csv", "parquet"])
def test_every_kind_of_file_gives_the_same_records(tmp_path: Path, kind: str) -> None:
    assert list(read_records(write(tmp_path, kind))) == ROWS


def test_a_text_file_is_one_record(tmp_path: Path) -> None:
    (tmp_path / "a.md").write_text("# one\ntwo", encoding="utf-8")
    assert list(read_records(tmp_path / "a.md")) == [{"text": "# one\ntwo"}]


def test_files_are_sorted_by_name(tmp_path: Path) -> None:
    for name in ("b.txt", "a.txt"):
        (tmp_path / name).write_text(name, encoding="utf-8")
    found = find_files([f"{tmp_path}/*.txt", f"{tmp_path}/b.txt"])
    assert [[file.name for file in group] for group in found] == [["a.txt", "b.txt"], ["b.txt"]]


def test_a_damaged_line_is_named(tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_text('{"text": "a"}\n{"text": \n', encoding="utf-8")
    with pytest.raises(DataError, match=r"bad\.jsonl, record 2"):
        list(read_records(tmp_path / "bad.jsonl"))


@pytest.mark.parametrize(
    ("name", "what"), [("none.jsonl", "no file matches"), ("a.pdf", "holds no examples")]
)
def test_missing_and_unknown_files_are_refused(tmp_path: Path, name: str, what: str) -> None:
    (tmp_path / "a.pdf").write_bytes(b"%PDF")
    with pytest.raises(DataError, match=what):
        find_files([str(tmp_path / name)])


CHAT = ({"role": "user", "content": "a"}, {"role": "assistant", "content": "b"})


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        ({"messages": list(CHAT)}, Conversation(messages=CHAT)),
        (
            {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
            Conversation(messages=CHAT),
        ),
        ({"prompt": "a", "completion": "b"}, Conversation(prompt="a", completion="b")),
        ({"prompt": [CHAT[0]], "completion": [CHAT[1]]}, Conversation(messages=CHAT)),
        ({"instruction": "a", "input": "", "output": "b"}, Conversation(messages=CHAT)),
        ({"question": "a", "answer": "b"}, Conversation(messages=CHAT)),
        ({"": "7", "question": "a", "answer": "b"}, Conversation(messages=CHAT)),
        ({"text": "b"}, Conversation(completion="b")),
    ],
)
def test_known_columns_make_a_conversation(
    record: dict[str, object], expected: Conversation
) -> None:
    assert conversation_of(record) == expected


@pytest.mark.parametrize(
    ("record", "what"),
    [
        ({"x": 1}, "no known columns"),
        ({"messages": [{"role": "cook", "content": "a"}]}, "cook"),
        ({"messages": [{"role": ["user"], "content": "a"}]}, "role in messages"),
        ({"messages": [{"role": "user", "content": 1}]}, "content in messages"),
        ({"instruction": ["a"], "output": "b"}, "instruction of a record"),
        ({"messages": "a"}, "a list of messages"),
    ],
)
def test_records_that_cannot_be_used_say_why(record: dict[str, object], what: str) -> None:
    with pytest.raises(DataError, match=what):
        conversation_of(record)


def test_name_of_a_data_set_at_a_hub_says_how_to_fetch_it() -> None:
    with pytest.raises(DataError) as caught:
        find_files(["ada/pairs"])
    assert "hub:ada/pairs" in str(caught.value.remedy)
    with pytest.raises(DataError) as caught:
        find_files(["ada/*.jsonl"])
    assert "hub:" not in str(caught.value.remedy)
