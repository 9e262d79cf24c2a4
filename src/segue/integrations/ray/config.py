"""What a fleet consists of, and what it takes from a Ray cluster."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Literal

from segue.config import Device, EngineConfig
from segue.errors import ConfigError
from segue.options import Options, check_name
from segue.router.config import RouterConfig

PlacementStrategy = Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"]

# Where the processes are, and how they find and trust each other, is for the fleet to choose.
_OF_ENGINE = (
    *("host", "port", "api_key", "admin_api_key", "register", "register_key", "register_url"),
    *("role", "disaggregation_bootstrap_port", "ssl_certfile", "root_path"),
    *("shadow_mode", "system_host", "system_port", "gms_dir"),
)
_OF_ROUTER = (
    *("host", "worker", "prefill", "decode", "discovery", "worker_api_key", "worker_admin_key"),
    *("ssl_certfile", "root_path"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerConfig:
    """A `segue trainer` in a fleet; the options are those of its command line."""

    model: str | None = None
    device: Device = "cpu"
    dtype: Literal["float32", "bfloat16"] = "float32"
    learning_rate: float = 1e-5
    cpus: float = 1.0  # that Ray reserves
    gpus: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetConfig:
    """Engines with equal options, the router in front of them, and perhaps a trainer.

    Each process is an actor in a bundle of one placement group.
    """

    engine: EngineConfig = field(default_factory=EngineConfig)
    router: RouterConfig = field(default_factory=RouterConfig)
    trainer: TrainerConfig | None = None
    name: str = (
        "segue"  # of the fleet in the cluster; actors are called `{name}-router`, `{name}-engine-0`, …
    )
    engines: int = 1
    engine_cpus: float = 1.0  # per engine; its threads too
    engine_gpus: float | None = None  # per engine; None: `engine.tp`, and 0 with `engine.device` "cpu"
    router_cpus: float = 1.0
    strategy: PlacementStrategy = "PACK"
    max_restarts: int = -1  # of each engine and of the router; -1: any number
    start_timeout_s: float = 600.0  # until Ray has the resources, and until all processes are ready

    def __post_init__(self) -> None:
        """Check the numbers, and that no option is given that the fleet chooses; raises ConfigError."""
        check_name(self.name, "name")
        if self.engines < 1:
            raise ConfigError(f"engines={self.engines}: a fleet needs at least 1", param="engines")
        _check_not_given(self.engine, _OF_ENGINE, "engine")
        _check_not_given(self.router, _OF_ROUTER, "router")

    @property
    def gpus_per_engine(self) -> float:
        """The GPUs that Ray reserves for an engine."""
        if self.engine_gpus is not None:
            return self.engine_gpus
        return 0.0 if self.engine.device == "cpu" else float(self.engine.tp)

    @property
    def threads_per_rank(self) -> int:
        """The threads of each rank of an engine, which together have the engine's cores."""
        return max(1, int(self.engine_cpus) // self.engine.tp)


def _check_not_given(options: Options, names: tuple[str, ...], what: str) -> None:
    """Raise ConfigError if one of these options does not have its default value."""
    defaults = {each.name: each.default for each in fields(options)}
    for name in names:
        value = getattr(options, name)
        if value != defaults[name]:
            shown = "a value" if "key" in name else repr(value)
            text = f"{what}.{name} has {shown}, but a fleet in Ray chooses it itself; leave it out"
            raise ConfigError(text, param=name)
