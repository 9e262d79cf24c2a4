"""Every option of engine and server, in one frozen dataclass. Flags and variables are generated from it."""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from segue.errors import ConfigError

Device = Literal["auto", "cpu", "cuda"]
DType = Literal["auto", "float32", "bfloat16", "float16"]
LoadFormat = Literal["auto", "safetensors", "gguf", "dummy"]
LogLevel = Literal["debug", "info", "warning", "error"]
PausedPolicy = Literal["queue", "reject"]

MIB = 1 << 20
_SIZES = (  # options that hold comma-separated sizes; Python callers may pass lists
    "batch_prefill_batch_sizes",
    "batch_prefill_seq_lengths",
    "precompile_bs_paddings",
    "precompile_token_paddings",
)


def _option(
    default: Any, group: str, help_: str, *, minimum: float | None = None, maximum: float | None = None
) -> Any:
    return field(default=default, metadata={"group": group, "help": help_, "min": minimum, "max": maximum})


def default_cache_dir() -> str:
    """Return ``$XDG_CACHE_HOME/segue``, or ``~/.cache/segue`` where that variable is not set."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return str(Path(base) / "segue")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """The options of one engine. ``None``: chosen at start from the model and the machine, or off."""

    model: str | None = _option(
        None, "Model", "Directory, GGUF file or hub id; default: the bundled SmolLM2-135M-Instruct."
    )
    served_model_name: str | None = _option(
        None, "Model", "Model name that clients use; default: derived from --model."
    )
    load_format: LoadFormat = _option(
        "auto", "Model", "Format of the weights; 'dummy': random weights, drawn from --seed."
    )
    dtype: DType = _option(
        "auto",
        "Model",
        "Type of weights and KV cache; 'auto': the checkpoint's (bfloat16 for float32 and GGUF files).",
    )
    max_model_len: int | None = _option(
        None,
        "Model",
        "Longest sequence, in tokens, prompt and output together; default: the model's.",
        minimum=2,
    )
    seed: int = _option(0, "Model", "Seed of the dummy weights (--load-format dummy).", minimum=0)
    cache_dir: str = field(
        default_factory=default_cache_dir,
        metadata={
            "group": "Model",
            "help": "Directory for converted and bundled models.",
            "min": None,
            "max": None,
        },
    )

    device: Device = _option(
        "auto", "Hardware", "Device that runs the model; 'auto': CUDA if there is a GPU, else the CPU."
    )
    tp: int = _option(
        1, "Hardware", "Number of tensor-parallel ranks, each a process.", minimum=1, maximum=64
    )
    attention_backend: str = _option(
        "auto", "Hardware", "One backend for all steps, or two as 'PREFILL,DECODE', like 'fa3,triton'."
    )

    page_size: int | None = _option(
        None,
        "Memory",
        "Tokens per page of the KV cache; default: 16 on CPU, 64 on CUDA.",
        minimum=1,
        maximum=1024,
    )
    memory_ratio: float = _option(
        0.88,
        "Memory",
        "Share of the free memory that the engine may use: weights, KV cache and buffers.",
        minimum=0.01,
        maximum=1.0,
    )
    num_kv_tokens: int | None = _option(
        None, "Memory", "Size of the KV cache, in tokens; default: chosen from the free memory.", minimum=1
    )

    weight_staging_gb: float = _option(
        0.0,
        "Memory",
        "GB (1e9 bytes) per rank that are kept free for weight updates. If this is at least the size of a "
        "rank's weights, new weights are staged in device memory.",
        minimum=0.0,
        maximum=1e6,
    )

    max_running_requests: int | None = _option(
        None,
        "Scheduling",
        "Most requests that run at once; default: 16 on CPU, 256 on CUDA.",
        minimum=1,
        maximum=65536,
    )
    max_queued_requests: int = _option(
        4096, "Scheduling", "Most requests that wait; further ones are answered 503.", minimum=1
    )
    paused_policy: PausedPolicy = _option(
        "queue",
        "Scheduling",
        "What requests do that arrive during a pause: 'queue': they wait; 'reject': they are answered 503.",
    )
    weight_recv_requires_pause: bool = _option(
        False,
        "Scheduling",
        "Refuse to receive weights while generation runs: for devices where NCCL cannot do both at once.",
    )
    chunked_prefill_size: int | None = _option(
        None,
        "Scheduling",
        "Most prompt tokens per step; longer prompts are split. Default: 512 on CPU, 8192 on CUDA.",
        minimum=1,
        maximum=1 << 20,
    )
    disable_prefix_cache: bool = _option(
        False, "Scheduling", "Do not share KV between requests with a common prefix."
    )
    disable_overlap: bool = _option(
        False, "Scheduling", "Plan each step only after the results of the step before it are read."
    )

    deterministic: bool = _option(
        False,
        "Hardware",
        "Compute the same bits for a request in any batch, with any chunk size, and after a retraction.",
    )
    disable_cuda_graph: bool = _option(
        False, "Hardware", "Launch every kernel of every step, instead of replaying CUDA graphs."
    )
    graph_self_check: bool = _option(
        False,
        "Hardware",
        "Run every captured step eagerly as well, and stop the engine if one bit differs. Slow.",
    )
    enable_batch_prefill_cuda_graph: bool = _option(
        False,
        "Hardware",
        "Capture prefill also per number and length of prompts, not only per number of tokens.",
    )
    batch_prefill_max_seq_len: int = _option(
        256, "Hardware", "Longest of --batch-prefill-seq-lengths that is captured, in tokens.", minimum=1
    )
    batch_prefill_batch_sizes: str = _option(
        "1,2,4,8", "Hardware", "Numbers of prompts that --enable-batch-prefill-cuda-graph captures."
    )
    batch_prefill_seq_lengths: str = _option(
        "16,32,64,128,256",
        "Hardware",
        "Prompt lengths that --enable-batch-prefill-cuda-graph captures, in tokens.",
    )
    precompile_bs_paddings: str | None = _option(
        None,
        "Hardware",
        "Numbers of requests for which decode is captured, like '1,2,4'; default: a dense set.",
    )
    precompile_token_paddings: str | None = _option(
        None, "Hardware", "Numbers of tokens for which mixed steps are captured, in the same form."
    )

    host: str = _option("127.0.0.1", "Server", "Host name or address to listen on.")
    port: int = _option(30000, "Server", "Port to listen on; 0: any free one.", minimum=0, maximum=65535)
    api_key: str | None = _option(
        None, "Server", "Key that clients must send as a bearer token; default: no key is needed."
    )
    admin_api_key: str | None = _option(
        None, "Server", "Key that the control routes need; default: --api-key."
    )
    open_metrics: bool = _option(False, "Server", "Answer /metrics without a key, like the health routes.")
    allowed_hosts: str | None = _option(
        None,
        "Server",
        "Host names that requests to this server may use, besides localhost and --host, separated by commas; "
        "'*': any. Default: none on a loopback address, else any.",
    )
    cors_origin: str | None = _option(
        None,
        "Server",
        "Origins of web pages that may use this server, separated by commas; '*': any; default: none.",
    )
    weights_root: str | None = _option(
        None,
        "Server",
        f"Directories, separated by {os.pathsep!r}, that /update_weights_from_disk may read from; default: "
        "any on a loopback address or with an admin key, else none.",
    )
    weights_from_hub: bool = _option(
        False, "Server", "Allow /update_weights_from_disk to download models from the Hugging Face hub."
    )
    weights_master_allow: str | None = _option(
        None,
        "Server",
        "Hosts and networks, separated by commas, of allowed masters of weight update groups; default: any.",
    )
    max_body_mib: int = _option(16, "Server", "Largest request body, in MiB.", minimum=1)
    exit_grace: float = _option(
        5.0,
        "Server",
        "Seconds from the death of a worker to the server's exit. /health answers 503 meanwhile.",
        minimum=0.0,
    )
    ping_s: float = _option(
        5.0,
        "Server",
        "Seconds without a heartbeat from a worker process after which the engine counts as hung.",
        minimum=0.1,
    )
    stall_s: float = _option(
        30.0, "Server", "Seconds that one step may take before the engine counts as hung.", minimum=0.1
    )
    drain_s: float = _option(
        30.0,
        "Server",
        "Seconds that running requests have to end after SIGTERM; 0: they end at once.",
        minimum=0.0,
        maximum=86400.0,
    )
    log_level: LogLevel = _option("info", "Server", "Lowest level of messages that are logged.")

    def __post_init__(self) -> None:
        hints = get_type_hints(type(self))
        for name in _SIZES:
            if isinstance(value := getattr(self, name), list | tuple):
                object.__setattr__(self, name, ",".join(map(str, value)))
        for option in fields(self):
            _check(option.name, getattr(self, option.name), hints[option.name], option.metadata)
        for name in _SIZES:
            if (sizes := getattr(self, name)) is not None:
                parse_sizes(sizes, name)
        if self.weights_root is not None:
            parse_list(self.weights_root, os.pathsep, "weights_root")
        if self.weights_master_allow is not None:
            for entry in parse_list(self.weights_master_allow, ",", "weights_master_allow"):
                _check_host_or_network(entry, "weights_master_allow")

    @classmethod
    def create(cls, environ: Mapping[str, str] | None = None, **options: Any) -> EngineConfig:
        """Build a config: explicit options come first, then ``SEGUE_…`` variables, then defaults.

        Raises:
            ConfigError: an option is unknown, or its value breaks its rule.
        """
        known = {option.name for option in fields(cls)}
        for name in options:
            if name not in known:
                raise ConfigError(f"unknown option {name!r}; known: {', '.join(sorted(known))}", param=name)
        return cls(**{**_from_environment(os.environ if environ is None else environ), **options})

    def with_(self, **options: Any) -> EngineConfig:
        """Return a copy with some options replaced."""
        return replace(self, **options)


def _from_environment(environ: Mapping[str, str]) -> dict[str, Any]:
    hints = get_type_hints(EngineConfig)
    found: dict[str, Any] = {}
    for option in fields(EngineConfig):
        variable = f"SEGUE_{option.name.upper()}"
        if variable in environ:
            found[option.name] = parse(environ[variable], hints[option.name], variable)
    return found


def key_from_environment(environ: Mapping[str, str] | None = None) -> str | None:
    """Return the key for a server's control routes: ``SEGUE_ADMIN_API_KEY``, else ``SEGUE_API_KEY``."""
    given = os.environ if environ is None else environ
    return given.get("SEGUE_ADMIN_API_KEY") or given.get("SEGUE_API_KEY") or None


def parse_sizes(text: str, name: str) -> list[int]:
    """Return the numbers of an option like "1,2,4,8".

    Raises:
        ConfigError: the text is not a comma-separated list of numbers from 1 on.
    """
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise ConfigError(f"{name}={text!r}: expected numbers from 1 on, separated by commas", param=name)
    return [int(part) for part in parts]


def parse_list(text: str, separator: str, name: str) -> list[str]:
    """Return the entries of an option like "/models:/checkpoints".

    Raises:
        ConfigError: an entry is empty.
    """
    parts = [part.strip() for part in text.split(separator)]
    if not all(parts):
        raise ConfigError(f"{name}={text!r}: expected entries separated by {separator!r}", param=name)
    return parts


def _check_host_or_network(entry: str, name: str) -> None:
    """Raise ConfigError for an entry that no host can match: a server must not start with such a typo."""
    try:
        ipaddress.ip_network(entry, strict=False)
    except ValueError:
        if re.fullmatch(r"[\w.-]+", entry) is None:
            raise ConfigError(
                f"{name}: {entry!r} is neither a host name, like trainer-1.lan, nor an address or network, "
                "like 10.0.0.0/8",
                param=name,
            ) from None


def parse(text: str, kind: Any, name: str) -> Any:
    """Return the value of an option whose environment variable has the text ``text``."""
    if get_origin(kind) is Literal:
        return text
    if kind is bool:
        if text.lower() in ("1", "true", "yes", "on"):
            return True
        if text.lower() in ("", "0", "false", "no", "off"):
            return False
        raise ConfigError(f"{name}={text!r}: use 1 or 0", param=name)
    options = [k for k in get_args(kind) if k is not type(None)] or [kind]
    try:
        return options[0](text)
    except ValueError as error:
        raise ConfigError(f"{name}={text!r}: expected {options[0].__name__}", param=name) from error


def _check(name: str, value: Any, kind: Any, rule: Mapping[str, Any]) -> None:
    if get_origin(kind) is Literal:
        if value not in get_args(kind):
            raise ConfigError(f"{name}={value!r}: choose one of {', '.join(get_args(kind))}", param=name)
        return
    allowed = get_args(kind) or (kind,)
    if not isinstance(value, (*allowed, int) if float in allowed else allowed) or (
        isinstance(value, bool) and bool not in allowed
    ):
        names = " or ".join("None" if k is type(None) else k.__name__ for k in allowed)
        raise ConfigError(f"{name}={value!r}: expected {names}", param=name)
    if value == "":  # an API key that a script left empty must not open the server
        raise ConfigError(f"{name}='': must not be empty; leave it out for the default", param=name)
    if value is None or isinstance(value, str):
        return
    if rule["min"] is not None and not value >= rule["min"]:  # not "<", so that NaN is refused
        raise ConfigError(f"{name}={value}: must be at least {rule['min']}", param=name)
    if rule["max"] is not None and not value <= rule["max"]:
        raise ConfigError(f"{name}={value}: must be at most {rule['max']}", param=name)
