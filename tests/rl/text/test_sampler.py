"""Writing: the same as the model's own forward pass, for prompts of any lengths."""

from __future__ import annotations

import pytest
import torch

from atoll.errors import ConfigError
from atoll.rl.text.prompts import Prompts
from atoll.rl.text.sampler import Decoder, Written, hidden_states, log_probabilities, write
from tests.rl.text.small import WORDING, episodes, gpt

PROMPTS = WORDING.encode(["a", "bcd", "ef"], room=8)


def sample(*, temperature: float = 1.0, seed: int = 0, prompts: Prompts = PROMPTS) -> Written:
    generator = torch.Generator().manual_seed(seed)
    return write(
        gpt(), prompts, ends=WORDING.ends, max_tokens=9, temperature=temperature,
        generator=generator,
    )  # fmt: skip


def test_token_by_token_equals_the_whole_pass() -> None:
    model = gpt()
    ids = torch.randint(0, 256, (3, 20), generator=torch.Generator().manual_seed(1))
    decoder = Decoder(model, batch=3, length=20)
    stepped = torch.stack([decoder.step(ids[:, at]) for at in range(20)], dim=1)
    with torch.no_grad():
        torch.testing.assert_close(stepped, model(ids), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(model.head(hidden_states(model, ids)), model(ids))


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.5])
def test_log_probabilities_match_the_sampled_distribution(
    temperature: float,
) -> None:
    model = gpt()
    batch = episodes(model, model, temperature=temperature)
    now, entropy = log_probabilities(
        model, batch.tokens, batch.places, batch.written, temperature=temperature
    )
    difference = (now.detach() - batch.log_probabilities)[batch.mask]
    assert difference.abs().max() < 1e-4
    assert (entropy[batch.mask] > 0).all()


def test_a_prompt_is_completed_the_same_beside_longer_ones() -> None:
    together = sample(temperature=0.0)
    for row, text in enumerate(["a", "bcd", "ef"]):
        alone = sample(temperature=0.0, prompts=WORDING.encode([text], room=8))
        length = int(alone.lengths[0])
        assert int(together.lengths[row]) == length
        assert together.tokens[row, : len(text) + length].tolist() == alone.tokens[0].tolist()


def test_the_generator_alone_decides_what_is_written() -> None:
    torch.manual_seed(0)
    first = sample(seed=4)
    torch.manual_seed(1)
    again, other = sample(seed=4), sample(seed=5)
    assert torch.equal(first.tokens, again.tokens)
    assert not (
        first.tokens.shape == other.tokens.shape and torch.equal(first.tokens, other.tokens)
    )


def test_writing_stops_at_the_first_end_and_at_the_limit() -> None:
    generator = torch.Generator().manual_seed(0)
    ends = torch.zeros(256, dtype=torch.bool)
    endless = write(gpt(), PROMPTS, ends=ends, max_tokens=5, temperature=1.0, generator=generator)
    assert endless.lengths.tolist() == [5, 5, 5]
    assert endless.tokens.shape == (3, 8)
    assert WORDING.read(endless.tokens[0, 1:6]) is None or b"\n" in bytes(
        endless.tokens[0, 1:6].tolist()
    )
    ends[:] = True
    at_once = write(gpt(), PROMPTS, ends=ends, max_tokens=5, temperature=1.0, generator=generator)
    assert at_once.lengths.tolist() == [1, 1, 1]
    assert at_once.log_probabilities.shape == (3, 1)


@pytest.mark.parametrize("text", ["", "two\nlines", "much too long"])
def test_a_prompt_that_cannot_be_completed_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="1 to 8 tokens"):
        WORDING.encode(["fine", text], room=8)


def test_a_completion_is_read_up_to_its_end() -> None:
    assert WORDING.read(torch.tensor(list(b"ab)\n"))) == "ab)"
    assert WORDING.read(torch.tensor(list(b"ab)"))) is None
    assert WORDING.ends.nonzero().flatten().tolist() == [ord("\n")]
