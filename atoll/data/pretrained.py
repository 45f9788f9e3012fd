"""The tokenizer of a pretrained model."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from atoll.data.tokens import FORMAT, LARGEST_UINT16, pieces

if TYPE_CHECKING:
    from tokenizers import Tokenizer as HuggingFaceTokenizer


class PretrainedTokenizer:
    """A tokenizer of the `tokenizers` library, as published with a model.

    Not lossless: invalid UTF-8 is replaced, and some tokenizers drop spaces or case. No special
    tokens are added.
    """

    name = "model"

    def __init__(self, inner: HuggingFaceTokenizer) -> None:
        self._inner = inner
        self.vocab_size: int = inner.get_vocab_size()

    def encode(self, data: bytes) -> Tensor:
        """Return the ids: uint16 if the vocabulary fits, else int32."""
        kind = np.uint16 if self.vocab_size <= LARGEST_UINT16 else np.int32
        texts = [piece.decode("utf-8", errors="replace") for piece in pieces(data)]
        encoded = self._inner.encode_batch_fast(texts, add_special_tokens=False)
        parts = [np.array(part.ids, dtype=kind) for part in encoded]
        return torch.from_numpy(np.concatenate(parts) if parts else np.empty(0, dtype=kind))

    def decode(self, ids: Tensor) -> bytes:
        """Return the text as UTF-8."""
        text: str = self._inner.decode(ids.tolist(), skip_special_tokens=False)
        return text.encode("utf-8")

    def to_json(self) -> str:
        """Return the whole tokenizer."""
        inner = json.loads(self._inner.to_str())
        return json.dumps({"format": FORMAT, "name": self.name, "pretrained": inner})
