"""The pretended accelerator behaves as a real one where Atoll depends on it.

Where there is a real one, these tests run on that: then they say what real ones do.
"""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch import nn
from torch.nn import functional

from atoll.devices.facts import memory, used_bytes
from tests.accelerator.child import PRETENDED_ONLY
from tests.accelerator.noted import computing, left_behind, on_processor
from tests.accelerator.pretended import RECORD


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Embedding(10, 8),
        nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0),
        nn.LayerNorm(8),
        nn.Linear(8, 10),
    )


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device) -> float:
    ids = torch.arange(10).view(2, 5).to(device)
    for _ in range(3):
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return loss.item()


@pytest.mark.parametrize(
    ("name", "options"),
    [("SGD", {"momentum": 0.9}), ("AdamW", {}), ("AdamW", {"foreach": True}), ("RMSprop", {})],
)
@pytest.mark.every(3)
def test_training_leaves_nothing_on_the_processor(
    name: str, options: dict[str, object], device: torch.device
) -> None:
    there = _model()
    optimizer = getattr(torch.optim, name)(there.parameters(), lr=0.1, **options)
    there.to(device)
    with on_processor() as found:
        loss = _train(there, optimizer, device)

    assert not computing(found)
    assert not left_behind(there, [optimizer])
    here = _model()
    same = getattr(torch.optim, name)(here.parameters(), lr=0.1, **options)
    assert loss == pytest.approx(_train(here, same, torch.device("cpu")))
    assert RECORD.ran("addmm") > 0


def test_the_processor_is_noted(device: torch.device) -> None:
    model = _model()
    with on_processor() as found:
        _train(model, torch.optim.SGD(model.parameters(), lr=0.1), torch.device("cpu"))
    assert computing(found)["addmm"] > 0
    assert left_behind(model)
    assert not RECORD.operators


def test_tensors_of_two_devices_do_not_mix(device: torch.device) -> None:
    there = torch.ones(3, device=device)
    assert (there + torch.tensor(1.0)).tolist() == [2, 2, 2]
    with pytest.raises(RuntimeError, match="same device"):
        there + torch.ones(3)
    with pytest.raises(RuntimeError, match="same device"):
        nn.Linear(3, 3)(there)
    with pytest.raises(RuntimeError, match="same device"):
        torch.stack([there.sum(), torch.tensor(1.0)])
    with pytest.raises(RuntimeError, match="indices"):
        torch.ones(3)[torch.zeros(1, dtype=torch.int64, device=device)]
    with pytest.raises(TypeError, match="to numpy"):
        there.numpy()
    with pytest.raises(RuntimeError, match="for generator"):
        torch.randn(3, device=device).normal_(generator=torch.Generator())


def test_views_share_the_memory_of_their_tensor(device: torch.device) -> None:
    whole = torch.zeros(4, 4, device=device)
    whole[0].fill_(1)
    whole.view(-1)[5:7] = torch.ones(2)  # a copy: may come from main memory
    whole.resize_(2, 4)
    assert whole.tolist() == [[1, 1, 1, 1], [0, 1, 1, 0]]
    parameter = nn.Parameter(torch.zeros(3, device=device))
    parameter.data = torch.arange(3.0, device=device)
    parameter.data[0] = 5
    assert parameter.tolist() == [5, 1, 2]


def test_copies_of_a_model_are_its_own(device: torch.device) -> None:
    model = _model().to(device)
    first = next(model.parameters())
    model.to(device)
    assert next(model.parameters()) is first
    other = copy.deepcopy(model)
    with torch.no_grad():
        next(other.parameters()).zero_()
    assert first.abs().sum() > 0
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    other.load_state_dict(torch.load(file))
    assert not left_behind(other)
    assert torch.equal(next(other.parameters()), first)


def test_random_numbers_are_its_own(device: torch.device) -> None:
    here = torch.get_rng_state()
    torch.manual_seed(1)
    before = torch.get_device_module(device).get_rng_state()
    drawn = torch.randn(5, device=device)
    assert torch.equal(torch.get_rng_state(), torch.Generator().manual_seed(1).get_state())
    torch.get_device_module(device).set_rng_state(before)
    assert torch.equal(torch.randn(5, device=device), drawn)
    assert functional.dropout(torch.ones(1000, device=device)).sum() > 0
    torch.set_rng_state(here)


def test_torch_finds_it_as_the_accelerator(device: torch.device) -> None:
    assert torch.accelerator.current_accelerator() == torch.device(device.type)
    assert torch.accelerator.device_count() >= 1
    torch.accelerator.synchronize(device)
    before = used_bytes(device)
    kept = torch.zeros(1 << 20, device=device)
    assert used_bytes(device) - before == kept.nbytes
    free, total = memory(device)
    assert total - free >= used_bytes(device)


def test_bf16_is_computed_under_autocast(device: torch.device) -> None:
    layer = nn.Linear(3, 3).to(device)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        assert layer(torch.ones(2, 3, device=device)).dtype is torch.bfloat16


@PRETENDED_ONLY
def test_what_it_lacks_is_refused(device: torch.device) -> None:
    model = _model().to(device)
    with pytest.raises(NotImplementedError, match="_fused_adamw_"):
        _train(model, torch.optim.AdamW(model.parameters(), fused=True), device)
    RECORD.missing_dtypes.add(torch.float64)
    with pytest.raises(TypeError, match="float64"):
        torch.ones(3, dtype=torch.float64).to(device)
    RECORD.missing_operators.add("linalg_svd")
    RECORD.missing_operators.add("_linalg_svd")
    with pytest.raises(NotImplementedError, match="linalg_svd"):
        torch.linalg.svd(torch.ones(3, 3, device=device))
    with pytest.raises(RuntimeError, match="ordinal"):
        torch.ones(3, device="pretended:7")
