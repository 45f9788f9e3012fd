"""A model's name at a hub that cannot be reached is refused at once, with what to do."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest

from atoll.errors import DataError
from atoll.models.named import check_named
from atoll.models.pretrained import CausalLMConfig, load_tokenizer, make_pretrained
from bench.kit.ports import free_port

constants: Any = pytest.importorskip("huggingface_hub.constants", reason="pip install 'atoll[hf]'")


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No proxy, an empty cache, and a hub that does not listen."""
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{free_port()}")


def test_an_unreachable_hub_is_said_at_once_with_what_to_do() -> None:
    config = CausalLMConfig(source="ada/smol")
    for load in (load_tokenizer, make_pretrained):
        with pytest.raises(DataError, match="its hub cannot be asked") as caught:
            load(config)
        assert "hf download ada/smol --local-dir FOLDER" in str(caught.value.remedy)
        assert "cannot be reached" in str(caught.value.given)


def test_a_hub_that_listens_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        place = f"http://127.0.0.1:{server.getsockname()[1]}"
        monkeypatch.setattr(constants, "ENDPOINT", place)
        check_named("ada/smol")


def test_what_was_loaded_before_needs_no_hub(tmp_path: Path) -> None:
    folder = tmp_path / "models--ada--smol"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text("c0ffee")
    (folder / "snapshots" / "c0ffee").mkdir(parents=True)
    (folder / "snapshots" / "c0ffee" / "config.json").write_text("{}")
    check_named("ada/smol")
    with pytest.raises(DataError):
        check_named("ada/smol", file="model.gguf")


def test_a_machine_that_may_not_ask_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "is_offline_mode", lambda: True)
    with pytest.raises(DataError, match="HF_HUB_OFFLINE is set"):
        check_named("ada/smol")
