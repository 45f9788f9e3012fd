"""Training data: texts and images, held-out splits, tokenizers, shards and resumable streams.

May import errors, ids and task.
Start with `dataset.py`, then `stream.py`.
"""

from atoll.data.corpora import CORPORA, IMAGE_CORPORA, Corpus, Document, is_images, load_corpus
from atoll.data.cursor import Cursor
from atoll.data.dataset import Dataset, HeldOut, HeldOutBatches, load_dataset
from atoll.data.image_shards import ImageShards
from atoll.data.images import ImageDataset, Images, load_images
from atoll.data.pretrained import PretrainedTokenizer
from atoll.data.shards import ORDERS, Shards
from atoll.data.split import Split, split_text
from atoll.data.stream import BatchStream, Deal
from atoll.data.tokens import ByteTokenizer, Tokenizer, make_tokenizer, tokenizer_from_json

__all__ = [
    "CORPORA",
    "IMAGE_CORPORA",
    "ORDERS",
    "BatchStream",
    "ByteTokenizer",
    "Corpus",
    "Cursor",
    "Dataset",
    "Deal",
    "Document",
    "HeldOut",
    "HeldOutBatches",
    "ImageDataset",
    "ImageShards",
    "Images",
    "PretrainedTokenizer",
    "Shards",
    "Split",
    "Tokenizer",
    "is_images",
    "load_corpus",
    "load_dataset",
    "load_images",
    "make_tokenizer",
    "split_text",
    "tokenizer_from_json",
]
