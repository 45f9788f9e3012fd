"""Tests the choice of a device on a machine without an accelerator."""

from __future__ import annotations

import pytest
import torch

from atoll.devices.choose import accelerator, choose, count, no_accelerator, why_idle
from atoll.errors import ConfigError

pytestmark = pytest.mark.skipif(bool(accelerator()), reason="this machine has an accelerator")


def test_without_an_accelerator_the_processor_computes() -> None:
    assert choose("auto") == choose("cpu") == choose("auto", local_rank=1, local_ranks=2)
    assert choose("auto") == torch.device("cpu")
    assert count() == 0


@pytest.mark.parametrize("wanted", ["cuda", "cuda:1", "xpu", "mps"])
def test_a_missing_accelerator_is_named(wanted: str) -> None:
    with pytest.raises(ConfigError, match="no such accelerator") as caught:
        choose(wanted)
    assert wanted in str(caught.value)
    assert torch.__version__ in str(caught.value)


def test_a_word_that_is_no_device_is_refused() -> None:
    with pytest.raises(ConfigError, match="not a device"):
        choose("gpu")


def test_the_reason_for_the_processor_is_said() -> None:
    assert torch.__version__ in no_accelerator()
    assert why_idle("auto") == no_accelerator()
    assert 'device = "cpu" in the job' in why_idle("cpu")
