"""`atoll chat`: talk with a trained model."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from atoll.export.chat import Chat


def chat(
    where: Annotated[Path, typer.Argument(help="runs/JOB, or a .safetensors file.")],
    message: Annotated[
        str, typer.Option("--message", "-m", help="Answer this and end; -: read it from stdin.")
    ] = "",
    system: Annotated[str, typer.Option(help="Instructions before the conversation.")] = "",
    tokens: Annotated[
        int, typer.Option("--tokens", "-n", min=1, help="Longest answer, in tokens.")
    ] = 400,
    temperature: Annotated[
        float, typer.Option(min=0.0, help="Sampling temperature; 0: always the most likely token.")
    ] = 0.7,
    seed: Annotated[int | None, typer.Option(help="The same seed gives the same answers.")] = None,
    device: Annotated[
        str, typer.Option(help="Computes: auto (an accelerator if there is one), cpu, cuda:1 ...")
    ] = "auto",
) -> None:
    """Talk with a trained model, with the chat template it was trained with.

    At a terminal: /new begins a new conversation, /quit or Ctrl+D ends. Otherwise standard input is
    one message.
    """
    import secrets

    from atoll.cli.trained.run_files import find_run
    from atoll.devices.choose import choose
    from atoll.export.chat import Manner, open_chat

    manner = Manner(
        tokens=tokens, temperature=temperature, system=system,
        seed=seed if seed is not None else secrets.randbelow(2**31),
    )  # fmt: skip
    talk = open_chat(find_run(where).open(), manner=manner, device=choose(device))
    if message not in ("", "-"):
        _answer(talk, message)
    elif message == "-" or not sys.stdin.isatty():
        _answer(talk, sys.stdin.read().strip())
    else:
        _converse(talk)


def _converse(talk: Chat) -> None:
    """Read messages until the person ends."""
    from atoll.cli.views import screen
    from atoll.errors import ConfigError

    while True:
        try:
            said = input("> ").strip()
        except (EOFError, KeyboardInterrupt):
            typer.echo()
            return
        if said in ("/quit", "/exit"):
            return
        if said == "/new":
            talk.forget()
        elif said:
            try:
                _answer(talk, said)
            except ConfigError as error:
                screen.show_error(error)
            except KeyboardInterrupt:
                typer.echo()  # it ends the answer, not the conversation


def _answer(talk: Chat, said: str) -> None:
    from atoll.cli.views.screen import harmless
    from atoll.errors import ConfigError

    if not said:
        raise ConfigError(
            "there is no message", given="nothing on standard input", expected="some text"
        )
    talk.answer(said, write=lambda text: typer.echo(harmless(text), nl=False))
    typer.echo()
