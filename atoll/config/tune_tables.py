"""`[tune]`: fine-tuning of a pretrained model on examples, by adapters or as a whole."""

from __future__ import annotations

import dataclasses
import re
from typing import TYPE_CHECKING, Annotated

from atoll.config.constraints import Positive, PositiveFloat, Share, one_of
from atoll.errors import ConfigError

if TYPE_CHECKING:
    from atoll.config.tables import JobSpec

LORA, DORA, QLORA, FULL = "lora", "dora", "qlora", "full"
METHODS = (LORA, DORA, QLORA, FULL)
DPO, KTO = "dpo", "kto"
PREFERENCES = (DPO, KTO)
"""Objectives whose reference is the base without adapters."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TuneTable:
    """`[tune]`: how a model of `transformers` is fine-tuned, and on which examples."""

    method: Annotated[str, one_of("", *METHODS)] = ""
    """`lora`, `dora`, `qlora` (the base in 4 bits, with bitsandbytes) or `full`; empty: `lora` if
    there is `data`."""
    data: list[str] = dataclasses.field(default_factory=list)
    """Files of examples, as names or globs: .jsonl, .json, .csv, .txt, .md (each also .gz),
    .parquet, and .tar of WebDataset's form; and data sets of a model hub: `hub:OWNER/NAME`, perhaps
    with @REVISION and /FILES."""
    weights: list[PositiveFloat] = dataclasses.field(default_factory=list)
    """How often the examples of each entry of `data` come in one pass; empty: once each."""
    send: bool = True
    """Send the files that are here to the members; `false`: every machine has them."""
    objective: Annotated[str, one_of("answers", *PREFERENCES)] = "answers"
    """`answers`: predict them; `dpo`: prefer the chosen one of two answers to the rejected one;
    `kto`: prefer answers with a good label to those with a bad one."""
    beta: PositiveFloat = 0.1
    """`dpo`, `kto`: how much moving away from the base costs."""
    desirable: PositiveFloat = 1.0
    """`kto`: weight of good answers."""
    undesirable: PositiveFloat = 1.0
    """`kto`: weight of bad ones."""
    rank: Positive = 16
    """Rank of the adapters."""
    alpha: PositiveFloat = 32.0
    """The adapters' output is scaled by `alpha / rank`."""
    dropout: Share = 0.0
    """Dropout before the adapters."""
    targets: list[str] = dataclasses.field(default_factory=list)
    """Names of the linear layers that get adapters; empty: all but the output layer."""
    completion_only: bool = True
    """Train on the answers only, not on the prompts."""
    pack: bool = True
    """Put several short examples into one row; each sees only itself."""
    template: str = ""
    """Chat template, as Jinja text, or `chatml`; empty: the one published with the model."""
    keep: list[str] = dataclasses.field(default_factory=list)
    """Conditions that records must all meet, e.g. `score >= 4`, `language = en`."""
    deduplicate: bool = True
    """Leave out examples that are equal to an earlier one."""
    near_duplicates: Share = 0.0
    """Also leave out those whose sets of words are this similar (Jaccard), e.g. 0.9; 0: none."""
    min_answer_tokens: Positive = 1
    """Leave out examples with fewer trained tokens."""

    @property
    def active(self) -> bool:
        """Whether the job fine-tunes on examples."""
        return bool(self.method or self.data)

    @property
    def preferences(self) -> bool:
        """Whether the model learns what people prefer, against the base without adapters."""
        return self.objective in PREFERENCES

    @property
    def adapters(self) -> bool:
        """Whether only adapters are trained."""
        return self.active and self.method != FULL


LOSS_UNITS = {"answers": "nats per token", DPO: "nats per pair", KTO: "per answer"}
"""What a loss of each objective is measured in; that of `kto` is a share of what could be gained.
"""

SENT = re.compile(r"sha256:([0-9a-f]{64}):((?!\.)[^/\\]+)")
"""An entry of `data` that was sent with the job: the hash of a file, and its name."""


def sent_hashes(spec: JobSpec) -> list[str]:
    """Return the SHA-256 of the files that were sent with a job, besides its code."""
    assignment = re.fullmatch(r"sha256:([0-9a-f]{64})", spec.dipaco.assignment)
    found = [assignment, *map(SENT.fullmatch, spec.tune.data)]
    return [one[1] for one in found if one]


def with_tune(spec: JobSpec) -> JobSpec:
    """Return a job with what fine-tuning implies: the model's library, its tokenizer, a method."""
    tune = spec.tune
    if not tune.active:
        return spec
    return dataclasses.replace(
        spec,
        tune=dataclasses.replace(tune, method=tune.method or LORA),
        data=dataclasses.replace(spec.data, tokenizer="model", corpus=EXAMPLES),
        model=dataclasses.replace(spec.model, name="transformers"),
        strategy=dataclasses.replace(spec.strategy, inner=spec.strategy.inner or "local"),
    )


EXAMPLES = "examples"
"""`corpus` of a job that is trained on the examples of `[tune]`."""


def check_tune(spec: JobSpec) -> None:
    """Check `[tune]` against the rest of a job; raises ConfigError."""
    tune = spec.tune
    if not tune.active:
        if spec.data.corpus == EXAMPLES:
            raise ConfigError(
                "the examples are not named", given=f"corpus = {EXAMPLES!r} without [tune]",
                expected='data = ["FILE.jsonl"] in [tune]',
            )  # fmt: skip
        return
    if not tune.data:
        raise ConfigError(
            "there is nothing to fine-tune on", given=f"method = {tune.method!r} without data",
            expected='data = ["FILE.jsonl"] in [tune]',
        )  # fmt: skip
    if tune.weights and len(tune.weights) != len(tune.data):
        raise ConfigError(
            "every entry of data in [tune] needs a weight",
            given=f"{len(tune.data)} entries, {len(tune.weights)} weights",
            expected="as many weights as entries, or none",
        )
    if spec.job.script or spec.job.command or spec.rl.active:
        raise ConfigError(
            "[tune] is for the built-in trainer", given=f"a job of kind {spec.kind!r}",
            expected="no script, command or [rl]",
            remedy="in a script, give run.wrap a model with adapters of peft",
        )  # fmt: skip
    if tune.preferences and tune.method == FULL:
        raise ConfigError(
            "preferences are learned by adapters",
            given=f"method = {FULL!r}, objective = {tune.objective!r}",
            expected='method = "lora", "dora" or "qlora": the base without them is the reference',
        )  # fmt: skip
    if spec.strategy.inner != "local":
        raise ConfigError(
            "fine-tuning computes each step in one process",
            given=f"inner = {spec.strategy.inner!r} in [strategy]",
            expected='inner = "local"',
            remedy='for a whole model over several processes: [data] corpus = "files:GLOB" '
            'with inner = "fsdp", without [tune]',
        )
