"""Coverage-guided fuzzing of one decoder: `python -m bench.attack.fuzz SECONDS own FOLDER NAME`.

With `atheris` installed (extra `fuzz`) libFuzzer does it; without, a small loop with the same idea:
an input that reaches lines in an order not seen before is kept, and changed further. The last line
of stdout is JSON: executions, seconds, inputs kept, and crashes with the input that causes them.
"""

from __future__ import annotations

import base64
import importlib
import importlib.util
import json
import os
import random
import re
import resource
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import IO, Any

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = str(ROOT / "atoll")

LONGEST = 4_096
"""Bytes of an input."""

SLOW_S = 10.0
LARGE_MB = 1_024.0
"""One input that takes as long, or as much memory, is a crash, too."""

MOST_CRASHES = 5

START_S = 900.0
"""For the start of a process that fuzzes: a busy machine loads libraries for minutes. Who does not
start says nothing about its decoder, so this is no crash."""

BEGINS = "fuzzing: "
"""Before the name of a decoder in the standard error of a process that fuzzes."""

END_S = 120.0
"""For its end, beyond its time and one slow input."""


@dataclass
class Found:
    """What came of fuzzing one decoder."""

    decoder: str
    engine: str
    executions: int = 0
    seconds: float = 0.0
    kept: int = 0
    """Inputs that reach what others do not."""
    crashes: list[dict[str, str]] = field(default_factory=list)
    not_fuzzed: str = ""
    """Why nothing was tried; empty: it was."""

    @property
    def per_second(self) -> float:
        """Executions per second."""
        return self.executions / max(self.seconds, 1e-9)


# ----------------------------------------------------------------------------- all decoders


def fuzz_all(names: list[str], *, seconds: float, engine: str) -> Iterator[Found]:
    """Fuzz every decoder for its share of the time, by libFuzzer each in a process of its own."""
    share_s = seconds / len(names)
    for some in [[name] for name in names] if engine == "atheris" else [names]:
        yield from _in_process(some, share_s, engine)


def _in_process(names: list[str], seconds: float, engine: str) -> list[Found]:
    words = [sys.executable, "-m", "bench.attack.fuzz", str(seconds), engine]
    limit_s = len(names) * (seconds + 2 * SLOW_S) + END_S
    with tempfile.TemporaryDirectory() as folder:
        done = run([*words, folder, *names], limit_s=limit_s)
        begun = re.findall(f"^{BEGINS}(.*)$", done.stderr, re.MULTILINE)
        if not begun and done.status is None:
            why = f"its process did not start within {START_S:.0f} s"
            return [Found(name, engine, not_fuzzed=why) for name in names]
        error = "it did not end" if done.status is None else done.stderr[-400:]
        if engine != "atheris":
            lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
            results = [Found(**json.loads(line)) for line in lines]
            missing = names[len(results) :]
            return results + [
                _failed(name, engine, error) if number == 0
                else Found(name, engine, not_fuzzed=f"{missing[0]} ended the process")
                for number, name in enumerate(missing)
            ]  # fmt: skip
        if done.status is None:
            return [_failed(names[0], engine, error)]
        found = Found(names[0], engine, *_read_libfuzzer(done.stderr))
        for path in Path(folder).glob("*-*"):
            if path.name.partition("-")[0] in ("crash", "timeout", "oom"):
                found.crashes.append({
                    "error": _last_error(done.stderr) or path.name.partition("-")[0],
                    "input": base64.b64encode(path.read_bytes()).decode(),
                })  # fmt: skip
    if done.status and not found.crashes:
        return [_failed(names[0], engine, error)]
    return [found]


@dataclass(frozen=True)
class Ended:
    """How a process that fuzzes ended."""

    status: int | None
    """None: it was killed, because it took too long to start or to end."""
    stdout: str
    stderr: str


def run(words: list[str], *, limit_s: float, start_s: float = START_S) -> Ended:
    """Run a process for at most so long after it has begun to fuzz, which it says itself."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        process = subprocess.Popen(words, stdout=out, stderr=err, cwd=ROOT)
        deadline, begun = time.monotonic() + start_s, False
        status: int | None = None
        try:
            while (status := process.poll()) is None and time.monotonic() < deadline:
                time.sleep(0.05)
                if not begun and BEGINS in _text(err):
                    begun, deadline = True, time.monotonic() + limit_s
        finally:
            if status is None:
                process.kill()
                process.wait()
        return Ended(status, _text(out), _text(err))


def _text(file: IO[bytes]) -> str:
    return os.pread(file.fileno(), os.fstat(file.fileno()).st_size, 0).decode(errors="replace")


def begins(name: str) -> None:
    """Say that everything is loaded, and this decoder is fuzzed now."""
    sys.stderr.write(f"{BEGINS}{name}\n")
    sys.stderr.flush()


def _failed(name: str, engine: str, error: str) -> Found:
    return Found(name, engine, crashes=[{"error": error, "input": ""}])


def _read_libfuzzer(text: str) -> tuple[int, float, int]:
    """Return executions, seconds and inputs kept, as libFuzzer wrote them."""
    done = re.search(r"Done (\d+) runs in (\d+) second", text)
    executions = [int(number) for number in re.findall(r"^#(\d+)\s", text, re.MULTILINE)]
    corpus = [int(number) for number in re.findall(r"corp: (\d+)/", text)]
    if done is not None:
        return int(done[1]), float(done[2]), max(corpus, default=0)
    return max(executions, default=0), 0.0, max(corpus, default=0)


def _last_error(text: str) -> str:
    found = re.findall(r"^ === Uncaught Python exception: ===\n(.*)$", text, re.MULTILINE)
    return str(found[-1]) if found else ""


def has_atheris() -> bool:
    """Return whether libFuzzer is there."""
    return importlib.util.find_spec("atheris") is not None


# ------------------------------------------------------------------------------ one decoder


def with_atheris(name: str, *, seconds: float, folder: str) -> None:
    """Let libFuzzer do it; it ends the process."""
    atheris: Any = importlib.import_module("atheris")
    with atheris.instrument_imports(include=["atoll"]):
        from bench.attack.decoders import targets
    target = targets()[name]
    corpus = Path(folder) / "corpus"
    corpus.mkdir()
    for number, seed in enumerate(target.seeds):
        (corpus / str(number)).write_bytes(seed)
    options = [
        f"-max_total_time={max(1, round(seconds))}", f"-max_len={LONGEST}",
        f"-timeout={SLOW_S:.0f}", f"-rss_limit_mb={4 * LARGE_MB:.0f}",
        f"-artifact_prefix={folder}/",
    ]  # fmt: skip
    begins(name)
    atheris.Setup([sys.argv[0], *options, str(corpus)], target)
    atheris.Fuzz()


class Coverage:
    """The pairs of lines of Atoll that one call ran one after the other."""

    def __init__(self) -> None:
        """Nothing is seen yet."""
        self.pairs: set[tuple[CodeType, int, int]] = set()
        self._ours: dict[CodeType, bool] = {}

    def _call(self, frame: FrameType, event: str, argument: Any) -> Any:
        code = frame.f_code
        ours = self._ours.get(code)
        if ours is None:
            ours = self._ours[code] = code.co_filename.startswith(PACKAGE)
        if not ours:
            return None
        last = frame.f_lineno

        def line(frame: FrameType, event: str, argument: Any) -> Any:
            nonlocal last
            self.pairs.add((code, last, frame.f_lineno))
            last = frame.f_lineno
            return line

        return line

    def __enter__(self) -> Coverage:
        """Begin."""
        self.pairs = set()
        sys.settrace(self._call)
        return self

    def __exit__(self, *exception: object) -> None:
        """End."""
        sys.settrace(None)


def with_own_loop(name: str, *, seconds: float, seed: int = 1) -> Found:
    """Fuzz for so long and return what was found."""
    from bench.attack.decoders import targets

    target, rng, coverage = targets()[name], random.Random(seed), Coverage()
    begins(name)
    corpus, seen = [*target.seeds], set[tuple[CodeType, int, int]]()
    found = Found(name, "own")
    began, kinds = time.monotonic(), set[str]()
    waiting = list(corpus)
    while not found.executions or time.monotonic() - began < seconds:
        data = waiting.pop() if waiting else _changed(rng, corpus)
        before_mb, before_s = _peak_mb(), time.process_time()
        try:
            with coverage:
                target(data)
            error = ""
        except Exception as failure:
            where = traceback.extract_tb(failure.__traceback__)[-1]
            error = f"{type(failure).__name__} at {Path(where.filename).name}:{where.lineno}"
        found.executions += 1
        if (took_s := time.process_time() - before_s) > SLOW_S:
            error = f"it took {took_s:.0f} s of the processor"
        elif _peak_mb() - before_mb > LARGE_MB:
            error = f"it took {_peak_mb() - before_mb:.0f} MB"
        if error and error not in kinds and len(kinds) < MOST_CRASHES:
            kinds.add(error)
            found.crashes.append({"error": error, "input": base64.b64encode(data).decode()})
        if not coverage.pairs <= seen:
            seen |= coverage.pairs
            corpus.append(data)
    found.seconds, found.kept = time.monotonic() - began, len(corpus)
    return found


def _peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


INTERESTING = (0, 1, 0x7F, 0x80, 0xC1, 0xDC, 0xDD, 0xDE, 0xDF, 0xFF)
"""Bytes at the edges of integers, and the longest containers of msgpack."""


def _changed(rng: random.Random, corpus: list[bytes]) -> bytes:
    """Return a known input with a few changes."""
    data = bytearray(rng.choice(corpus))
    for _ in range(rng.choice((1, 1, 2, 4, 8))):
        place = rng.randrange(len(data) + 1)
        kind = rng.randrange(7)
        if kind == 0 and data:
            data[place % len(data)] ^= 1 << rng.randrange(8)
        elif kind == 1 and data:
            data[place % len(data)] = rng.choice(INTERESTING)
        elif kind == 2:
            data[place:place] = rng.randbytes(rng.choice((1, 2, 4, 8)))
        elif kind == 3:
            del data[place : place + rng.choice((1, 2, 4, 16))]
        elif kind == 4:
            other = rng.choice(corpus)
            begin = rng.randrange(len(other) + 1)
            data[place:place] = other[begin : begin + rng.randrange(1, 64)]
        elif kind == 5 and data:
            part = data[place : place + rng.randrange(1, 32)]
            data[place:place] = part * rng.choice((1, 2, 16, 64))
        else:
            size = rng.choice((1, 2, 4, 8))
            number = rng.choice((0, 1, -1, 2 ** (8 * size - 1), 2 ** (8 * size - 1) - 1))
            data[place : place + size] = (number % 2 ** (8 * size)).to_bytes(size, "big")
    return bytes(data[:LONGEST])


def main(arguments: list[str]) -> None:
    """Fuzz some decoders, each for so long."""
    seconds, engine, folder, *names = arguments
    os.environ["TMPDIR"] = folder
    if engine == "atheris":
        with_atheris(names[0], seconds=float(seconds), folder=folder)
    for name in names:
        found = with_own_loop(name, seconds=float(seconds))
        sys.stdout.write(json.dumps(asdict(found)) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
