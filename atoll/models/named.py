"""Models named as at a model hub: whether they are here, or can be downloaded."""

from __future__ import annotations

from atoll.model_hub import check_reachable


def check_named(name: str, *, file: str = "config.json") -> None:
    """Refuse a model that is neither on this machine nor at a hub that can be reached.

    Args:
        name: As at the hub, e.g. `HuggingFaceTB/SmolLM2-135M`.
        file: A file of it; if this one is in the local cache, the model is taken to be here.

    Raises:
        DataError: says how to bring the files here.
    """
    from huggingface_hub import try_to_load_from_cache

    if not isinstance(try_to_load_from_cache(name, file), str):
        check_reachable("model", name, command=f"hf download {name} --local-dir FOLDER")
