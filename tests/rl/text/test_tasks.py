"""Tasks: what is worth what, and what models are taught before rewards begin."""

from __future__ import annotations

import random
import sys
import types

import pytest

from atoll.errors import ConfigError
from atoll.rl.text.tasks import Brackets, Expressions, TextTask, make_task


@pytest.mark.parametrize(
    ("prompt", "completion", "worth"),
    [
        ("([", "])", 1.0), ("([", ")]", 0.0), ("([", "]", 0.0), ("([", "]))", 0.0),
        ("(", ")()", 1.0), ("(", "x)", 0.0), ("(", "", 0.0), ("()[", "]", 1.0),
    ],
)  # fmt: skip
def test_balanced_brackets_are_rewarded(prompt: str, completion: str, worth: float) -> None:
    assert Brackets().reward(prompt, completion) == worth


@pytest.mark.parametrize(
    ("prompt", "completion", "worth"),
    [
        ("(a*(b-", "c))", 1.0), ("(a*(b-", "c)", 0.0), ("(a+", "-b)", 1.0), ("(a+", "ab)", 1.0),
        ("(a+", "1)", 0.0), ("(a+", "b) #", 0.0), ("(a+", "", 0.0), ("(a+", "b)(", 0.0),
    ],
)  # fmt: skip
def test_parsable_expressions_are_rewarded(prompt: str, completion: str, worth: float) -> None:
    assert Expressions().reward(prompt, completion) == worth


@pytest.mark.parametrize("name", ["brackets", "expressions"])
def test_the_flawed_share_of_examples_is_wrong_about_so_often(name: str) -> None:
    for flawed, low, high in ((0.0, 1.0, 1.0), (0.5, 0.4, 0.8)):
        task = make_task(f"text:{name}", {"flawed": flawed})
        source = random.Random(5)
        right = sum(task.reward(*task.example(source)) for _ in range(400)) / 400
        assert low <= right <= high


@pytest.mark.parametrize("name", ["brackets", "expressions"])
def test_a_prompt_alone_is_worth_nothing_and_the_seed_decides_it(name: str) -> None:
    task = make_task(f"text:{name}", {})
    first, again = random.Random(9), random.Random(9)
    for _ in range(50):
        prompt = task.prompt(first)
        assert prompt == task.prompt(again)
        assert prompt
        assert "\n" not in prompt
        assert task.reward(prompt, "") == 0.0


@pytest.mark.parametrize(
    ("env", "options", "said"),
    [
        ("text:bracket", {}, "brackets"),
        ("CartPole-v1", {}, "language model"),
        ("text:brackets", {"deep": 3}, "deep"),
        ("text:brackets", {"kinds": "("}, "paired"),
        ("text:brackets", {"least": 5, "most": 2}, "least = 5"),
        ("text:expressions", {"flawed": 2.0}, "flawed = 2.0"),
        ("text:no_such_module:make", {}, "no_such_module"),
    ],
)
def test_a_task_that_cannot_be_made_says_why(
    env: str, options: dict[str, object], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        make_task(env, options)


class Echo:
    """Say the same again."""

    def prompt(self, source: random.Random) -> str:
        return source.choice("abc")

    def reward(self, prompt: str, completion: str) -> float:
        return float(prompt == completion)

    def example(self, source: random.Random) -> tuple[str, str]:
        prompt = self.prompt(source)
        return prompt, prompt


def test_an_own_task_comes_from_a_module(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("my_texts")
    module.echo = Echo  # type: ignore[attr-defined]
    module.nothing = dict  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "my_texts", module)
    task: TextTask = make_task("text:my_texts:echo", {})
    assert task.reward("a", "a") == 1.0
    with pytest.raises(ConfigError, match="prompt, reward, example"):
        make_task("text:my_texts:nothing", {})


def test_a_sum_is_right_or_wrong() -> None:
    task = make_task("text:sums", {"least": 10, "most": 99})
    source = random.Random(3)
    for _ in range(20):
        prompt = task.prompt(source)
        first, second = map(int, prompt.rstrip("=").split("+"))
        assert 10 <= first <= 99
        assert task.reward(prompt, f" {first + second} ") == 1.0
        for wrong in ("", str(first + second + 1), "about 7"):
            assert task.reward(prompt, wrong) == 0.0
    assert make_task("text:sums", {"flawed": 0.0}).example(source)[1].isdigit()
