"""Lists the files that a prompt enters on its way to attention, and a weight on its way to the arena.

python scripts/files_entered.py [MODEL]

Starts ``segue serve`` on this machine's CPU with a profiler in each of its processes, and sends it one
``/generate`` and one weight update over gloo. A file is on the prompt's way if one of its functions is given
the prompt (as text, as token ids, or in a struct that holds them), or waits for such a function to return.
A file is on the weight's way if the threads that receive and store weights enter it. What comes before the
route (the connection, checks of access) and how a process starts are not part of a way.
"""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import httpx
import torch
from tokenizers import Tokenizer

from segue.checkpoint.source import resolve
from segue.config import default_cache_dir
from segue.distributed.info import TPInfo
from segue.models import weight_map
from segue.trainer import WeightSender

PORT = 31_977
URL = f"http://127.0.0.1:{PORT}"
TEXT = "Zebras quietly juxtapose seven bright lamps"
BEFORE = ("__main__.py", "cli/", "worker/entry.py", "worker/main.py")
BEFORE += ("server/connection", "server/access.py", "http_guard.py")
PROFILER = r"""
import array, os, sys, threading, time

room = os.environ.get("FILES_ENTERED")
part, ids, text, reported, busy = None, [], "", set(), threading.local()


def holds(value, depth):
    if isinstance(value, str):
        return text in value
    if isinstance(value, (bytes, bytearray)):
        return text.encode() in value or array.array("i", ids).tobytes() in value
    if type(value).__name__ in ("Tensor", "ndarray", "array"):
        return getattr(value, "ndim", 1) == 1 and len(value) >= len(ids) and list(value[: len(ids)]) == ids
    if isinstance(value, (list, tuple)):
        if value and isinstance(value[0], int):
            return list(value[: len(ids)]) == ids
        return depth > 0 and len(value) < 50 and any(holds(each, depth - 1) for each in value)
    if isinstance(value, dict):
        return depth > 0 and len(value) < 50 and any(holds(each, depth - 1) for each in list(value.values()))
    if isinstance(value, type) or depth == 0:
        return False
    names = getattr(type(value), "__struct_fields__", None) or getattr(type(value), "__slots__", ())
    fields = [getattr(value, name, None) for name in names] + list(getattr(value, "__dict__", {}).values())
    return any(holds(field, depth - 1) for field in fields)


def module(frame):
    _, inside, name = frame.f_code.co_filename.rpartition("/src/segue/")
    return name if inside else ""


def called(frame, event, _):
    name = module(frame) if event == "call" and part not in (None, "end") else ""
    if not name or (part, frame.f_code) in reported or getattr(busy, "looks", False):
        return
    busy.looks = True
    code, stack = frame.f_code, [name]
    if part == "prompt":
        arguments = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        if not any(holds(frame.f_locals.get(each), 1 if each == "self" else 2) for each in arguments):
            busy.looks = False
            return
        while (frame := frame.f_back) is not None:
            stack.append(module(frame))
    reported.add((part, code))
    with open(f"{room}/{part}.{os.getpid()}", "a") as file:
        file.writelines(f"{threading.current_thread().name}\t{name}\n" for name in reversed(stack) if name)
    busy.looks = False


def watch():
    global part, ids, text
    while True:
        if os.path.exists(f"{room}/part"):
            part, text, *numbers = open(f"{room}/part").read().split("\n")
            ids = [int(number) for number in numbers]
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
        idle = {name for _, name in read(room, "idle", server.pid)}
        show("prompt", read(room, "prompt", server.pid))
        weight = [each for each in read(room, "weight", server.pid) if each[1] not in idle]
        show("weight", [each for each in weight if "weights" in each[0]])


def trace(room: Path, model: str | None) -> None:
    """Have the server work, one part after the other."""
    while not is_ready():
        time.sleep(0.1)
    found = resolve(model, "auto", default_cache_dir())
    ids = Tokenizer.from_file(str(found.directory / "tokenizer.json")).encode(TEXT).ids
    body = {"text": TEXT, "sampling_params": {"max_new_tokens": 1}}
    httpx.post(f"{URL}/generate", json=body | {"text": "What is loaded late is loaded now."}, timeout=60)
    table = weight_map.build(found.config, TPInfo(rank=0, size=1))
    tensors = {name: torch.zeros(table.shapes[name], dtype=torch.bfloat16) for name in table.names}
    with WeightSender([URL], tensors) as sender:
        sender.send()  # joins the group
        for part, work in (
            ("idle", lambda: time.sleep(4)),
            ("prompt", lambda: httpx.post(f"{URL}/generate", json=body, timeout=60)),
            ("weight", sender.send),
            ("end", lambda: None),
        ):
            unread = room / "part.new"  # renamed, so that no process reads half of it
            unread.write_text("\n".join([part, TEXT, *map(str, ids)]))
            unread.rename(room / "part")
            time.sleep(0.2)
            work()
            time.sleep(0.5)


def is_ready() -> bool:
    """Whether the server serves."""
    try:
        return httpx.get(f"{URL}/health").status_code == 200
    except httpx.TransportError:
        return False


def read(room: Path, part: str, frontend: int) -> list[tuple[str, str]]:
    """Return (thread, file) of each file's first call, the frontend process before the worker."""
    files = sorted(room.glob(f"{part}.*"), key=lambda file: file.suffix != f".{frontend}")
    lines = [line for file in files for line in file.read_text().splitlines()]
    entered: dict[str, str] = {}
    for line in lines:
        thread, name = line.split("\t")
        entered.setdefault(name, thread)
    return [(thread, name) for name, thread in entered.items() if not name.startswith(BEFORE)]


def show(what: str, entered: list[tuple[str, str]]) -> None:
    """Print one way."""
    print(f"\nA {what}'s way: {len(entered)} files")
    print("\n".join(f"{index:3}. {name}  ({thread})" for index, (thread, name) in enumerate(entered, 1)))


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else None)
