"""Tasks for language models: prompts, and a program that computes a completion's reward.

A completion ends with a line break, which the task does not see. A completion without an end gets
no reward.
"""

from __future__ import annotations

import ast
import importlib
import random
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Protocol

from atoll.errors import ConfigError, unknown

PREFIX = "text:"
"""Prefix of environments that are tasks for language models."""


class TextTask(Protocol):
    """A task for a language model."""

    def prompt(self, source: random.Random) -> str:
        """Return a non-empty prompt without line breaks."""
        ...

    def reward(self, prompt: str, completion: str) -> float:
        """Return a completion's reward; deterministic."""
        ...

    def example(self, source: random.Random) -> tuple[str, str]:
        """Return a prompt and a completion to imitate before rewards begin; it may be wrong."""
        ...


class Brackets:
    """Close the prompt's open brackets, in order, and stop.

    Reward 1 if prompt and completion together are balanced, else 0.

    Args:
        kinds: Pairs of brackets, e.g. `()[]`.
        least: Fewest open brackets of a prompt.
        most: Most open brackets of a prompt.
        flawed: Fraction of wrong examples, which limits what a model learns before rewards begin.
    """

    def __init__(
        self, *, kinds: str = "()[]{}", least: int = 2, most: int = 8, flawed: float = 0.5
    ) -> None:
        if len(kinds) < 2 or len(kinds) % 2 or not kinds.isprintable():
            raise ConfigError(
                "brackets must be paired", given=f"kinds = {kinds!r}", expected='e.g. "()[]"'
            )
        _check_sizes(least, most, flawed)
        self._closing = dict(zip(kinds[::2], kinds[1::2], strict=True))
        self._least, self._most, self._flawed = least, most, flawed

    def prompt(self, source: random.Random) -> str:
        """Return brackets, some closed and some left open."""
        opening = list(self._closing)
        left = source.randint(self._least, self._most)
        parts: list[str] = []
        for _ in range(left):
            if source.random() < 0.25:
                closed = source.choice(opening)
                parts.append(closed + self._closing[closed])
            parts.append(source.choice(opening))
        return "".join(parts)

    def reward(self, prompt: str, completion: str) -> float:
        """Return 1 if the whole is balanced."""
        missing: list[str] = []
        for sign in prompt + completion:
            if sign in self._closing:
                missing.append(self._closing[sign])
            elif not missing or missing.pop() != sign:
                return 0.0
        return float(not missing)

    def example(self, source: random.Random) -> tuple[str, str]:
        """Return a prompt and its closings; in the flawed fraction one is wrong or missing."""
        prompt = self.prompt(source)
        missing: list[str] = []
        for sign in prompt:
            if sign in self._closing:
                missing.append(self._closing[sign])
            else:
                missing.pop()
        closings = missing[::-1]
        if source.random() < self._flawed:
            place = source.randrange(len(closings))
            closings[place : place + 1] = source.choice(["", *self._closing.values()])
        return prompt, "".join(closings)


class Expressions:
    """Finish an arithmetic expression so that Python's parser accepts it.

    Reward 1 if it does, else 0. A prompt ends with an operator inside some parentheses, e.g.
    `(a*(b-`, which `c))` would finish.

    Args:
        least: Fewest open parentheses of a prompt.
        most: Most open parentheses of a prompt.
        flawed: Fraction of wrong examples.
    """

    NAMES = "abcxyz"
    OPERATORS = "+-*/"

    def __init__(self, *, least: int = 1, most: int = 5, flawed: float = 0.5) -> None:
        _check_sizes(least, most, flawed)
        self._least, self._most, self._flawed = least, most, flawed
        self._known = {*self.NAMES, *self.OPERATORS, "(", ")"}

    def prompt(self, source: random.Random) -> str:
        """Return an unfinished expression."""
        parts: list[str] = []
        for _ in range(source.randint(self._least, self._most)):
            parts += ["(", source.choice(self.NAMES), source.choice(self.OPERATORS)]
            if source.random() < 0.25:
                parts += [source.choice(self.NAMES), source.choice(self.OPERATORS)]
        return "".join(parts)

    def reward(self, prompt: str, completion: str) -> float:
        """Return 1 if the whole is an expression."""
        whole = prompt + completion
        if not self._known.issuperset(whole):
            return 0.0
        try:
            ast.parse(whole, mode="eval")
        except (SyntaxError, RecursionError, MemoryError):
            return 0.0
        return 1.0

    def example(self, source: random.Random) -> tuple[str, str]:
        """Return a prompt and its end; in the flawed fraction a character is lost or doubled."""
        prompt = self.prompt(source)
        parts = [source.choice(self.NAMES)]
        for _ in range(prompt.count("(")):
            if source.random() < 0.2:
                parts += [source.choice(self.OPERATORS), source.choice(self.NAMES)]
            parts.append(")")
        if source.random() < self._flawed:
            place = source.randrange(len(parts))
            parts[place] *= source.choice([0, 2])
        return prompt, "".join(parts)


class Sums:
    """Add two numbers: `12+30=` is completed by `42`.

    Reward 1 for the right number, else 0; spaces around it do not matter.

    Args:
        least: Smallest number.
        most: Largest number.
        flawed: Fraction of wrong examples.
    """

    def __init__(self, *, least: int = 1, most: int = 9, flawed: float = 0.5) -> None:
        _check_sizes(least, most, flawed)
        self._least, self._most, self._flawed = least, most, flawed

    def prompt(self, source: random.Random) -> str:
        """Return a sum without its result."""
        first, second = (source.randint(self._least, self._most) for _ in range(2))
        return f"{first}+{second}="

    def reward(self, prompt: str, completion: str) -> float:
        """Return 1 if the result is right."""
        return float(completion.strip() == self._result(prompt))

    def example(self, source: random.Random) -> tuple[str, str]:
        """Return a sum and its result; in the flawed fraction it is off by one."""
        prompt = self.prompt(source)
        right = int(self._result(prompt))
        return prompt, str(right + (source.random() < self._flawed))

    @staticmethod
    def _result(prompt: str) -> str:
        first, second = prompt.rstrip("=").split("+")
        return str(int(first) + int(second))


TASKS: Mapping[str, Callable[..., TextTask]] = MappingProxyType(
    {"brackets": Brackets, "expressions": Expressions, "sums": Sums}
)
"""The tasks after `text:`, besides `MODULE:FACTORY`."""


def make_task(env: str, options: Mapping[str, Any]) -> TextTask:
    """Return the task that an `env` of `[[rl.policies]]` names.

    `env` is `text:brackets`, `text:expressions`, `text:sums`, or `text:MODULE:FACTORY` for a custom
    task.

    Raises:
        ConfigError: the task is unknown, or its options are wrong.
    """
    name = env.removeprefix(PREFIX)
    if name == env:
        raise ConfigError(
            "this is not a task for a language model", given=env, expected=f"{PREFIX}NAME"
        )
    factory = _entry_point(name) if ":" in name else TASKS.get(name)
    if factory is None:
        raise unknown("task for language models", name, TASKS)
    try:
        task: TextTask = factory(**options)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"the task {name!r} refuses its options", given=f"{dict(options)}: {error}",
            remedy="see docs/guide/rl_text.md",
        ) from error  # fmt: skip
    missing = [part for part in ("prompt", "reward", "example") if not hasattr(task, part)]
    if missing:
        raise ConfigError(
            "this is not a task for a language model", given=f"{name} without {', '.join(missing)}",
            expected="an object with prompt, reward and example",
        )  # fmt: skip
    return task


def _entry_point(name: str) -> Callable[..., TextTask]:
    module, _, factory = name.partition(":")
    try:
        found: Callable[..., TextTask] = getattr(importlib.import_module(module), factory)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            "this task cannot be loaded", given=f"{name} ({error})",
            expected="MODULE:FACTORY, importable on the machine that runs it",
            remedy="put the module into the job's `code` folder",
        ) from error  # fmt: skip
    return found


def _check_sizes(least: int, most: int, flawed: float) -> None:
    if not 1 <= least <= most:
        raise ConfigError(
            "prompts cannot have these sizes", given=f"least = {least}, most = {most}",
            expected="1 <= least <= most",
        )  # fmt: skip
    if not 0 <= flawed <= 1:
        raise ConfigError(
            "the share of wrong examples is out of range",
            given=f"flawed = {flawed}",
            expected="0 to 1",
        )
