"""Sample completions from a language model, token by token for a whole batch, with a KV cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from atoll.devices.choose import device_of_model
from atoll.models import GPT
from atoll.models.causal_lm import CausalLM
from atoll.rl.text.prompts import Prompts

TextModel = GPT | CausalLM
"""What can learn from rewards."""


class LibraryDecoder:
    """As :class:`Decoder`, for a model of `transformers`, whose own cache it uses."""

    def __init__(self, model: CausalLM) -> None:
        self._theirs = model.library_model
        self._cache: Any = None

    @torch.no_grad()
    def step(self, ids: Tensor) -> Tensor:
        """Append a token to every sequence, [B] int64; return the logits after it, [B, V]."""
        found = self._theirs(input_ids=ids[:, None], past_key_values=self._cache, use_cache=True)
        self._cache = found.past_key_values
        return cast(Tensor, found.logits[:, -1].float())


class Decoder:
    """Feeds a batch of sequences to a model, one position at a time, with a KV cache.

    It computes the same as the model's forward pass over whole sequences, without recomputing
    earlier positions for each token.

    The model must not use dropout; `length` is at most its context.
    """

    def __init__(self, model: GPT, *, batch: int, length: int) -> None:
        config = model.config
        self._model = model
        shape = (batch, config.heads, length, config.width // config.heads)
        device = model.embedding.weight.device
        self._keys = [torch.empty(shape, device=device) for _ in range(config.layers)]
        self._values = [torch.empty(shape, device=device) for _ in range(config.layers)]
        self._position = 0

    @torch.no_grad()
    def step(self, ids: Tensor) -> Tensor:
        """Append a token to every sequence, [B] int64; return the logits after it, [B, V]."""
        model, at = self._model, self._position
        x = model.embedding(ids)
        for number, block in enumerate(model.blocks):
            x = self._block(block, number, x, at)
        self._position += 1
        return cast(Tensor, model.head(model.norm(x)))

    def _block(self, block: torch.nn.Module, number: int, x: Tensor, at: int) -> Tensor:
        heads = self._model.config.heads
        mixed = block.queries_keys_values(block.norm_attention(x))  # type: ignore[operator]
        mixed = mixed.view(len(x), heads, 3, -1)
        cosines, sines = block.cosines[at, 0], block.sines[at, 0]  # type: ignore[index]
        turned = mixed[:, :, :2]
        turned = turned * cosines + turned.roll(turned.shape[-1] // 2, dims=-1) * sines
        keys, values = self._keys[number], self._values[number]
        keys[:, :, at], values[:, :, at] = turned[:, :, 1], mixed[:, :, 2]
        attended = functional.scaled_dot_product_attention(
            turned[:, :, 0, None], keys[:, :, : at + 1], values[:, :, : at + 1]
        )
        x = x + block.merge(attended.reshape(len(x), -1))  # type: ignore[operator]
        hidden = functional.gelu(block.up(block.norm_mlp(x)))  # type: ignore[operator]
        return x + cast(Tensor, block.down(hidden))  # type: ignore[operator]


def hidden_states(model: nn.Module, ids: Tensor, *, added: Tensor | None = None) -> Tensor:
    """Return the hidden state of each position before the output layer, [B, L, width].

    Args:
        model: A GPT, or a model of `transformers` without its output layer.
        ids: [B, L], int64.
        added: [B, width], added to every token of a row; None adds nothing.
    """
    theirs: Any = model
    embedding = model.embedding if isinstance(model, GPT) else theirs.get_input_embeddings()
    x: Tensor = embedding(ids)
    if added is not None:
        x = x + added[:, None]
    if not isinstance(model, GPT):
        return cast(Tensor, theirs(inputs_embeds=x, use_cache=False).last_hidden_state)
    for block in model.blocks:
        x = block(x)
    return cast(Tensor, model.norm(x))


@dataclass(frozen=True, slots=True)
class Written:
    """Completions and their log-probabilities."""

    tokens: Tensor
    """[B, L], int64: prompt, completion, zeros."""
    lengths: Tensor
    """[B], int64: tokens of each completion with its end."""
    log_probabilities: Tensor
    """[B, T], float32; zeros after the end."""


@torch.no_grad()
def write(
    model: TextModel,
    prompts: Prompts,
    *,
    ends: Tensor,
    max_tokens: int,
    temperature: float,
    generator: torch.Generator | None,
) -> Written:
    """Sample a completion of each prompt; the result is in main memory.

    All rows are at the same position: rows with shorter prompts already write while longer prompts
    are still being read, so no row waits or is shifted.

    Args:
        model: The model, without dropout.
        prompts: The longest one and `max_tokens` fit into the model's context together.
        ends: [vocab], bool: tokens that end a completion.
        max_tokens: Longest completion.
        temperature: Divides the logits; 0 takes the most probable token.
        generator: Source of randomness; needed unless the temperature is 0.
    """
    model.eval()
    count, longest = prompts.tokens.shape
    last = prompts.lengths + max_tokens
    tokens = torch.zeros(count, longest + max_tokens, dtype=torch.int64)
    tokens[:, :longest] = prompts.tokens
    scores = torch.zeros(count, max_tokens)
    lengths = torch.zeros(count, dtype=torch.int64)
    writing = torch.ones(count, dtype=torch.bool)
    decoder = (
        Decoder(model, batch=count, length=longest + max_tokens)
        if isinstance(model, GPT) else LibraryDecoder(model)
    )  # fmt: skip
    device = device_of_model(model)
    for at in range(tokens.shape[1] - 1):
        logits = decoder.step(tokens[:, at].to(device)).cpu()
        step = at + 1 - prompts.lengths  # of the token at `at + 1`
        now = writing & (step >= 0)
        if now.any():
            ids, log_p = _choose(logits, temperature, generator)
            tokens[now, at + 1] = ids[now]
            scores[now, step[now]] = log_p[now]
            lengths += now
            writing = writing & ~(now & (ends[ids] | (at + 2 >= last)))
            if not writing.any():
                break
    longest_row = int((prompts.lengths + lengths).max())
    steps = int(lengths.max())
    return Written(tokens[:, :longest_row], lengths, scores[:, :steps])


def _choose(
    logits: Tensor, temperature: float, generator: torch.Generator | None
) -> tuple[Tensor, Tensor]:
    """Return a token for each row, and its log-probability in the sampled distribution."""
    if temperature == 0.0:
        ids = logits.argmax(-1)
        log_p = logits.log_softmax(-1)
    else:
        log_p = (logits / temperature).log_softmax(-1)
        ids = torch.multinomial(log_p.exp(), 1, generator=generator).squeeze(1)
    return ids, log_p.gather(1, ids[:, None]).squeeze(1)


def log_probabilities(
    model: TextModel, tokens: Tensor, places: Tensor, written: Tensor, *, temperature: float
) -> tuple[Tensor, Tensor]:
    """Return a model's log-probabilities of written tokens, and its entropy at each step.

    For `tokens`, `places` and `written` see `Episodes`; `temperature` is that of the writing.

    Returns:
        Log-probabilities and entropies, both [B, T]; undefined after the end of a completion.
    """
    logits = model(tokens)
    index = places[:, :, None].expand(-1, -1, logits.shape[-1])
    log_p = (logits.gather(1, index) / (temperature or 1.0)).log_softmax(-1)
    entropy = -(log_p.exp() * log_p).sum(-1)
    return log_p.gather(2, written[:, :, None]).squeeze(2), entropy
