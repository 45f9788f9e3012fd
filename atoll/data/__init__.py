"""Text to batches: corpora, the held-out split, tokenizers, shards and resumable streams."""

from atoll.data.corpora import CORPORA, Corpus, Document, load_corpus
from atoll.data.cursor import Cursor
from atoll.data.dataset import Dataset, HeldOut, HeldOutBatches, load_dataset
from atoll.data.shards import ORDERS, Shards
from atoll.data.split import Split, split_text
from atoll.data.stream import BatchStream, Deal
from atoll.data.tokens import Tokenizer, make_tokenizer, tokenizer_from_json

__all__ = [
    "CORPORA",
    "ORDERS",
    "BatchStream",
    "Corpus",
    "Cursor",
    "Dataset",
    "Deal",
    "Document",
    "HeldOut",
    "HeldOutBatches",
    "Shards",
    "Split",
    "Tokenizer",
    "load_corpus",
    "load_dataset",
    "make_tokenizer",
    "split_text",
    "tokenizer_from_json",
]
