"""`atoll push` with the library's own client, against a hub on this machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.export.model_hub import TOKEN, ModelHub, model_hub
from tests.patience import PATIENCE_S

pytest.importorskip("huggingface_hub", reason="pip install 'atoll[hf]'")

COMMANDS = """
import contextlib, io, json, os, sys
from atoll.cli.main import main

for token, *words in json.load(sys.stdin):
    os.environ["HF_TOKEN"] = token
    said, code = io.StringIO(), 0
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        try:
            main(words)
        except SystemExit as ended:
            code = int(str(ended.code or 0))
    print(json.dumps([code, said.getvalue()]), flush=True)

import transformers

model = transformers.AutoModelForCausalLM.from_pretrained("ada/counter")
tokenizer = transformers.AutoTokenizer.from_pretrained("ada/counter")
print(json.dumps([sum(p.numel() for p in model.parameters()), str(tokenizer.chat_template)]))
"""


class Pushed(NamedTuple):
    """What the commands said, each with its exit status, and what was read back."""

    hub: ModelHub
    first: tuple[int, str]
    again: tuple[int, str]
    adapter: tuple[int, str]
    wrong_token: tuple[int, str]
    wrong_name: tuple[int, str]
    read: tuple[int, str]


@pytest.fixture(scope="module")
def pushed(lora: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pushed]:
    """Push in a process of its own, as the library reads its environment once: it takes seconds."""
    with model_hub() as hub:
        push = (TOKEN, "push", str(lora))
        named = (*push, "ada/counter", "--private", "-m", "count better")
        commands = [
            named, named, (*push, "ada/few", "--adapter"), ("hf_other", *push[1:], "ada/other"),
            (*push, "counter"),
        ]  # fmt: skip
        gone = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HTTP_PROXY", "HTTPS_PROXY")
        own = {name: value for name, value in os.environ.items() if name not in gone}
        own |= {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path_factory.mktemp("hf"))}
        own |= {"HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_DISABLE_XET": "1", "COLUMNS": "200"}
        done = subprocess.run(
            [sys.executable, "-c", COMMANDS], env=own, input=json.dumps(commands),
            capture_output=True, text=True, timeout=4 * PATIENCE_S, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        yield Pushed(hub, *(tuple(json.loads(line)) for line in done.stdout.splitlines()))


def test_pushed_model_is_loaded_by_its_name(pushed: Pushed) -> None:
    code, said = pushed.first
    assert code == 0, said
    assert f"pushed to {pushed.hub.url}/ada/counter" in said
    found = pushed.hub.repositories["ada/counter"]
    assert found.private
    assert found.messages[0] == "count better"
    assert found.large == {"model.safetensors"}
    assert {"config.json", "tokenizer.json", "README.md"} < found.files.keys()
    assert json.loads(found.files["config.json"])["model_type"] == "llama"
    parameters, template = pushed.read
    assert parameters > 0
    assert "<|im_start|>" in template


def test_pushing_again_sends_no_large_file_again(pushed: Pushed) -> None:
    code, said = pushed.again
    assert code == 0, said
    found = pushed.hub.repositories
    large = {found[name].files[file] for name in found for file in found[name].large}
    assert sorted(pushed.hub.objects.values()) == sorted(large)
    assert len(large) == 2, "the model, and the adapters of the other entry"


def test_only_adapters_are_pushed_on_request(pushed: Pushed) -> None:
    code, said = pushed.adapter
    assert code == 0, said
    files = pushed.hub.repositories["ada/few"].files
    assert "adapter_model.safetensors" in files
    assert "model.safetensors" not in files


def test_wrong_token_and_wrong_name_say_what_to_do(pushed: Pushed) -> None:
    for (code, said), remedy in (
        (pushed.wrong_token, "hf auth login"), (pushed.wrong_name, "OWNER/NAME"),
    ):  # fmt: skip
        assert code != 0
        assert remedy in said
    assert pushed.hub.repositories.keys() == {"ada/counter", "ada/few"}
