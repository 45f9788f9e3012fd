"""`atoll evaluate --tasks`: the real lm-eval on a task of this machine; or what is missing."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
import torch

from atoll.cli.main import main
from atoll.errors import ConfigError
from atoll.export.opened import open_model
from atoll.export.tasks import measure_tasks

CPU = torch.device("cpu")
INSTALLED = importlib.util.find_spec("lm_eval") is not None
TASK = """
task: apples
dataset_path: json
dataset_kwargs: {{data_files: {{test: "{file}"}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "count {{{{number}}}} apples"
doc_to_choice: [" the answer", " the user", " apples"]
doc_to_target: "{{{{number % 3}}}}"
metric_list: [{{metric: acc, aggregation: mean, higher_is_better: true}}]
"""


def run(*words: str) -> object:
    """Return the exit status of `atoll evaluate`."""
    with pytest.raises(SystemExit) as ended:
        main(["evaluate", *words])
    return ended.value.code


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tasks")
    file = folder / "apples.jsonl"
    file.write_text("".join(json.dumps({"number": n}) + "\n" for n in range(12)))
    (folder / "apples.yaml").write_text(TASK.format(file=file))
    return folder


@pytest.mark.skipif(INSTALLED, reason="lm-eval is installed")
def test_without_the_library_it_says_what_to_install(tuned: Path) -> None:
    with pytest.raises(ConfigError, match="tasks need a library") as caught:
        measure_tasks(open_model(tuned / "model.safetensors"), ["x"], batch=4, device=CPU)
    assert caught.value.remedy == "pip install lm-eval"


@pytest.mark.skipif(not INSTALLED, reason="pip install lm-eval")
@pytest.mark.filterwarnings("ignore")
def test_task_is_measured_with_the_trained_model(
    tuned: Path, task: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HF_HOME", str(task / "cache"))
    words = [str(tuned), "--tasks", "apples", "--task-folder", str(task), "--device", "cpu"]
    assert run(*words, "--json") == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    opened = open_model(tuned / "model.safetensors")
    model, tokenizer = opened.whole(), opened.tokenizer
    assert tokenizer is not None
    right = 0
    for number in range(12):
        scores = []
        for choice in (" the answer", " the user", " apples"):
            prompt = tokenizer(f"count {number} apples").input_ids
            whole = torch.tensor([prompt + tokenizer(choice).input_ids])
            with torch.no_grad():
                said = model(whole).logits.log_softmax(-1)[0, :-1]
            each = said.gather(1, whole[0, 1:, None])[:, 0]
            scores.append(float(each[len(prompt) - 1 :].sum()))
        right += scores.index(max(scores)) == number % 3
    assert found["apples"]["acc"] == pytest.approx(right / 12)
    with pytest.raises(ConfigError, match="no such task"):
        measure_tasks(opened, ["pears"], batch=4, device=CPU, folder=task)


def test_examples_or_tasks(tuned: Path) -> None:
    assert run(str(tuned)) == 2
    assert run(str(tuned), "a.jsonl", "--tasks", "x") == 2
