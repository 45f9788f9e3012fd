"""Training data: texts and images, held-out splits, tokenizers, shards and resumable streams.

May import errors, digest and model_hub.
Start with `dataset.py`, then `stream.py`.
"""

from atoll.data.assignment import Assignment, read_assignment
from atoll.data.corpora import CORPORA, IMAGE_CORPORA, Corpus, Document, is_images, load_corpus
from atoll.data.cursor import Cursor
from atoll.data.dataset import Dataset, HeldOut, HeldOutBatches, load_dataset
from atoll.data.documents import (
    Documents,
    all_documents,
    held_out_documents,
    train_documents,
)
from atoll.data.image_shards import ImageShards
from atoll.data.images import ImageDataset, Images, load_images
from atoll.data.path_shards import PathShards
from atoll.data.shards import ORDERS, Shards
from atoll.data.split import Split, split_text
from atoll.data.stream import BatchStream, Deal
from atoll.data.streamed import stream_dataset
from atoll.data.tokens import (
    ByteTokenizer,
    PretrainedTokenizer,
    Tokenizer,
    make_tokenizer,
    tokenizer_from_json,
)
from atoll.data.tuning.dataset import ExampleSet, ExampleShards

TrainingData = Dataset | ImageDataset | ExampleSet
"""What a job is trained on."""

__all__ = [
    "CORPORA",
    "IMAGE_CORPORA",
    "ORDERS",
    "Assignment",
    "BatchStream",
    "ByteTokenizer",
    "Corpus",
    "Cursor",
    "Dataset",
    "Deal",
    "Document",
    "Documents",
    "ExampleSet",
    "ExampleShards",
    "HeldOut",
    "HeldOutBatches",
    "ImageDataset",
    "ImageShards",
    "Images",
    "PathShards",
    "PretrainedTokenizer",
    "Shards",
    "Split",
    "Tokenizer",
    "TrainingData",
    "all_documents",
    "held_out_documents",
    "is_images",
    "load_corpus",
    "load_dataset",
    "load_images",
    "make_tokenizer",
    "read_assignment",
    "split_text",
    "stream_dataset",
    "tokenizer_from_json",
    "train_documents",
]
