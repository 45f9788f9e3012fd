"""Build the parts of a job: data, model, optimizer, schedule and strategy."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from atoll.checkpoint import describe
from atoll.codec import make_codec
from atoll.codec.base import Codec
from atoll.config import JobSpec
from atoll.data import (
    ByteTokenizer,
    Deal,
    ExampleSet,
    ExampleShards,
    HeldOut,
    HeldOutBatches,
    ImageDataset,
    ImageShards,
    PretrainedTokenizer,
    Shards,
    Tokenizer,
    TrainingData,
    is_images,
    load_dataset,
    load_images,
)
from atoll.data.tuning.dataset import load_examples
from atoll.data.tuning.options import ExampleOptions
from atoll.devices.facts import check_dtypes
from atoll.errors import ConfigError
from atoll.group.aggregation import Aggregation
from atoll.models import (
    IMAGES,
    MODELS,
    TEXT,
    CausalLM,
    CausalLMConfig,
    build_custom,
    build_model,
    check_context,
    is_custom,
    model_row,
)
from atoll.models.adapted import Adapter
from atoll.models.build_causal_lm import build_causal_lm
from atoll.models.pretrained import load_tokenizer
from atoll.strategies.base import Outer
from atoll.strategies.compatibility import check_job
from atoll.strategies.inner.options import confined_to
from atoll.strategies.inner.pipeline.subspace import enlarge_table
from atoll.strategies.verifiable import AUDIT
from atoll.task import Task, real_numel
from atoll.train.optim.lazy_compiler import leave_out_compiler
from atoll.train.optim.optimizers import StepSchedule, build_optimizer, learning_rate

OF_THE_MODEL = "model"
"""Value of `tokenizer` in `[data]` that selects the tokenizer of the pretrained model."""

PROCESSOR = torch.device("cpu")

MOST_LOGITS = 1 << 26
"""Logits of one forward pass of an evaluation, 256 MB in fp32; the vocabulary of a pretrained model
(50,000 tokens) would take gigabytes at the usual batch size.
"""

EVALUATIONS = 10
CHECKPOINTS = 8
"""Approximate numbers per run, if the job sets no interval."""


@dataclass(frozen=True, slots=True)
class Intervals:
    """How many rounds lie between two evaluations, and between two checkpoints."""

    evaluate: int
    save: int

    @classmethod
    def of(cls, spec: JobSpec, rounds: int) -> Intervals:
        """Return the intervals of the job, or defaults that fit a run of `rounds` rounds."""
        return cls(
            spec.train.eval_every or max(1, rounds // EVALUATIONS),
            spec.checkpoint.every or max(1, rounds // CHECKPOINTS),
        )


@dataclass(frozen=True, slots=True)
class Built:
    """One member's parts of a job; the strategy is not set up yet."""

    model: Any
    """The whole model, a `Trainable`."""
    dataset: TrainingData
    shards: Deal
    held_out: HeldOutBatches
    """The evaluation batches, in the form this model takes."""
    about: Mapping[str, str]
    """Metadata of a weights file: enough to rebuild the model and to interpret its inputs."""
    task: Task
    schedule: StepSchedule
    outer: Outer
    codec: Codec
    strategy: str
    """The name of the outer strategy."""
    aggregation: Aggregation

    def intervals(self, spec: JobSpec, *, peers: int) -> Intervals:
        """Return how often to evaluate and save."""
        elements = self.task.num_parameters + sum(map(real_numel, self.task.buffers()))
        plan = self.outer.traffic(elements, max(2, peers), steps=spec.train.steps)
        return Intervals.of(spec, plan.rounds)


def build(
    spec: JobSpec,
    *,
    member: str,
    slot: int,
    num_slots: int,
    device: torch.device = PROCESSOR,
) -> Built:
    """Build a job's parts from seeds, so that all members start with the same weights.

    The model is built in main memory and moved to `device`.

    Raises:
        ConfigError: the job names something that does not exist, or the device lacks a type of
            numbers.
        DataError: the text is missing or too small.
    """
    resolved = check_job(spec)
    if spec.job.threads:
        torch.set_num_threads(spec.job.threads)
    seed = spec.job.seed
    outer, codec = resolved.build(), make_codec(resolved.codec)
    dataset = load_data(spec)
    model = whole_model(spec, dataset)
    check_dtypes({t.dtype for t in (*model.parameters(), *model.buffers())}, device)
    model.to(device)
    optimizer = build_optimizer(model, spec.train)
    schedule = StepSchedule(optimizer, learning_rate(spec.train))
    task = Task(
        model, optimizer, schedule, member=member, last=spec.train.steps,
        paced=spec.train.pace == "measured" and spec.job.trust != AUDIT,
        whole_periods=spec.job.trust == AUDIT,  # checkers know how many steps a member has to do
    )  # fmt: skip
    shards, held_out = dealt(spec, dataset, model, slots=num_slots)
    # Weights are the same on every member; dropout must differ, so reseed per slot after building.
    torch.manual_seed(seed * 1_000 + slot + 1)
    return Built(
        model, dataset, shards, held_out, about_model(spec, dataset, model), task, schedule, outer,
        codec, strategy=resolved.outer, aggregation=resolved.aggregation,
    )  # fmt: skip


def check_data(spec: JobSpec) -> None:
    """Refuse a model that cannot be trained on the job's data.

    Raises:
        ConfigError: the model is unknown, or a text model is paired with images or the reverse.
    """
    name, corpus = spec.model.name, spec.data.corpus
    if (
        is_custom(name) or spec.tune.active
    ):  # it is called with the data, which shows whether it takes them
        return
    kind = IMAGES if is_images(corpus) else TEXT
    if model_row(name).data == kind:
        return
    fitting = [known for known, row in MODELS.items() if row.data == kind]
    raise ConfigError(
        "this model cannot be trained on these data",
        given=f"model {name!r} takes {model_row(name).data}, corpus {corpus!r} is {kind}",
        expected=f"for {kind} one of the models {', '.join(fitting)}",
        remedy="change name in [model] or corpus in [data]",
    )


def load_data(spec: JobSpec) -> TrainingData:
    """Return the data that a job trains and evaluates on.

    Raises:
        ConfigError: the data is unknown, or does not fit the job's model.
        DataError: it is missing or too small.
    """
    check_data(spec)
    data = spec.data
    if spec.tune.active:
        return load_examples(example_options(spec), model_tokenizer(spec))
    if is_images(data.corpus):
        return load_images(data.corpus)
    return load_dataset(
        data.corpus, tokenizer=tokenizer_of(spec), held_out=data.held_out, seed=spec.job.seed
    )


def tokenizer_of(spec: JobSpec) -> str | Tokenizer:
    """Return the tokenizer of a job's text: its name, or that of a pretrained model.

    Raises:
        ConfigError: the model has no tokenizer.
        DataError: the tokenizer is not on this machine.
    """
    wanted = spec.data.tokenizer
    return _of_the_model(spec) if wanted == OF_THE_MODEL else wanted


def _of_the_model(spec: JobSpec) -> PretrainedTokenizer:
    """Return the tokenizer of the job's pretrained model.

    Raises:
        ConfigError: the model has no tokenizer.
        DataError: the tokenizer is not on this machine.
    """
    if spec.model.name != "transformers":
        raise ConfigError(
            'tokenizer = "model" is that of a pretrained model',
            given=f"model {spec.model.name!r}",
            expected='name = "transformers" and source in [model], or another tokenizer in [data]',
        )
    return PretrainedTokenizer(model_tokenizer(spec).backend_tokenizer)


def model_tokenizer(spec: JobSpec) -> Any:
    """Return the library's tokenizer of the job's pretrained model.

    Raises:
        ConfigError: the model has no tokenizer, or a slow one.
        DataError: the tokenizer is not on this machine.
    """
    found = load_tokenizer(CausalLMConfig(**spec.model.options))
    if getattr(found, "backend_tokenizer", None) is None:
        raise ConfigError(
            "the tokenizer of this model is none of the tokenizers library",
            given=type(found).__name__,
            expected="a tokenizer.json beside the model",
        )
    return found


def example_options(spec: JobSpec) -> ExampleOptions:
    """Return which examples a job is fine-tuned on."""
    tune, names = spec.tune, {field.name for field in dataclasses.fields(ExampleOptions)}
    same = {f.name: getattr(tune, f.name) for f in dataclasses.fields(tune) if f.name in names}
    context = int(spec.model.options.get("context", CausalLMConfig().context))
    return ExampleOptions(context=context, seed=spec.job.seed, held_out=spec.data.held_out, **same)


def _adapter(spec: JobSpec) -> dict[str, Any]:
    """Return the option `adapter` of the model of a job that fine-tunes."""
    if not spec.tune.active:
        return {}
    names = [field.name for field in dataclasses.fields(Adapter)]
    return {"adapter": {name: getattr(spec.tune, name) for name in names}}


def whole_model(
    spec: JobSpec, dataset: TrainingData | None = None, *, complete: bool = True
) -> Any:
    """Return a job's model with its initial weights, the same in every process; seeds torch.

    Without `dataset`, it reads only what the model's size depends on. Unless `complete`, a model
    with weights in files has random ones, and :func:`complete_table` is left to the caller.

    Raises:
        ConfigError: the model is unknown, or one of its options is wrong.
        DataError: a pretrained model, or data that the model's size depends on, is missing.
    """
    leave_out_compiler()
    from_data = dataset.model_options if dataset else _options_from_data(spec)
    torch.manual_seed(spec.job.seed)
    name = spec.model.name
    if not complete and name == "transformers" and spec.model.options.get("source"):
        return build_causal_lm(CausalLMConfig(**_options(spec, from_data)), weights=False)
    if not is_custom(name):
        model = build_model(name, **_options(spec, from_data))
        if complete:
            complete_table(spec, model)
        return model
    model = build_custom(name, spec.model.options, from_data=from_data)
    if not is_images(spec.data.corpus):
        check_context(model, name=name)
    return model


def complete_table(spec: JobSpec, model: Any) -> None:
    """Enlarge the embedding of a new model whose activations are kept in a subspace, in place."""
    size = 0 if is_custom(spec.model.name) else confined_to(spec)
    if size:
        enlarge_table(model, size)


def _options_from_data(spec: JobSpec) -> Mapping[str, object]:
    """Return the model options that follow from the data, without reading a text where possible."""
    if spec.data.tokenizer == OF_THE_MODEL:
        return {"vocab_size": _of_the_model(spec).vocab_size}
    if spec.data.tokenizer == ByteTokenizer.name and not is_images(spec.data.corpus):
        return {"vocab_size": ByteTokenizer.vocab_size}
    return load_data(spec).model_options


def _options(spec: JobSpec, from_data: Mapping[str, object]) -> dict[str, Any]:
    """Return the model's options, completed from the data."""
    if is_custom(spec.model.name):
        return dict(spec.model.options)
    known = model_row(spec.model.name).options
    fitting = {name: value for name, value in from_data.items() if name in known}
    return {**fitting, **spec.model.options, **_adapter(spec)}


def dealt(
    spec: JobSpec, dataset: TrainingData, model: Any, *, slots: int
) -> tuple[Deal, HeldOutBatches]:
    """Return the samples of every slot and the held-out samples, in the form the model takes."""
    seed, order = spec.job.seed, spec.data.order
    if isinstance(dataset, ImageDataset):
        return ImageShards(dataset.train, slots=slots, seed=seed, order=order), dataset.batches
    context = model.config.context
    if isinstance(dataset, ExampleSet):
        rows = max(1, MOST_LOGITS // (context * dataset.tokenizer.vocab_size))
        deal = ExampleShards(dataset.train, slots=slots, seed=seed, order=order)
        return deal, partial(_few_rows, dataset, rows=rows)
    shards = Shards(dataset.train, slots=slots, context=context, seed=seed, order=order)
    rows = max(1, MOST_LOGITS // (context * dataset.tokenizer.vocab_size))
    return shards, partial(_held_out, dataset.held_out, context=context, rows=rows)


def _held_out(
    held_out: HeldOut, *, context: int, rows: int, batch: int, limit_tokens: int | None = None,
    first: int = 0,
) -> Iterator[tuple[Tensor, Tensor]]:  # fmt: skip
    """Yield held-out sequences, at most `rows` at a time."""
    return held_out.batches(
        context=context, batch=min(batch, rows), limit_tokens=limit_tokens, first=first
    )


def _few_rows(
    dataset: ExampleSet, *, rows: int, batch: int, limit_tokens: int | None = None, first: int = 0
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield held-out rows of examples, at most `rows` at a time."""
    return dataset.batches(batch=min(batch, rows), limit_tokens=limit_tokens, first=first)


def about_model(spec: JobSpec, dataset: TrainingData, model: Any) -> dict[str, str]:
    """Return the metadata of a weights file: enough to rebuild the model and read its inputs."""
    options = _options(spec, dataset.model_options)
    if isinstance(model, CausalLM):
        options = model.portable_options()
    about = describe(spec.model.name, options=options, tokenizer=dataset.to_json())
    if spec.tune.active:
        about["template"] = spec.tune.template
    return about
