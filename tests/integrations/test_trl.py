"""TRL's trainers with a wrapped optimizer and the callback of `transformers`' Trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import atoll as package
from atoll.group.base import Group
from atoll.group.in_process.groups import MemoryGroups
from atoll.run import Run
from atoll.run.place import Membership
from tests.models.tiny import save_tiny, tiny_tokenizer

trl: Any = pytest.importorskip("trl", reason="pip install trl")
datasets: Any = pytest.importorskip("datasets", reason="pip install datasets")
peft: Any = pytest.importorskip("peft", reason="pip install 'atoll[tune]'")
transformers: Any = pytest.importorskip("transformers", reason="pip install 'atoll[hf]'")

pytestmark = pytest.mark.filterwarnings("ignore")  # of three libraries about each other
STEPS = 6


def chat(number: int, answer: str) -> list[dict[str, str]]:
    return [
        {"role": "user", "content": f"count {number} apples"},
        {"role": "assistant", "content": answer},
    ]


def sft(model: Any, tokenizer: Any, shared: dict[str, Any]) -> Any:
    rows = [{"messages": chat(n, f"the answer is {n % 7}")} for n in range(40)]
    return trl.SFTTrainer(
        model, args=trl.SFTConfig(max_length=64, **shared), processing_class=tokenizer,
        train_dataset=datasets.Dataset.from_list(rows),
    )  # fmt: skip


def dpo(model: Any, tokenizer: Any, shared: dict[str, Any]) -> Any:
    rows = [
        {
            "prompt": chat(n, "")[:1], "chosen": chat(n, f"the answer is {n % 7}")[1:],
            "rejected": chat(n, "count the user")[1:],
        }
        for n in range(40)
    ]  # fmt: skip
    return trl.DPOTrainer(
        model, args=trl.DPOConfig(max_length=64, **shared), processing_class=tokenizer,
        train_dataset=datasets.Dataset.from_list(rows),
    )  # fmt: skip


@pytest.mark.parametrize("make", [sft, dpo])
def test_members_of_trls_trainers_end_with_one_model(tmp_path: Path, make: Any) -> None:
    from atoll.integrations.transformers import AtollCallback

    folder = save_tiny(tmp_path / "tiny")
    models = []
    for _ in range(2):
        torch.manual_seed(1)
        base = transformers.AutoModelForCausalLM.from_pretrained(folder)
        models.append(peft.get_peft_model(base, peft.LoraConfig(target_modules="all-linear")))
    starts = [vector(model) for model in models]

    def body(group: Group) -> int:
        slot = int(group.me[1:])
        with Run(group, Membership(tmp_path, slot=slot, num_slots=2)) as run:
            shared = {
                "output_dir": str(tmp_path / run.member), "max_steps": STEPS, "use_cpu": True,
                "per_device_train_batch_size": 2, "report_to": [], "disable_tqdm": True,
                "save_strategy": "no", "dataloader_pin_memory": False, "learning_rate": 1e-2,
                "bf16": False, "gradient_checkpointing": False,
            }  # fmt: skip
            trainer = make(models[slot], tiny_tokenizer(folder), shared)
            trainer.train_dataset = run.shard(trainer.train_dataset)
            inner = torch.optim.AdamW(
                [p for p in trainer.model.parameters() if p.requires_grad], 1e-2
            )
            trainer.optimizer = run.wrap(trainer.model, inner, outer=package.DiLoCo(every=3))
            trainer.add_callback(AtollCallback(run))
            trainer.train()
            run.finish()
            return int(run.group.committed_round)

    rounds = MemoryGroups(2).together(body)
    assert rounds == [rounds[0]] * 2
    assert rounds[0] >= 2
    first, second = map(vector, models)
    assert torch.equal(first, second)
    assert not torch.equal(first, starts[0])


def vector(model: Any) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])
