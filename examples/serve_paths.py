"""Serve the paths of a trained modular model (DiPaCo) side by side, on several machines.

Alone:                        python examples/serve_paths.py runs/JOB -p 'def main'
On this machine, two servers: atoll run examples/serve_paths.py --local 3 -- runs/JOB -p 'def main'
On the nodes of a hub:        atoll run examples/serve_paths.py -n 9 -- /data/JOB --prompts FILE

The first member has the run's files (`path-0000.safetensors`, ..., the router) and brings them to
the hub, then it puts the prompts into a queue and waits for the answers, `answers.json`. The
others are servers: each fetches and loads its part of the paths, and none has all. A prompt is
routed to the queue of one path. A server that is killed loses nothing: its requests are delivered
again. With --stay servers go on until the job is stopped: `atoll queue put JOB/prompts TEXT` asks
them, and the topic `JOB/answers` has what they say.
"""

from __future__ import annotations

import argparse
import json
import threading
import time
from pathlib import Path

import atoll
from atoll.ids import new_token
from atoll.routing.folder import open_paths
from atoll.routing.serving import Lanes, PathServer, ask, publish_model

LOOK_S = 1.0


def main() -> None:
    parser = argparse.ArgumentParser(description="Serve the paths of a modular model.")
    parser.add_argument("run", type=Path, help="folder of a run with [dipaco]")
    parser.add_argument("--shards", type=Path, help="file of `atoll paths shard`, for its router")
    parser.add_argument("-p", "--prompt", action="append", default=[])
    parser.add_argument("--prompts", type=Path, help="file with a prompt in each line")
    parser.add_argument("-n", "--tokens", type=int, default=100)
    parser.add_argument(
        "--lease-s", type=float, default=60.0, help="a killed server's prompts wait so long"
    )
    parser.add_argument("--stay", action="store_true", help="go on until the job is stopped")
    given = parser.parse_args()
    with atoll.join() as run:
        lanes, ending = Lanes(run), run.topic("over", max_items=8)
        over = threading.Event()

        def watch() -> None:
            news = ending.subscribe(new_token(), start="oldest")
            while not (over.is_set() or run.stopping):
                if news.read(1, wait_s=LOOK_S):
                    over.set()

        def serve(server: int, servers: int) -> None:
            threading.Thread(target=watch, daemon=True).start()
            folder = Path(f"served-{server}").resolve()
            one = PathServer(lanes, folder, server=server, servers=servers, lease_s=given.lease_s)
            print(f"{run.member}: serves paths {one.own} of {one.paths.num_paths}", flush=True)
            one.serve(over.is_set)

        if run.slot:
            serve(run.slot - 1, run.num_slots - 1)
            return
        publish_model(lanes, open_paths(given.run, shards=given.shards))
        beside = threading.Thread(target=serve, args=(0, 1))
        if run.num_slots == 1:
            beside.start()
        lines = given.prompts.read_text("utf-8").splitlines() if given.prompts else []
        asked = {
            f"prompt-{number}": {"prompt": prompt, "tokens": given.tokens}
            for number, prompt in enumerate([*given.prompt, *lines])
        }
        answers = ask(lanes, asked)
        for key, answer in answers.items():
            said = repr(answer["text"]) if "text" in answer else f"not answered: {answer['error']}"
            print(f"{key}, path {answer.get('path', '-')}: {said}", flush=True)
        file = Path("answers.json")
        file.write_text(json.dumps(answers, indent=1), encoding="utf-8", newline="\n")
        run.publish(file, f"artifacts/{run.member}/{file.name}")
        while given.stay and not run.stopping:
            time.sleep(LOOK_S)
        ending.publish(True)
        over.set()
        if run.num_slots == 1:
            beside.join()


if __name__ == "__main__":
    main()
