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

    It reads UTF-8; invalid bytes become replacement characters. Decoding may not restore the text:
    some tokenizers drop spaces or lower the case. No special tokens are added: documents follow
    each other as in the other tokenizers.
    """

    name = "model"

    def __init__(self, inner: HuggingFaceTokenizer) -> None:
        """Wrap the library's tokenizer."""
        self._inner = inner
        self.vocab_size: int = inner.get_vocab_size()

    def encode(self, data: bytes) -> Tensor:
        """Return the ids, uint16 up to 65,536 of them, else int32."""
        kind = np.uint16 if self.vocab_size <= LARGEST_UINT16 else np.int32
        texts = [piece.decode("utf-8", errors="replace") for piece in pieces(data)]
        encoded = self._inner.encode_batch_fast(texts, add_special_tokens=False)
        parts = [np.array(part.ids, dtype=kind) for part in encoded]
        return torch.from_numpy(np.concatenate(parts) if parts else np.empty(0, dtype=kind))

    def decode(self, ids: Tensor) -> bytes:
        """Return the text that the ids stand for, as UTF-8."""
        text: str = self._inner.decode(ids.tolist(), skip_special_tokens=False)
        return text.encode("utf-8")

    def to_json(self) -> str:
        """Return all of it."""
        inner = json.loads(self._inner.to_str())
        return json.dumps({"format": FORMAT, "name": self.name, "pretrained": inner})
