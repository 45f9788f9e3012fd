"""Lines of `atoll logs`: a round's loss, and what libraries say of themselves is left out."""

from __future__ import annotations

from typing import Any

from atoll.cli.views.log_lines import Chatter, round_line

STAMP = "2026-11-21 11:04:14,286"
OWN = [
    "epoch 3: loss 2.1",
    f"{STAMP} INFO train read 10 files",
    f"{STAMP} INFO __main__ begins",
    f"{STAMP} WARNING atoll.train.loop the loss is not finite",
    f"{STAMP} ERROR httpx the server is gone",
    "Traceback (most recent call last):",
    '  File "train.py", line 3, in <module>',
    "train.py:7: UserWarning: mine",
    "  warnings.warn('mine')",
]
LIBRARY = [
    f"{STAMP} INFO atoll.train.computing computes on cpu (processor) in fp32",
    f"{STAMP} INFO httpx HTTP Request: GET https://h/x",
    f"{STAMP} DEBUG filelock lock acquired",
    "[rank0]:[W1125 21:51:31.2 socket.cpp:759] [c10d] the client socket has failed",
    "[W1125 21:51:31.286 NNPACK.cpp:57] Could not initialize NNPACK",
    "/v/lib/python3.12/site-packages/torch/cuda/__init__.py:1: UserWarning: CUDA is missing",
    "  return torch._C._cuda_getDeviceCount() > 0",
]


def lines(texts: list[str]) -> list[dict[str, Any]]:
    return [{"member": "w0", "text": text} for text in texts]


def test_messages_of_libraries_are_left_out_and_no_others() -> None:
    mixed = [*OWN[:5], *LIBRARY, *OWN[5:]]
    assert [line["text"] for line in Chatter().without(lines(mixed))] == OWN


def test_quoted_line_of_a_warning_is_that_of_its_member() -> None:
    chatter = Chatter()
    assert chatter.is_chatter({"member": "w0", "text": LIBRARY[5]})
    assert not chatter.is_chatter({"member": "w1", "text": "  indented by a script"})
    assert chatter.is_chatter({"member": "w0", "text": LIBRARY[6]})


def test_round_says_its_loss_and_that_of_each_member() -> None:
    row = {"compute_s": 12.0, "wait_s": 0.5, "send_s": 0.2, "vote_s": None, "steps": 25}
    nodes = {"w0": "lap1", "w1": "lap2", "w2": "lap2"}
    timeline = [{**row, "member": "w0", "loss": 1.9}, {**row, "member": "w1", "loss": 1.8}]
    decided: dict[str, Any] = {"round": 15, "committed": True, "timeline": timeline}
    assert round_line(decided, nodes) == (
        "round 16  loss 1.850 (lap1 1.900, lap2 (w1) 1.800)  25 steps  12.7 s"
    )
    one = round_line({**decided, "timeline": timeline[:1]}, nodes)
    assert one.startswith("round 16  loss 1.900  25")
    assert round_line({**decided, "timeline": []}, nodes) == "round 16"
    lost = {**decided, "committed": False, "reason": "w0 was lost"}
    assert round_line(lost, nodes) == "round 16 was not committed: lap1 was lost"
