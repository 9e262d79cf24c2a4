"""Which files a request enters on its way through a server, and which ones a weight enters on a rank.

python scripts/files_entered.py [MODEL]

Starts ``segue serve`` on this machine's CPU with a profiler in each of its processes, sends it one
``/generate`` and one weight update over gloo, and prints the files under ``src/segue`` in the order of their
first calls. Files that an idle server enters too, for heartbeats and deadlines, come last, in no order.
"""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import httpx
import torch

from segue.checkpoint.source import resolve
from segue.config import default_cache_dir
from segue.distributed.info import TPInfo
from segue.models import weight_map
from segue.trainer import WeightSender

PORT = 31_977
URL = f"http://127.0.0.1:{PORT}"
PROFILER = """
import os, sys, threading, time

room = os.environ.get("FILES_ENTERED")
part, entered, names = None, {}, {}


def called(frame, event, _):
    code = frame.f_code
    name = names.get(code)
    if name is None:
        _, inside, rest = code.co_filename.rpartition("/src/segue/")
        name = names[code] = rest if inside else ""
    if name and event == "call" and part is not None:
        entered.setdefault(part, {}).setdefault(name, threading.current_thread().name)


def watch():
    global part
    while True:
        asked = open(f"{room}/part").read().strip() if os.path.exists(f"{room}/part") else None
        if asked != part:
            before, part = part, asked
            if before in entered:
                with open(f"{room}/{before}.{os.getpid()}", "w") as file:
                    file.writelines(f"{thread}\\t{name}\\n" for name, thread in list(entered[before].items()))
        time.sleep(0.02)


if room:
    threading.Thread(target=watch, daemon=True).start()
    threading.setprofile(called)
    sys.setprofile(called)
"""


def main(model: str | None) -> None:
    """Trace a server and print what it entered."""
    with tempfile.TemporaryDirectory() as directory:
        room = Path(directory)
        (room / "sitecustomize.py").write_text(PROFILER)
        path = os.pathsep.join([directory, os.environ.get("PYTHONPATH", "")])
        command = [sys.executable, "-m", "segue", "serve", "--port", str(PORT), "--device", "cpu"]
        command += ["--log-level", "warning", *(["--model", model] if model else [])]
        server = subprocess.Popen(command, env=os.environ | {"PYTHONPATH": path, "FILES_ENTERED": directory})
        try:
            trace(room, model)
        finally:
            server.terminate()
            server.wait()
        idle = read(room, "idle", server.pid)
        for part in ("request", "weight"):
            for process, files in read(room, part, server.pid).items():
                own = [name for name in files if name not in idle[process]]
                print(f"\n{part}: {len(own)} files of the {process} process")
                print("\n".join(f"{index:3}. {name}  ({files[name]})" for index, name in enumerate(own, 1)))
                print("also when idle:", ", ".join(name for name in files if name in idle[process]) or "none")


def trace(room: Path, model: str | None) -> None:
    """Have the server work, one part after the other."""
    while not is_ready():
        time.sleep(0.1)
    body = {"input_ids": [5, 6, 7], "sampling_params": {"max_new_tokens": 4}}
    if model is None:
        body = {"text": "The capital of France is", "sampling_params": {"max_new_tokens": 4}}
    httpx.post(f"{URL}/generate", json=body, timeout=60)  # what is loaded late is loaded now
    config = resolve(model, "auto", default_cache_dir()).config
    table = weight_map.build(config, TPInfo(rank=0, size=1))
    tensors = {name: torch.zeros(table.shapes[name], dtype=torch.bfloat16) for name in table.names}
    with WeightSender([URL], tensors) as sender:
        sender.send()  # joins the group
        for part, work in (
            ("idle", lambda: time.sleep(4)),
            ("request", lambda: httpx.post(f"{URL}/generate", json=body, timeout=60)),
            ("weight", sender.send),
            ("end", lambda: None),
        ):
            (room / "part").write_text(part)
            time.sleep(0.2)
            work()
            time.sleep(0.5)


def is_ready() -> bool:
    """Whether the server serves."""
    try:
        return httpx.get(f"{URL}/health").status_code == 200
    except httpx.TransportError:
        return False


def read(room: Path, part: str, frontend: int) -> dict[str, dict[str, str]]:
    """By process: each file, and the thread that entered it first."""
    found = {}
    for file in room.glob(f"{part}.*"):
        lines = [line.split("\t") for line in file.read_text().splitlines()]
        process = "frontend" if file.suffix == f".{frontend}" else "worker"
        found[process] = {name: thread for thread, name in lines}
    return dict(sorted(found.items()))


if __name__ == "__main__":
    main(*sys.argv[1:] or [None])
