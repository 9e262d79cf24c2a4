"""Every option of engine and server, in one frozen dataclass. Flags and variables are generated from it."""

from __future__ import annotations

import ipaddress
import os
import re
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from segue.bootstrap_hosts import parse_entries
from segue.errors import ConfigError
from segue.logs import LogFormat
from segue.options import (
    OptionAlias,
    Options,
    check_key,
    check_name,
    check_own_url,
    check_root_path,
    check_socket_directory,
    option,
    parse_list,
    parse_names,
    parse_places,
    parse_sizes,
    parse_urls,
)
from segue.tracing.endpoint import parse_endpoint

Device = Literal["auto", "cpu", "cuda"]
LoadFormat = Literal["auto", "safetensors", "gguf", "dummy"]
Quantization = Literal["auto", "none", "fp8"]
Role = Literal["both", "prefill", "decode"]
GmsMode = Literal["off", "rw_or_ro", "rw", "ro"]
KVOwner = Literal["auto", "gms", "private"]
WakeBy = Literal["lock", "manual", "both"]
TransportChoice = Literal["auto", "shm", "cuda_ipc", "nixl"]
Compat = Literal["none", "sglang", "vllm"]
HealthStatus = Literal["ready", "notready"]
LogLevel = Literal["debug", "info", "warning", "error"]

MIB = 1 << 20
METRIC_NAMES = ("segue", "vllm", "sglang")  # engines whose names /metrics can use
SERVER_GROUPS = ("Server", "Failover")  # options that only `segue serve` takes
MOST_SHADOWS = 8  # engines that stand by for one
SYSTEM_PORT = 9090  # of an engine that stands by, unless another one is given

_model = partial(option, group="Model")
_hardware = partial(option, group="Hardware")
_memory = partial(option, group="Memory")
_scheduling = partial(option, group="Scheduling")
_disaggregation = partial(option, group="Disaggregation")
_server = partial(option, group="Server")
_failover = partial(option, group="Failover")


def default_cache_dir() -> str:
    """Return ``$XDG_CACHE_HOME/segue``, or ``~/.cache/segue`` where that variable is not set."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return str(Path(base) / "segue")


def parse_endpoints(text: str, name: str) -> list[str]:
    """Return the endpoints of an option like "generate"; "none" stands for none.

    Raises:
        ConfigError: there is no such endpoint.
    """
    names = [] if text == "none" else parse_list(text, name)
    for each in names:
        if each != "generate":
            raise ConfigError(f"{name}={text!r}: {each!r} is no endpoint; give generate, or none", param=name)
    return names


def parse_metric_names(text: str, name: str) -> list[str]:
    """Return the engines of an option like "segue,vllm".

    Raises:
        ConfigError: an entry is none of the known ones, or comes twice.
    """
    names = parse_list(text, name)
    for each in names:
        if each not in METRIC_NAMES or names.count(each) > 1:
            rule = f"expected some of {', '.join(METRIC_NAMES)}, each once and separated by commas"
            raise ConfigError(f"{name}={text!r}: {rule}", param=name)
    return names


def _check_hosts_and_networks(text: str, name: str) -> None:
    """Raise ConfigError for an entry that no host can match: a server must not start with such a typo."""
    for entry in parse_list(text, name):
        try:
            ipaddress.ip_network(entry, strict=False)
        except ValueError:
            if re.fullmatch(r"[\w.-]+", entry) is None:
                raise ConfigError(
                    f"{name}: {entry!r} is neither a host name, like trainer-1.lan, nor an address or "
                    "network, like 10.0.0.0/8",
                    param=name,
                ) from None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig(Options):
    """The options of one engine. ``None``: chosen at start from the model and the machine, or off."""

    model: str | None = _model(
        None, "Directory, GGUF file or hub id; default: the bundled SmolLM2-135M-Instruct."
    )
    served_model_name: str | None = _model(
        None,
        "Model names that clients use, separated by commas, or each with a flag of its own; replies have the "
        "first one. Default: one, derived from --model.",
        check=parse_names,
    )
    revision: str | None = _model(
        None, "Branch, tag or commit of --model, where that is an id of the hub; default: its main branch."
    )
    tokenizer: str | None = _model(
        None, "Directory or hub id of another tokenizer than the one in --model's files."
    )
    chat_template: str | None = _model(
        None, "File with a Jinja template for conversations, in place of the tokenizer's own."
    )
    sampling_defaults: Literal["openai", "model"] = _model(
        "openai",
        "Temperature, top-p and top-k of requests that do not name them: 'openai': 1, 1 and off; 'model': "
        "those of the model's generation_config.json.",
    )
    load_format: LoadFormat = _model(
        "auto", "Format of the weights; 'dummy': random weights, drawn from --seed."
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = _model(
        "auto",
        "Type of weights and KV cache; 'auto': the checkpoint's (bfloat16 for float32 and GGUF files).",
    )
    kv_cache_dtype: Literal["auto", "fp8", "fp8_e4m3"] = _model(
        "auto",
        "Type of the KV cache; 'auto': that of --dtype; 'fp8' or 'fp8_e4m3': 8-bit floats, with the "
        "checkpoint's scales of keys and values if it has any.",
    )
    quantization: Quantization = _model(
        "auto",
        "Format of the weights of linear layers and experts; 'fp8': 8-bit floats with a scale per row, made "
        "while the weights are loaded; 'auto': the checkpoint's.",
    )
    max_model_len: int | None = _model(
        None, "Longest sequence, in tokens, prompt and output together; default: the model's.", minimum=2
    )
    seed: int = _model(0, "Seed of the dummy weights (--load-format dummy).", minimum=0)
    cache_dir: str = _model(default_cache_dir, "Directory for converted and bundled models.")
    tool_call_parser: Literal["auto", "none", "hermes", "llama3-json"] = _model(
        "auto", "Form in which the model writes tool calls; 'auto': by its chat template."
    )
    reasoning_parser: Literal["auto", "none", "think"] = _model(
        "auto",
        "How reasoning is told from the answer; 'think': by <think> and </think>; 'auto': if it has them.",
    )

    device: Device = _hardware(
        "auto", "Device that runs the model; 'auto': CUDA if there is a GPU, else the CPU."
    )
    tp: int = _hardware(1, "Number of tensor-parallel ranks, each a process.", minimum=1, maximum=64)
    attention_backend: str = _hardware(
        "auto", "One backend for all steps, or two as 'PREFILL,DECODE', like 'fa3,triton'."
    )
    deterministic: bool = _hardware(
        False,
        "Compute the same bits for a request in any batch, with any chunk size, and after a retraction.",
    )
    disable_cuda_graph: bool = _hardware(
        False, "Launch every kernel of every step, instead of replaying CUDA graphs."
    )
    gemm_plans: Literal["auto", "stored"] = _hardware(
        "auto",
        "Plans of GEMMs of few rows on CUDA, for shapes without a stored one; 'auto': timed at start, once "
        "per device and model, and kept in --cache-dir; 'stored': none, these use cuBLAS.",
    )
    graph_self_check: bool = _hardware(
        False, "Run every captured step eagerly as well, and stop the engine if one bit differs. Slow."
    )
    enable_batch_prefill_cuda_graph: bool = _hardware(
        False, "Capture prefill also per number and length of prompts, not only per number of tokens."
    )
    batch_prefill_max_seq_len: int = _hardware(
        256, "Longest of --batch-prefill-seq-lengths that is captured, in tokens.", minimum=1
    )
    batch_prefill_batch_sizes: str = _hardware(
        "1,2,4,8", "Numbers of prompts that --enable-batch-prefill-cuda-graph captures.", check=parse_sizes
    )
    batch_prefill_seq_lengths: str = _hardware(
        "16,32,64,128,256",
        "Prompt lengths that --enable-batch-prefill-cuda-graph captures, in tokens.",
        check=parse_sizes,
    )
    precompile_bs_paddings: str | None = _hardware(
        None,
        "Numbers of requests for which decode is captured, like '1,2,4'; default: a dense set.",
        check=parse_sizes,
    )
    precompile_token_paddings: str | None = _hardware(
        None, "Numbers of tokens for which mixed steps are captured, in the same form.", check=parse_sizes
    )

    page_size: int | None = _memory(
        None, "Tokens per page of the KV cache; default: 16 on CPU, 64 on CUDA.", minimum=1, maximum=1024
    )
    memory_ratio: float = _memory(
        0.88,
        "Share of the free memory that the engine may use: weights, KV cache and buffers.",
        minimum=0.01,
        maximum=1.0,
    )
    num_kv_tokens: int | None = _memory(
        None, "Size of the KV cache, in tokens; default: chosen from the free memory.", minimum=1
    )
    weight_staging_gb: float = _memory(
        0.0,
        "GB (1e9 bytes) per rank that are kept free for weight updates. If this is at least the size of a "
        "rank's weights, new weights are staged in device memory.",
        minimum=0.0,
        maximum=1e6,
    )

    enable_memory_saver: bool = _memory(
        False,
        "Let clients release the memory of weights and KV cache and resume it later "
        "(/release_memory_occupation, /sleep): it then stays at the same addresses.",
    )

    max_running_requests: int | None = _scheduling(
        None, "Most requests that run at once; default: 16 on CPU, 256 on CUDA.", minimum=1, maximum=65536
    )
    max_queued_requests: int = _scheduling(
        4096, "Most requests that wait; further ones are answered 503.", minimum=1
    )
    max_logprobs: int = _scheduling(
        20,
        "Most alternatives that a client may ask for with each token's log-probability.",
        minimum=0,
        maximum=255,  # `messages.leg.pack_logprobs` and `disagg.offer.LOGPROBS_PER_PART` have no more room
    )
    paused_policy: Literal["queue", "reject"] = _scheduling(
        "queue",
        "What requests do that arrive during a pause: 'queue': they wait; 'reject': they are answered 503.",
    )
    weight_receive_share: float = _scheduling(
        0.15,
        "Greatest share of the time that NCCL may take for receiving new weights while requests run, whoever "
        "sends them; 1: no limit.",
        minimum=0.01,
        maximum=1.0,
    )
    weight_recv_requires_pause: bool = _scheduling(
        False,
        "Refuse to receive weights while generation runs: for devices where NCCL cannot do both at once.",
    )
    chunked_prefill_size: int | None = _scheduling(
        None,
        "Most prompt tokens per step; longer prompts are split. Default: 512 on CPU; on CUDA 8192, with "
        "--role prefill 4096.",
        minimum=1,
        maximum=1 << 20,
    )
    enable_laps_scheduler: bool = _scheduling(
        False, "Length-aware prefill: short prompts do not wait behind long ones."
    )
    laps_length_threshold: int = _scheduling(
        256,
        "LAPS: tokens of the longest short prompt, not counting those found in the cache.",
        minimum=1,
        maximum=1 << 30,
    )
    laps_long_share: float = _scheduling(
        0.2,
        "LAPS: share of the time of prefill that long prompts have while short ones wait.",
        minimum=0.01,
        maximum=1.0,
    )
    laps_ttft_slo_ms: float = _scheduling(
        400.0,
        "LAPS: milliseconds to the first token of a short prompt; a chunk of a long prompt that would break "
        "this limit is put off once.",
        minimum=1.0,
    )
    laps_max_blocking_ms: float | None = _scheduling(
        None,
        "LAPS: milliseconds that a step may take for a chunk of a long prompt while short ones wait or are "
        "likely to come; default: 250 on CPU, 60 on CUDA.",
        minimum=1.0,
    )
    laps_window_ms: float = _scheduling(
        0.0,
        "LAPS: milliseconds that an idle engine waits for further short prompts if they arrive in quick "
        "succession; 0: it never waits.",
        minimum=0.0,
        maximum=1000.0,
    )
    disable_prefix_cache: bool = _scheduling(False, "Do not share KV between requests with a common prefix.")
    disable_overlap: bool = _scheduling(
        False, "Plan each step only after the results of the step before it are read."
    )

    role: Role = _disaggregation(
        "both",
        "Work of this engine: 'prefill': it computes prompts and hands their KV over; 'decode': it takes KV "
        "over and generates, and also serves whole requests; 'both': it serves whole requests alone.",
        alias=OptionAlias(
            name="disaggregation_mode",
            values={"null": "both", "prefill": "prefill", "decode": "decode"},
        ),
    )
    disaggregation_bootstrap_port: int = _disaggregation(
        8998,
        "Port, on --host, where a prefill engine accepts connections of decode engines; 0: any free one.",
        minimum=0,
        maximum=65535,
    )
    disaggregation_bootstrap_hosts: str | None = _disaggregation(
        None,
        "Hosts, addresses and networks, separated by commas, of the prefill engines that a decode engine may "
        "connect to, which requests name as bootstrap_host, and a router's legs as their peer; an entry with "
        "a port, like prefill-1.lan:8998, allows only that one. '*': any host. Default: loopback addresses "
        "and --host.",
        check=parse_entries,
    )
    pd_checksum: bool = _disaggregation(
        False,
        "A prefill engine sends a checksum of each page of KV, which the decode engine compares; pages that "
        "differ are not used, and the prompt is computed again.",
    )
    pd_key: str | None = _disaggregation(
        None,
        "Key that prefill and decode engines share; needed unless both ends are on a loopback address.",
    )
    pd_transport: TransportChoice = _disaggregation(
        "auto",
        "How KV gets from engine to engine: 'shm': shared memory of one host; 'cuda_ipc': from GPU to GPU of "
        "one host; 'nixl': RDMA or TCP, also between hosts; 'auto': 'shm' on CPUs, 'cuda_ipc' on GPUs, and "
        "also 'nixl' if --pd-key is given and NIXL is installed (pip install 'segue[nixl]').",
    )
    register: str | None = _server(
        None,
        "URLs of routers at which this server registers itself, every 5 s for as long as it serves.",
        check=parse_urls,
    )
    register_key: str | None = _server(None, "Admin key of the routers of --register.", check=check_key)
    register_url: str | None = _server(
        None,
        "URL at which the routers of --register reach this server; default: --port at --host, or at the "
        "address that this machine has towards the router if --host stands for all addresses. Records of "
        "--discovery have it too, and need it in that case.",
        check=check_own_url,
    )

    host: str = _server("127.0.0.1", "Host name or address to listen on.")
    port: int = _server(30000, "Port to listen on; 0: any free one.", minimum=0, maximum=65535)
    ssl_certfile: str | None = _server(
        None, "File of the server's certificate and of those that vouch for it, in PEM form: it speaks HTTPS."
    )
    ssl_keyfile: str | None = _server(None, "File of the certificate's private key, in PEM form.")
    ssl_keyfile_password: str | None = _server(None, "Password of --ssl-keyfile, if the key is encrypted.")
    root_path: str | None = _server(
        None,
        "Path, like /segue, that a proxy in front of this server puts before its routes and removes again; "
        "requests that still have it are served too.",
        check=check_root_path,
    )
    api_key: str | None = _server(
        None, "Key that clients must send as a bearer token; default: no key is needed.", check=check_key
    )
    admin_api_key: str | None = _server(
        None, "Key that the control routes need; default: --api-key.", check=check_key
    )
    open_metrics: bool = _server(False, "Answer /metrics without a key, like the health routes.")
    metric_names: str = _server(
        "segue",
        "Whose names /metrics uses, separated by commas: segue, and vllm and sglang for those metrics that "
        "mean the same there.",
        check=parse_metric_names,
    )
    otlp_traces_endpoint: str | None = _server(
        None,
        "URL of an OpenTelemetry collector that takes OTLP over HTTP, like http://collector:4318: it gets "
        "spans of requests and of weight updates. Default: there are none.",
        check=parse_endpoint,
    )
    compat: Compat = _server(
        "none",
        "Engine that /v1/models names in 'owned_by', by which some routers tell how to talk to a server; "
        "'none': segue. Nothing else changes.",
    )
    allowed_hosts: str | None = _server(
        None,
        "Host names that requests to this server may use, besides localhost and --host, separated by commas; "
        "'*': any. Default: none on a loopback address, else any.",
        check=parse_list,
    )
    cors_origin: str | None = _server(
        None,
        "Origins of web pages that may use this server, separated by commas; '*': any; default: none.",
        check=parse_list,
    )
    weights_root: str | None = _server(
        None,
        f"Directories, separated by {os.pathsep!r}, that /update_weights_from_disk may read from; default: "
        "any on a loopback address or with an admin key, else none.",
        check=partial(parse_list, separator=os.pathsep),
    )
    weights_from_hub: bool = _server(
        False, "Allow /update_weights_from_disk to download models from the Hugging Face hub."
    )
    weights_master_allow: str | None = _server(
        None,
        "Hosts and networks, separated by commas, of allowed masters of weight update groups; default: any.",
        check=_check_hosts_and_networks,
    )
    profile_dir: str | None = _server(
        None,
        "Directory for the traces of /start_profile; without one, that is refused. Each trace costs time and "
        "memory while it is taken.",
    )
    disable_webpage: bool = _server(False, "Serve no web page at / (charts, a log of events, a chat).")
    max_body_mib: int = _server(16, "Largest request body, in MiB.", minimum=1)
    exit_grace: float = _server(
        5.0,
        "Seconds from the death of a worker to the server's exit. /health answers 503 meanwhile.",
        minimum=0.0,
    )
    ping_s: float = _server(
        5.0,
        "Seconds without a heartbeat from a worker process after which the engine counts as hung.",
        minimum=0.1,
    )
    stall_s: float = _server(
        30.0, "Seconds that one step may take before the engine counts as hung.", minimum=0.1
    )
    drain_s: float = _server(
        30.0,
        "Seconds that running requests have to end after SIGTERM; 0: they end at once.",
        minimum=0.0,
        maximum=86400.0,
    )
    log_level: LogLevel = _server("info", "Lowest level of messages that are logged.")
    log_format: LogFormat = _server(
        "text", "How lines of the log look: 'text', or 'json': one object per line."
    )

    shadow_mode: bool = _failover(
        False,
        "Stand by behind the engines of the cohort: load the model, and serve once the one that serves has "
        "ended, or once it is asked for (--wake).",
    )
    failover_dir: str | None = _failover(
        None,
        "Directory that the engines of a cohort share, for the lock of the one that serves and for notes; "
        "needed with --shadow-mode.",
    )
    num_shadows: int = _failover(
        0,
        "Number of engines with equal options that stand by on the same device: --memory-ratio is for all of "
        "them and this one together. Weights that they share count once.",
        minimum=0,
        maximum=MOST_SHADOWS,
    )
    cohort: str = _failover(
        "default", "Name of the engines that can serve in each other's place.", check=check_name
    )
    engine_id: str | None = _failover(
        None, "Name of this engine in its cohort; default: the host and the process id.", check=check_name
    )
    gms_dir: str | None = _failover(
        None,
        "Directory of the memory service (segue gms serve), which then keeps the weights: one engine of a "
        "cohort loads them, and the others read the same memory. Default: with --shadows a service of their "
        "own, unless --enable-memory-saver is given, which needs weights per engine; else a copy per engine.",
        check=check_socket_directory,
    )
    gms_mode: GmsMode = _failover(
        "rw_or_ro",
        "How the weights of --gms-dir are asked for: 'rw_or_ro': load them if nobody has; 'rw': load them, "
        "or end; 'ro': wait until another engine has loaded them; 'off': a copy per engine.",
    )
    gms_token: str | None = _failover(
        None, "Token of the memory service, if it was started with one.", check=check_key
    )
    kv_owner: KVOwner = _failover(
        "auto",
        "Whose memory the KV cache of an engine that wakes is: 'gms': the memory service's, which hands it "
        "on to the next engine of the cohort; 'private': the engine's own; 'auto': 'gms' on CUDA with "
        "--gms-dir, for engines that have no KV cache while they stand by, and with --warm-kv.",
    )
    fence_timeout_s: float = _failover(
        5.0,
        "Seconds that an engine which wakes waits for the end of the process before it, which may still "
        "write to the KV cache of --kv-owner gms; then it takes other memory, if there is some.",
        minimum=0.0,
        maximum=3600.0,
    )
    on_gms_loss: Literal["serve", "exit"] = _failover(
        "serve",
        "What an engine does that has lost the memory service: 'serve': go on with the memory that it has "
        "mapped, and connect again; 'exit': end, so that it is started again.",
    )
    warm_kv: bool = _failover(
        False,
        "Go on with the prefix cache of the engine that served before, as far as the memory service has kept "
        "it and it is proved to be right; needs --gms-dir and --shadow-mode.",
    )
    wake: WakeBy = _failover(
        "both",
        "What wakes an engine that stands by: 'lock': the end of the engine that serves; 'manual': POST "
        "/engine/wake_up on the system port.",
    )
    wake_timeout_s: float | None = _failover(
        None,
        "Seconds that a wake may take before the engine ends itself; default: 10, and 1 more per 10 GiB "
        "of KV cache.",
        minimum=0.1,
    )
    hang_timeout_s: float | None = _failover(
        None,
        "Seconds that the workers of an engine which serves may be silent before /live of the system port "
        "answers 503; default: 120 on CPU, 30 on CUDA.",
        minimum=0.1,
    )
    discovery: str = _failover(
        "file",
        "Where an engine of a cohort puts its record once it serves, for routers: some of 'file', 'etcd' and "
        "'kubernetes', separated by commas; 'none': nowhere.",
        check=parse_list,
    )
    discovery_target: str | None = _failover(
        None,
        "Where each backend of --discovery is, in its order and separated by commas: for 'file' a directory, "
        "by default --failover-dir, for 'etcd' a URL, for 'kubernetes' a namespace, by default its own.",
        check=parse_places,
    )
    discovery_ttl_s: float = _failover(
        10.0,
        "Seconds that the record of a dead engine stays in etcd or Kubernetes; it never delays a takeover.",
        minimum=1.0,
    )
    system_host: str | None = _failover(None, "Host name or address of the system port; default: --host.")
    system_port: int | None = _failover(
        None,
        "Port, on --system-host, of the probes /startup, /live, /ready and /health, of /metrics, and of "
        f"/engine/…; 0: any free one. Default: {SYSTEM_PORT} with --shadow-mode, else there is none.",
        minimum=0,
        maximum=65535,
    )
    system_use_endpoint_health_status: str = _failover(
        "generate",
        "Endpoints, separated by commas, that must be ready for the system port to call the engine healthy; "
        "'none': those with a health check, and if there are none, the status that the engine sets.",
        check=parse_endpoints,
    )
    system_starting_health_status: HealthStatus = _failover(
        "notready", "Status of the engine on the system port until it has loaded its model."
    )
    health_check_enabled: bool | None = _failover(
        None, "Generate two tokens now and then while there are no requests; default: with --shadow-mode."
    )
    health_check_interval_s: float = _failover(
        30.0, "Seconds without requests before such a check.", minimum=0.1
    )
    live_during_init: Literal["off", "progress"] = _failover(
        "off",
        "What /live of the system port answers while the model loads: 'off': 503; 'progress': 200 while the "
        "start gets on.",
    )

    @property
    def served_model_names(self) -> list[str]:
        """The names that --served-model-name gives the model; empty: none."""
        return [] if self.served_model_name is None else parse_names(self.served_model_name, "")

    @property
    def shares_weights(self) -> bool:
        """Whether the weights belong to the memory service, so that nothing may write to them."""
        return self.gms_dir is not None and self.gms_mode != "off"

    @property
    def parks_kv(self) -> bool:
        """Whether one page of the KV cache is enough for the engine while it stands by."""
        # Other engines map the cache of one with a role. Steps that are timed at the start write to it.
        return self.shadow_mode and self.role == "both" and not self.enable_laps_scheduler

    @property
    def why_kv_is_private(self) -> str:
        """Why the KV cache cannot be the memory service's, with the remedy behind a semicolon; "": it can."""
        if not self.shares_weights:
            return "no memory service has the weights; give --gms-dir, without --gms-mode off"
        if not self.shadow_mode:
            return "only engines that stand by for each other get its memory; give --shadow-mode"
        if self.role != "both":
            return f"other engines map the KV cache of one with role={self.role!r}; use --role both"
        if self.enable_laps_scheduler:
            return "enable_laps_scheduler=True times steps at the start, which write to the KV cache; use one"
        return ""

    @property
    def probed_port(self) -> int | None:
        """The system port; None: there is none."""
        return SYSTEM_PORT if self.system_port is None and self.shadow_mode else self.system_port

    @property
    def has_health_check(self) -> bool:
        """Whether an engine without requests is asked for tokens now and then."""
        return self.shadow_mode if self.health_check_enabled is None else self.health_check_enabled
