"""Builds a part of a model, with the values that it has in the whole model.

The model is built twice, by the same code. The first time large tensors get no memory (torch's meta
device), which shows the model's structure, and from which operations each tensor follows. The
second time only operations that the wanted tensors follow from are computed, and those that draw
random numbers: their results are freed at once, but what comes after them gets the same numbers as
in a whole model. Small tensors are always computed: code may look at their values. Code that looks
at values of large tensors (`trunc_normal_`, which draws again what is out of range) gets them as
long as they are among the newest; see `recent.py`.

Most memory in use: the wanted tensors, and the largest tensor that is initialised. The time is that
of initialising the whole model.

The first pass is that of deferred initialisation (torchdistx); differs: nothing is replayed, and
what is not wanted draws its random numbers, too.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from atoll.models.partial.call import Call, NotPartly, key_of, on_meta
from atoll.models.partial.modes import Building, as_if_here
from atoll.models.partial.recent import KEPT, RecentValues

log = logging.getLogger(__name__)

LARGE_BYTES = 1 << 16
"""Smaller tensors are always computed."""

Wanted = Callable[[Any], Iterable[Tensor]]
"""Returns the tensors of a model that are wanted; their values are not there yet."""


@dataclass(frozen=True, slots=True)
class Partly:
    """A model of which only the wanted tensors have values."""

    model: Any
    whole: str = ""
    """Why the whole model was built after all; empty: it was not."""


@dataclass(slots=True)
class Step:
    """An operation of the first pass."""

    name: str
    large: bool = False
    """It makes a large tensor, or one that follows from a large one."""
    nbytes: int = 0
    """Memory of the tensors that it makes, or draws numbers for."""
    draws: bool = False


@dataclass(slots=True)
class Survey:
    """A model without values, and what each of its tensors follows from."""

    looks: bool = False
    """The code looks at values of large tensors."""
    model: Any = None
    steps: list[Step] = field(default_factory=list)
    sources: dict[int, set[int]] = field(default_factory=dict)
    """Numbers of the steps that a storage without values follows from, by its key."""
    storages: list[Any] = field(default_factory=list)
    """All of them, so that no key is used twice."""

    @classmethod
    def of(cls, make: Callable[[], Any]) -> Survey:
        """Build a model without values.

        Raises:
            NotPartly: that is not possible.
        """
        try:
            return cls._of(make, looks=False)
        except NotPartly:  # it may look at values, for which random numbers have to be drawn
            return cls._of(make, looks=True)

    @classmethod
    def _of(cls, make: Callable[[], Any], *, looks: bool) -> Survey:
        survey = cls(looks)
        survey.model = _run(_First(survey), make)
        return survey

    def needed(self, tensors: Iterable[Tensor]) -> set[int]:
        """Return the steps that have to compute for these tensors to have values."""
        return {n for t in tensors for n in self.sources.get(key_of(t), ())}

    def peak_bytes(self, tensors: Iterable[Tensor]) -> int:
        """Return the most memory that building these tensors takes."""
        needed = self.needed(tensors)
        kept = sum(step.nbytes for n, step in enumerate(self.steps) if n in needed)
        drawn = (s.nbytes for n, s in enumerate(self.steps) if s.draws and n not in needed)
        return kept + max(drawn, default=0) * (KEPT if self.looks else 1)


def build_partly(make: Callable[[], Any], wanted: Wanted) -> Partly:
    """Return the model that `make` returns, of which all other large tensors are on meta.

    `make` seeds torch itself, and is called a few times. If the model cannot be built in parts, the
    whole is, and a line in the log says why. `wanted` may raise `NotPartly` for the same.

    Raises:
        Exception: what `make` and `wanted` raise.
    """
    try:
        survey = Survey.of(make)
        return Partly(_second(make, survey, wanted))
    except NotPartly as error:
        log.warning("the whole model is built in main memory: %s", error)
        return Partly(make(), str(error))


def _second(make: Callable[[], Any], survey: Survey, wanted: Wanted) -> Any:
    mode = _Second(survey, survey.needed(wanted(survey.model)))
    model = _run(mode, make)
    if mode.number != len(survey.steps) or any(t.is_meta for t in wanted(model)):
        raise NotPartly("it is not built in the same way twice")
    return model


def _run(mode: Building, make: Callable[[], Any]) -> Any:
    try:
        with as_if_here(), mode:
            return make()
    except Exception as error:  # of the code of a user, or of a library
        raise NotPartly(mode.trouble or f"{type(error).__name__}: {error}") from error


def tensors_of(modules: Iterable[nn.Module]) -> Iterator[Tensor]:
    """Yield parameters, buffers and other tensors that modules hold, and modules below them."""
    for module in modules:
        for part in module.modules():
            yield from tensors_in(vars(part).values())


def tensors_in(values: Iterable[object]) -> Iterator[Tensor]:
    """Yield the tensors in nested values."""
    yield from (t for t in tree_leaves(list(values)) if isinstance(t, Tensor))


class _First(Building):  # type: ignore[no-untyped-call]
    """Gives large tensors no memory, and notes what follows from what."""

    def __init__(self, survey: Survey) -> None:
        super().__init__(RecentValues() if survey.looks else None)
        self._survey = survey

    def do(self, call: Call) -> Any:
        step = Step(call.name, draws=call.draws)
        self._survey.steps.append(step)
        if call.absent or (call.creates and _large(call.new(call.without_values()))):
            outputs = self.absent(call, draw=False)
        else:
            outputs = call.run()
        new = call.new(outputs)
        if _large(new) and not any(t.is_meta for t in new):
            if outputs is not new[0]:
                raise NotPartly("it makes several large tensors of small ones")
            real, outputs = new[0], on_meta(new[0])
            new = [outputs]
            if self.recent is not None:
                self.recent.put(outputs, real)
        self._note(call, step, outputs, [t for t in new if t.is_meta])
        return outputs

    def _note(self, call: Call, step: Step, outputs: Any, new: Sequence[Tensor]) -> None:
        survey = self._survey
        step.large = bool(new)
        step.nbytes = sum(t.untyped_storage().nbytes() for t in new)
        if call.draws:
            step.nbytes += sum(t.nbytes for t in call.given if t.is_meta)
        sources = {n for t in call.given for n in survey.sources.get(key_of(t), ())}
        if new:
            sources.add(call.number)
        for tensor in call.tensors(outputs):
            if tensor.is_meta:
                if key_of(tensor) not in survey.sources:
                    survey.storages.append(tensor.untyped_storage())
                survey.sources.setdefault(key_of(tensor), set()).update(sources)


def _large(tensors: Iterable[Tensor]) -> bool:
    return any(t.nbytes >= LARGE_BYTES for t in tensors)


class _Second(Building):  # type: ignore[no-untyped-call]
    """Computes the needed steps; of the others only those that draw random numbers."""

    def __init__(self, survey: Survey, needed: set[int]) -> None:
        super().__init__(RecentValues() if survey.looks else None)
        self._steps, self._needed = survey.steps, needed
        self._storages: list[Any] = []

    def do(self, call: Call) -> Any:
        known = self._steps[call.number] if call.number < len(self._steps) else Step("nothing")
        if known.name != call.name:
            raise NotPartly(f"it is not built in the same way twice: {call.name}, {known.name}")
        if not call.absent and (not known.large or call.number in self._needed):
            return call.run()
        outputs = self.absent(call, draw=True)
        if self.recent is not None:
            self._storages += [t.untyped_storage() for t in call.tensors(outputs)]
        return outputs
