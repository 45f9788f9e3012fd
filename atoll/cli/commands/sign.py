"""`atoll sign`: create signing keys, sign container images and code."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(
    help="Sign container images and code for nodes that run signed ones only.",
    no_args_is_help=True,
)


@app.command()
def key(
    name: Annotated[str, typer.Argument(help="Name of the key; makes the file NAME.key here.")],
) -> None:
    """Make a key: a private file to sign with, and a line for the policies of owners."""
    from atoll.cli.views import screen
    from atoll.node.identity import image_signatures

    path = Path(name if name.endswith(".key") else f"{name}.key")
    public = image_signatures.make_key(path)
    out = screen.output()
    out.print(f"{path}: the private key. Keep it secret: a person who has it can sign as you.")
    out.print("Owners who trust this key add to their node.toml:\n")
    out.print(f'kinds = ["signed"]\ntrusted_keys = ["{public}"]', markup=False, soft_wrap=True)


@app.command()
def image(
    name: Annotated[str, typer.Argument(help="The pinned image, NAME@sha256:DIGEST.")],
    key: Annotated[Path, typer.Option(help="File of the private key.")],
) -> None:
    """Sign an image: prints the lines that a job file needs."""
    from atoll.cli.views import screen
    from atoll.node.identity import image_signatures

    signature = image_signatures.sign_image(name, key=image_signatures.load_key(key))
    screen.output().print(
        f'[launch]\nlauncher = "container"\nimage = "{name}"\nsignature = "{signature}"',
        markup=False,
        highlight=False,
        soft_wrap=True,
    )


@app.command()
def code(
    folder: Annotated[Path, typer.Argument(help="The folder that [job] code names.")],
    key: Annotated[Path, typer.Option(help="File of the private key.")],
) -> None:
    """Sign the code of a job as it is now: prints the lines that the job file needs."""
    from atoll.cli.views import screen
    from atoll.code.packing import pack
    from atoll.node.identity import image_signatures

    private = image_signatures.load_key(key)
    with pack(folder) as packed:
        signature = image_signatures.sign_image(
            image_signatures.pinned_code(packed.sha256), key=private
        )
    screen.output().print(
        f'[launch]\nsignature = "{signature}"', markup=False, highlight=False, soft_wrap=True
    )
