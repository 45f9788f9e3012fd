"""The same small training, written as people write loops in plain PyTorch."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, Dataset, IterableDataset, WeightedRandomSampler

from tests.loops.job import Diary, Ended

SAMPLES, BATCH = 48, 2
Sample = tuple[int, Tensor, Tensor]


def sample(index: int) -> Sample:
    """Return a sample: its number, what goes in, and what is to come out."""
    generator = torch.Generator().manual_seed(index)
    x = torch.randn(5, generator=generator)
    return index, x, torch.stack([x.sum().sin(), x[0] * x[1]])


class Numbered(Dataset[Sample]):
    def __getitem__(self, index: int) -> Sample:
        return sample(index)

    def __len__(self) -> int:
        return SAMPLES


class Stream(IterableDataset[Sample]):
    def __iter__(self) -> Iterator[Sample]:
        return map(sample, range(SAMPLES))


def fill(model: nn.Module, seed: int = 3) -> nn.Module:
    """Draw the parameters without torch's own generator, which members in threads share."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            drawn = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
            parameter.copy_(0.4 * drawn)
    return model


def net(seed: int = 3, *, normalised: bool = False) -> nn.Sequential:
    middle: list[nn.Module] = [nn.BatchNorm1d(3)] if normalised else []
    model = nn.Sequential(nn.Linear(5, 3), *middle, nn.Tanh(), nn.Linear(3, 2))
    fill(model, seed)
    return model


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.02)


def squared(found: Tensor, wanted: Tensor) -> Tensor:
    return nn.functional.mse_loss(found.float(), wanted)


def descend(
    run: Any,
    diary: Diary,
    model: nn.Module,
    optimizer: Any,
    *,
    data: Any = None,
    loss: Callable[[Tensor, Tensor], Tensor] = squared,
    around: Callable[[], AbstractContextManager[Any]] = nullcontext,
    after: Callable[[], object] = lambda: None,
) -> None:
    """Train for one pass: the loop of every tutorial."""
    if data is None:
        data = run.shard(DataLoader(Numbered(), batch_size=BATCH))
    for numbers, x, y in data:
        optimizer.zero_grad()
        with around():
            value = loss(model(x), y)
        value.backward()  # type: ignore[no-untyped-call]
        run.log(loss=value, tokens=len(numbers))
        optimizer.step()
        diary.step(numbers, optimizer.param_groups[0]["lr"])
        after()


def plain(run: Any, diary: Diary) -> Ended:
    model = net(run.slot)
    optimizer = run.wrap(model, adamw(model), outer=diary.method)
    descend(run, diary, model, optimizer)
    return Ended(model)


# ------------------------------------------------------------------------------------- data


def train_on(run: Any, diary: Diary, data: Any) -> Ended:
    model = net()
    optimizer = run.wrap(model, adamw(model), outer=diary.method)
    descend(run, diary, model, optimizer, data=data)
    return Ended(model)


def shuffled(run: Any, diary: Diary) -> Ended:
    data = run.shard(DataLoader(Numbered(), batch_size=BATCH, shuffle=True))
    return train_on(run, diary, data)


def subset(run: Any, diary: Diary) -> Ended:
    """A data set is dealt out first, and loaded by the script."""
    data = DataLoader(run.shard(Numbered()), batch_size=BATCH)
    return train_on(run, diary, data)


def weighted(run: Any, diary: Diary) -> Ended:
    weights = [1.0 + index for index in range(SAMPLES)]
    # A generator of its own: members in threads share torch's.
    sampler = WeightedRandomSampler(weights, SAMPLES, False, generator=torch.Generator())
    data = run.shard(DataLoader(Numbered(), batch_size=BATCH, sampler=sampler))
    return train_on(run, diary, data)


def streamed(run: Any, diary: Diary) -> Ended:
    data = run.shard(DataLoader(Stream(), batch_size=BATCH))
    return train_on(run, diary, data)


def dealt_stream(run: Any, diary: Diary) -> Ended:
    """A stream is dealt out first, and loaded by the script."""
    data = DataLoader(run.shard(Stream()), batch_size=BATCH)
    return train_on(run, diary, data)


def uneven(run: Any, diary: Diary) -> Ended:
    """The second member has fewer steps."""
    model = net()
    optimizer = run.wrap(model, adamw(model), outer=diary.method)
    data: Any = run.shard(DataLoader(Numbered(), batch_size=BATCH))
    if run.slot == 1:
        data = (batch for batch in data if int(batch[0][0]) < SAMPLES - 8)
    descend(run, diary, model, optimizer, data=data)
    return Ended(model)


# -------------------------------------------------------------------------------- parameters


def frozen(run: Any, diary: Diary) -> Ended:
    """Frozen parameters that start different: nobody trains them, yet they are to be equal."""
    model = net(run.slot)
    model[0].requires_grad_(False)
    optimizer = run.wrap(model, adamw(model), outer=diary.method)
    descend(run, diary, model, optimizer)
    return Ended(model)


def unfrozen(run: Any, diary: Diary) -> Ended:
    """Fine-tuning: the first layer is trained from the fourth step on."""
    model = net(run.slot)
    model[0].requires_grad_(False)
    optimizer = run.wrap(model, adamw(model), outer=diary.method)

    def thaw() -> None:
        if run.step >= 3:
            model[0].requires_grad_(True)

    thaw()
    descend(run, diary, model, optimizer, after=thaw)
    return Ended(model)


def beside(run: Any, diary: Diary) -> Ended:
    """A parameter of the loss, which only the optimizer knows."""
    model, factor = net(), nn.Parameter(torch.tensor([1.0 + run.slot]))
    inner = torch.optim.AdamW([*model.parameters(), factor], lr=0.02)
    optimizer = run.wrap(model, inner, outer=diary.method)
    descend(run, diary, model, optimizer, loss=lambda found, y: squared(found * factor, y))
    both = nn.ParameterDict({"factor": factor})
    return Ended(nn.ModuleList([model, both]))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(5, 3, bias=False)
        self.leave = nn.Linear(5, 3, bias=False)
        self.leave.weight = self.enter.weight
        self.head = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(torch.cat([self.enter(x), self.leave(x).tanh()], dim=1))
        return found


def tied(run: Any, diary: Diary) -> Ended:
    model = fill(Tied())
    optimizer = run.wrap(model, adamw(model), outer=diary.method)
    descend(run, diary, model, optimizer)
    return Ended(model)


class Looked(nn.Module):
    """Looks rows up whose gradients are sparse."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(6, 3, sparse=True), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(self.table((10 * x.abs()).long() % 6).sum(1))
        return found


def sparse(run: Any, diary: Diary) -> Ended:
    model = fill(Looked())
    inner = torch.optim.SGD(model.parameters(), lr=0.02)
    optimizer = run.wrap(model, inner, outer=diary.method)
    descend(run, diary, model, optimizer)
    return Ended(model)


class Waves(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.turn = nn.Parameter(torch.zeros(5, 2, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        return (x.to(torch.complex64) @ self.turn).abs()


def waves(run: Any, diary: Diary) -> Ended:
    """Complex parameters."""
    model = fill(Waves())
    optimizer = run.wrap(model, adamw(model), outer=diary.method)
    descend(run, diary, model, optimizer)
    return Ended(model)


def double(run: Any, diary: Diary) -> Ended:
    model = fill(net().double())
    optimizer = run.wrap(model, adamw(model), outer=diary.method)
    descend(
        run, diary, model, optimizer,
        data=((n, x.double(), y) for n, x, y in run.shard(DataLoader(Numbered(), BATCH))),
        loss=lambda found, y: nn.functional.mse_loss(found, y.double()),
    )  # fmt: skip
    return Ended(model)


def normalised(run: Any, diary: Diary) -> Ended:
    model = net(normalised=True)
    optimizer = run.wrap(model, adamw(model), outer=diary.method)
    descend(run, diary, model, optimizer)
    return Ended(model)


# ------------------------------------------------------------------------------------- steps


def accumulated(run: Any, diary: Diary) -> Ended:
    """Two batches make a step."""
    model = net()
    optimizer = run.wrap(model, adamw(model), outer=diary.method)
    waiting: list[int] = []
    for numbers, x, y in run.shard(DataLoader(Numbered(), batch_size=BATCH)):
        (squared(model(x), y) / 2).backward()  # type: ignore[no-untyped-call]
        run.log(tokens=len(numbers))
        waiting += numbers.tolist()
        if len(waiting) == 2 * BATCH:
            optimizer.step()
            optimizer.zero_grad()
            diary.step(waiting, optimizer.param_groups[0]["lr"])
            waiting = []
    return Ended(model)


def averaged(run: Any, diary: Diary) -> Ended:
    """An exponential moving average of this member's parameters."""
    model = net()
    optimizer = run.wrap(model, adamw(model), outer=diary.method)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))  # type: ignore[no-untyped-call]
    run.keep("average", average)
    for numbers, x, y in run.shard(DataLoader(Numbered(), batch_size=BATCH)):
        optimizer.zero_grad()
        squared(model(x), y).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        average.update_parameters(model)
        diary.step(numbers, optimizer.param_groups[0]["lr"])
    return Ended(model, {"average": average})


def schedule_by_step(run: Any, diary: Diary) -> Ended:
    model = net()
    optimizer = run.wrap(model, adamw(model), outer=diary.method)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: 0.9**step, last_epoch=run.step - 1
    )
    for numbers, x, y in run.shard(DataLoader(Numbered(), batch_size=BATCH)):
        optimizer.zero_grad()
        squared(model(x), y).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        diary.step(numbers, optimizer.param_groups[0]["lr"])
        schedule.step()
    return Ended(model)


def one_cycle(run: Any, diary: Diary) -> Ended:
    """Rate and momentum rise and fall."""
    model = net()
    optimizer = run.wrap(model, adamw(model), outer=diary.method)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, 0.05, total_steps=SAMPLES, last_epoch=run.step - 1
    )
    for numbers, x, y in run.shard(DataLoader(Numbered(), batch_size=BATCH)):
        optimizer.zero_grad()
        squared(model(x), y).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        diary.step(numbers, optimizer.param_groups[0]["lr"])
        schedule.step()
    return Ended(model)


def half(run: Any, diary: Diary) -> Ended:
    model = net()
    optimizer = run.wrap(model, adamw(model), outer=diary.method)
    descend(
        run, diary, model, optimizer,
        around=lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    )  # fmt: skip
    return Ended(model)


def scaled(run: Any, diary: Diary) -> Ended:
    """Half precision with a gradient scaler and clipping."""
    model = net()
    optimizer = run.wrap(model, adamw(model), outer=diary.method)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=10_000)
    run.keep("scaler", scaler)
    for numbers, x, y in run.shard(DataLoader(Numbered(), batch_size=BATCH)):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = squared(model(x), y)
        scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        diary.step(numbers, optimizer.param_groups[0]["lr"])
    return Ended(model, {"scaler": scaler})


def compiled(run: Any, diary: Diary) -> Ended:
    model = net()
    with warnings.catch_warnings():
        fast: Any = torch.compile(model, backend="eager")
    optimizer = run.wrap(fast, momentum_sgd(model), outer=diary.method)
    descend(run, diary, fast, optimizer)
    return Ended(model)


def uncompiled(run: Any, diary: Diary) -> Ended:
    """The loop of `compiled` on the model itself."""
    model = net()
    optimizer = run.wrap(model, momentum_sgd(model), outer=diary.method)
    descend(run, diary, model, optimizer)
    return Ended(model)


def momentum_sgd(model: nn.Module) -> torch.optim.Optimizer:
    """While one thread compiles, torch's AdamW rounds differently in all others: SGD does not."""
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def line_search(run: Any, diary: Diary) -> Ended:
    """An optimizer that evaluates the model several times per step."""
    model = net()
    inner = torch.optim.LBFGS(model.parameters(), lr=0.3, max_iter=2)
    optimizer = run.wrap(model, inner, outer=diary.method)
    for numbers, x, y in run.shard(DataLoader(Numbered(), batch_size=BATCH)):

        def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
            optimizer.zero_grad()
            loss = squared(model(x), y)
            loss.backward()  # type: ignore[no-untyped-call]
            return loss

        optimizer.step(closure)
        diary.step(numbers, optimizer.param_groups[0]["lr"])
    return Ended(model)


def adversarial(run: Any, diary: Diary) -> Ended:
    """Two models against each other, each with an optimizer of its own."""
    maker, judge = net(3), nn.Sequential(fill(nn.Linear(2, 1), 4))
    both = nn.ModuleDict({"maker": maker, "judge": judge})
    optimizers = [adamw(judge), adamw(maker)]
    second, first = run.wrap([judge, maker], optimizers, outer=diary.method)
    for numbers, x, y in run.shard(DataLoader(Numbered(), batch_size=BATCH)):
        second.zero_grad()
        (judge(maker(x).detach()).mean() - judge(y).mean()).backward()
        second.step()
        first.zero_grad()
        (-judge(maker(x)).mean()).backward()
        first.step()
        diary.step(numbers, first.param_groups[0]["lr"])
    return Ended(both)
