"""`atoll export`: a trained model for other programs; `atoll push`: to a model hub."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

RUN = typer.Argument(help="runs/JOB, or a .safetensors file.")
ADAPTER = typer.Option("--adapter", help="Only the adapters, for peft; not merged.")
DTYPE = typer.Option(help="Numbers: fp32, bf16, fp16; of a GGUF file also q8_0.")


def export(
    where: Annotated[Path, RUN],
    to: Annotated[
        Path, typer.Argument(help="A new folder, or a file that ends in .gguf or .onnx.")
    ],
    adapter: Annotated[bool, ADAPTER] = False,
    dtype: Annotated[str, DTYPE] = "fp32",
) -> None:
    """Write a trained model in the format of another program.

    A folder is what `from_pretrained` of transformers reads (--adapter: of peft), a .gguf file what
    llama.cpp reads, a .onnx file what ONNX Runtime reads. Adapters are merged into their base.
    """
    from atoll.cli.trained.run_files import find_run
    from atoll.cli.views import screen
    from atoll.export.folder import DTYPES, write_folder
    from atoll.export.gguf import TYPES, write_gguf
    from atoll.export.onnx import write_onnx

    kind = to.suffix.lower()
    _check(kind, adapter=adapter, dtype=dtype, known=TYPES if kind == ".gguf" else DTYPES)
    run = find_run(where)
    opened = run.open()
    if kind == ".gguf":
        write_gguf(opened, to, dtype=dtype, name=run.name)
    elif kind == ".onnx":
        write_onnx(opened, to)
    else:
        write_folder(
            opened, to, adapter=adapter, dtype=dtype, card=run.card(opened, adapter=adapter)
        )
        if opened.tokenizer is None:
            screen.errors().print(
                "[yellow]without a tokenizer: the run's vocabulary is Atoll's own[/]",
                soft_wrap=True,
            )
    screen.output().print(f"wrote {screen.shown(to)}", soft_wrap=True, markup=False)


def _check(kind: str, *, adapter: bool, dtype: str, known: Mapping[str, object]) -> None:
    """Check the options against each other; raises ConfigError."""
    from atoll.errors import ConfigError, unknown

    if dtype not in known:
        raise unknown("kind of numbers", dtype, known)
    if adapter and kind in (".gguf", ".onnx"):
        raise ConfigError(
            "adapters alone can be exported as a folder only", given=f"--adapter and {kind}",
            expected="a folder, or the merged model",
        )  # fmt: skip
    if kind == ".onnx" and dtype != "fp32":
        raise ConfigError(
            "an ONNX file is written in fp32", given=f"--dtype {dtype}", expected="fp32",
            remedy="convert the file with the tools of ONNX Runtime",
        )  # fmt: skip


def push(
    where: Annotated[Path, RUN],
    name: Annotated[str, typer.Argument(help="OWNER/NAME at the model hub.")],
    adapter: Annotated[bool, ADAPTER] = False,
    dtype: Annotated[str, DTYPE] = "fp32",
    private: Annotated[bool, typer.Option("--private", help="Make a new entry private.")] = False,
    message: Annotated[str, typer.Option("--message", "-m", help="Of the commit.")] = "",
) -> None:
    """Push a trained model to the Hugging Face hub, as `atoll export` writes it.

    You must be logged in there: HF_TOKEN, or `hf auth login`. HF_ENDPOINT names another hub.
    """
    from atoll.cli.trained.run_files import find_run
    from atoll.cli.views import screen
    from atoll.export.folder import DTYPES, write_folder
    from atoll.export.push import check_name, push_folder

    _check("", adapter=adapter, dtype=dtype, known=DTYPES)
    check_name(name)
    run = find_run(where)
    opened = run.open()
    with tempfile.TemporaryDirectory(prefix="atoll-push-") as temporary:
        folder = Path(temporary) / "model"
        card = run.card(opened, adapter=adapter)
        write_folder(opened, folder, adapter=adapter, dtype=dtype, card=card)
        url = push_folder(folder, name, private=private, message=message or f"Add {run.name}")
    screen.output().print(f"pushed to {url}", soft_wrap=True, markup=False)
