"""`transformers.Trainer` on several computers: a tiny GPT-2 that learns to write Python.

Alone:                       python examples/transformers_trainer.py
On this machine, two nodes:  atoll run examples/transformers_trainer.py --local 2
On a hub's machines:         atoll run examples/transformers_trainer.py --nodes 4 -- --steps 2000

Four lines are Atoll's, marked below. It needs: pip install 'atoll[train,hf]'
"""

from __future__ import annotations

import argparse
import pathlib
import sysconfig
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import atoll
from atoll.integrations.transformers import AtollCallback

CONTEXT = 32
ALPHABET = 128


class Windows(Dataset[dict[str, Tensor]]):
    """Stretches of the sources of Python's standard library, as numbers."""

    def __init__(self, first: int, last: int) -> None:
        folder = pathlib.Path(sysconfig.get_paths()["stdlib"])
        paths = sorted(folder.glob("[a-d]*.py"))
        text = "".join(path.read_text("utf-8", "replace") for path in paths)
        numbers = [min(ord(letter), ALPHABET - 1) for letter in text[: last * CONTEXT]]
        self._rows = torch.tensor(numbers).view(-1, CONTEXT)[first:]

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self._rows[index], "labels": self._rows[index]}


def make_model() -> GPT2LMHeadModel:
    torch.manual_seed(7)
    config = GPT2Config(
        vocab_size=ALPHABET, n_positions=CONTEXT, n_embd=32, n_layer=1, n_head=2,
        bos_token_id=0, eos_token_id=0, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def settings(folder: pathlib.Path, *, steps: int) -> TrainingArguments:
    return TrainingArguments(
        output_dir=str(folder / "trainer"), max_steps=steps, per_device_train_batch_size=8,
        gradient_accumulation_steps=2, lr_scheduler_type="cosine", warmup_steps=5,
        eval_strategy="steps", eval_steps=max(1, steps // 2), logging_steps=10,
        save_strategy="no", report_to=[], disable_tqdm=True, dataloader_pin_memory=False,
        include_num_input_tokens_seen="all",  # members weigh by their tokens
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a tiny GPT-2 with transformers.Trainer.")
    parser.add_argument("--steps", type=int, default=200)
    arguments = parser.parse_args()
    model = make_model()
    with atoll.join() as run:  # 1: alone when no hub started this
        optimizer: Any = run.wrap(  # 2: a torch.optim.Optimizer that also agrees with the others
            model,
            torch.optim.AdamW(model.parameters(), 3e-3),
            outer=atoll.DiLoCo(every=20, outer_lr=0.8, outer_momentum=0.5),
        )
        trainer = Trainer(
            model,
            settings(run.directory, steps=arguments.steps),
            train_dataset=run.shard(Windows(64, 2000)),  # 3: this member's share
            eval_dataset=Windows(0, 64),
            optimizers=(optimizer, None),
            callbacks=[AtollCallback(run)],  # 4: evaluates what all agreed on, ends with the job
        )
        trainer.train()
        run.save(model)
        print(f"finished with held-out loss {trainer.evaluate()['eval_loss']:.3f}", flush=True)


if __name__ == "__main__":
    main()
