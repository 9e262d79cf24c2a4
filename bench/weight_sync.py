"""How fast a server gets new weights, how long that holds up generation, and what serving loses meanwhile.

    python -m bench.weight_sync MODEL [--device cuda] [--option=value …]
    python -m bench.weight_sync MODEL --device cuda --same-gpu --memory-ratio=0.5

A server and a trainer, which is this process: on CUDA the server has the first GPU and the trainer the last,
and weights go over NCCL; else gloo. Made-up weights of the model's shapes are sent whole, once to warm up and
then several times, flattened and one broadcast a tensor, with the server idle and under a load of streams.
Bars, for Qwen3-8B's shapes between two H200s, warm: flattened at least 150 GB/s, and 0.3 s from prepare to
complete; one broadcast a tensor at least 60 GB/s; a commit holds generation for at most 20 ms with staging on
the device (``--weight-staging-gb=18``), 400 ms with staging on the host. Serving loses at most 5 %. With
``--same-gpu`` the server reads this process's memory instead (CUDA IPC): at least 1 TB/s.
"""

from __future__ import annotations

import argparse
import base64
import json
import os
import statistics
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from bench import report
from segue.distributed.info import TPInfo
from segue.models.config import ModelConfig
from segue.trainer import WeightSender
from segue.weights import name_table
from segue.weights.sync.payload import encode

SENDS = 5
STREAMS = 64
TOKENS = 4000  # of a stream: more than it gets to make
STD = 0.02
LOAD_S = 3.0  # that the rate without an update is measured
START_S = 300.0


@contextmanager
def server(model: Path, device: str, options: list[str]) -> Iterator[str]:
    """Its URL."""
    command = [sys.executable, "-m", "segue", "serve", "--model", str(model), "--load-format", "dummy"]
    command += ["--port", "0", "--device", device, "--log-level", "warning", *options]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | ({"CUDA_VISIBLE_DEVICES": "0"} if device == "cuda" else {}),
    )
    watchdog = threading.Timer(START_S, process.kill)
    watchdog.start()
    try:
        assert process.stdout is not None
        url = next(word for line in process.stdout for word in line.split() if word.startswith("http://"))
        watchdog.cancel()
        yield url
    finally:
        watchdog.cancel()
        process.terminate()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def state(url: str) -> dict[str, Any]:
    with urllib.request.urlopen(f"{url}/server_info", timeout=30) as response:
        found: dict[str, Any] = json.load(response)["internal_states"][0]
        return found


def weights_of(model: Path, device: torch.device) -> dict[str, torch.Tensor]:
    """Made-up tensors with the checkpoint's names and shapes, bfloat16."""
    config = ModelConfig.from_hf(json.loads((model / "config.json").read_text()))
    table = name_table.build(config, TPInfo())
    noise = torch.Generator(device).manual_seed(0)
    return {
        name: STD * torch.randn(table.shapes[name], dtype=torch.bfloat16, device=device, generator=noise)
        for name in table.names
    }


class Load:
    """Streams that make tokens until the ``with`` block is left."""

    def __init__(self, url: str, count: int) -> None:
        self._url = url
        self._threads = [threading.Thread(target=self._stream, daemon=True) for _ in range(count)]
        self._stopped = threading.Event()

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        deadline = time.monotonic() + START_S
        while state(self._url)["running_batch_size"] < len(self._threads):
            assert time.monotonic() < deadline, "the streams do not run"
            time.sleep(0.05)
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        body = json.dumps({"abort_all": True}).encode()
        urllib.request.urlopen(f"{self._url}/abort_request", body, timeout=30).close()
        for thread in self._threads:
            thread.join()

    def _stream(self) -> None:
        while not self._stopped.is_set():
            params = {"temperature": 0, "max_new_tokens": TOKENS, "ignore_eos": True}
            body = {"input_ids": list(range(1, 65)), "sampling_params": params, "stream": True}
            with urllib.request.urlopen(f"{self._url}/generate", json.dumps(body).encode()) as response:
                for _ in response:
                    pass

    def tokens(self) -> int:
        """Made so far."""
        count: int = state(self._url)["num_generated_tokens"]
        return count


def sends(url: str, weights: dict[str, torch.Tensor], *, flattened: bool, buffer_mb: int) -> dict[str, Any]:
    """Medians of several, behind one that warms up."""
    with WeightSender([url], weights, flattened=flattened, buffer_size_mb=buffer_mb) as sender:
        sender.send()
        reports = [sender.send() for _ in range(SENDS)]
    fields = [each.endpoints[0].fields for each in reports]
    return {
        "GB": reports[0].bytes / 1e9,
        "GB/s": statistics.median(each["gb_per_s"] for each in fields),
        "wall_s": statistics.median(each.seconds for each in reports),
        "commit_ms": 1e3 * statistics.median(each["timings"]["write_s"] for each in fields),
        "prepare_ms": 1e3 * statistics.median(each["timings"]["prepare_s"] for each in fields),
        "staging": fields[0]["staging"]["place"],
    }


def shared(url: str, weights: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Medians of updates from the memory of this process, which shares the server's GPU."""
    reports, walls = [], []
    for _ in range(1 + SENDS):
        payload = base64.b64encode(encode(weights.items(), "flattened_bucket")).decode()
        body = json.dumps({"serialized_named_tensors": [payload], "load_format": "flattened_bucket"}).encode()
        torch.cuda.synchronize()
        start = time.perf_counter()
        with urllib.request.urlopen(f"{url}/update_weights_from_tensor", body, timeout=START_S) as response:
            reports.append(json.load(response))
        walls.append(time.perf_counter() - start)
        torch.cuda.ipc_collect()
    num_bytes = sum(tensor.nbytes for tensor in weights.values())
    wall = statistics.median(walls[1:])
    write = statistics.median(each["timings"]["write_s"] for each in reports[1:])
    return {
        "GB": num_bytes / 1e9,
        "wall_s": wall,
        "GB/s of the call": num_bytes / wall / 1e9,
        "commit_ms": 1e3 * write,
        "GB/s of the commit": num_bytes / write / 1e9,
    }


def loss(url: str, weights: dict[str, torch.Tensor], streams: int, buffer_mb: int) -> dict[str, Any]:
    """Tokens a second of a load without updates, and while one follows the other."""
    with Load(url, streams) as load, WeightSender([url], weights, buffer_size_mb=buffer_mb) as sender:
        sender.send()
        before, start = load.tokens(), time.monotonic()
        time.sleep(LOAD_S)
        calm = (load.tokens() - before) / (time.monotonic() - start)
        before, start, held = load.tokens(), time.monotonic(), 0.0
        for _ in range(SENDS):
            held += sender.send().endpoints[0].fields["timings"]["write_s"]
        busy_s = time.monotonic() - start
        busy = (load.tokens() - before) / busy_s
    return {
        "streams": streams,
        "calm_tok_s": calm,
        "busy_tok_s": busy,
        "lost": 1 - busy / calm,
        "lost_to_commits": held / busy_s,
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path, help="a directory with config.json; its weights are made up")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--buffer-mb", type=int, default=1024)
    parser.add_argument("--streams", type=int, default=STREAMS)
    parser.add_argument("--same-gpu", action="store_true")
    parser.add_argument("--name", default="weight_sync")
    args, options = parser.parse_known_args()
    device = torch.device("cpu")
    if args.same_gpu:
        return main_of_one_gpu(args.model, args.name, options)
    if args.device == "cuda":
        if torch.cuda.device_count() < 2:
            parser.error("NCCL takes two GPUs, one for the server and one for the trainer")
        device = torch.device("cuda", torch.cuda.device_count() - 1)
    weights = weights_of(args.model, device)
    found: dict[str, Any] = {"options": options}
    with server(args.model, args.device, options) as url:
        for part, flattened in (("flattened", True), ("per tensor", False)):
            found[part] = sends(url, weights, flattened=flattened, buffer_mb=args.buffer_mb)
            report.save(args.name, found)  # whatever becomes of what follows
        found["under load"] = loss(url, weights, args.streams, args.buffer_mb)
    report.save(args.name, found)
    names = ("GB", "GB/s", "wall_s", "commit_ms", "prepare_ms", "staging")
    rows = [
        [
            part,
            *(f"{value:.3g}" if isinstance(value := found[part][name], float) else value for name in names),
        ]
        for part in ("flattened", "per tensor")
    ]
    report.show("Weight updates", ["wire", *names], rows)
    load = found["under load"]
    report.show("Serving", ["", *load], [["tokens/s", *(f"{value:.3g}" for value in load.values())]])
    return 0


def main_of_one_gpu(model: Path, name: str, options: list[str]) -> int:
    with server(model, "cuda", options) as url:
        found = shared(url, weights_of(model, torch.device("cuda", 0)))
    report.save(name, {"options": options, **found})
    report.show("On one GPU", list(found), [[f"{value:.3g}" for value in found.values()]])
    return 0


if __name__ == "__main__":
    sys.exit(main())
