"""The options of ``segue cluster``: how many workers, those of the router, and those of every worker."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import Field, dataclass, fields, replace
from functools import partial
from typing import Any, ClassVar, Self, get_type_hints

from segue.config import MOST_SHADOWS, EngineConfig
from segue.errors import ClusterSizeError, ConfigError
from segue.options import Options, option, spelling, variable
from segue.router.config import RouterConfig

MOST_WORKERS = 256  # of each role

_cluster = partial(option, group="Cluster", minimum=0, maximum=MOST_WORKERS)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSize(Options):
    """The number of workers of each role."""

    workers: int = _cluster(0, "Number of workers that serve whole requests.")
    prefill: int = _cluster(0, "Number of workers that compute prompts and hand their KV over.")
    decode: int = _cluster(0, "Number of workers that take KV over and generate.")
    shadows: int = option(
        0,
        "Number of engines that stand by behind each worker: when it dies, one of them goes on with its "
        "requests.",
        group="Cluster",
        minimum=0,
        maximum=MOST_SHADOWS,
    )

    def __post_init__(self) -> None:
        """Check the numbers.

        Raises:
            ConfigError: a number is out of range.
            ClusterSizeError: workers of these roles cannot serve requests.
        """
        super(ClusterSize, self).__post_init__()  # a class with slots is made anew: plain super() fails
        given = f"workers={self.workers}, prefill={self.prefill}, decode={self.decode}"
        if not self.total:
            remedy = "give --workers N, or --prefill P and --decode D, or all three"
            raise ClusterSizeError(f"{given}: a cluster needs workers; {remedy}", param="workers")
        if bool(self.prefill) != bool(self.decode):
            has, lacks = ("prefill", "decode") if self.prefill else ("decode", "prefill")
            raise ClusterSizeError(
                f"{given}: prefill and decode workers serve a request together, so {has} workers need at "
                f"least one {lacks} worker; give --{lacks} N, or --workers {self.total} instead",
                param=lacks,
            )

    @property
    def total(self) -> int:
        """The number of all workers, those that stand by left out."""
        return self.workers + self.prefill + self.decode

    @property
    def num_engines(self) -> int:
        """The number of all engines."""
        return self.total * (1 + self.shadows)


# Options that clients notice, which the router has under the same names, stay with the router; of those in
# `_ALIKE` every process gets the same value.
_ALIKE = {"max_body_mib", "drain_s", "log_level", "log_format", "otlp_traces_endpoint"}
_ROUTER = {each.name for each in fields(RouterConfig) if each.metadata["group"] != "Workers"}
# Of the router: the workers and where to look for them, and of a worker: the cluster chooses them. It draws
# the workers' key too, unless it is given because somebody calls them directly, as a trainer does.
_CHOSEN = {
    *("role", "disaggregation_bootstrap_port", "register", "register_key", "register_url"),
    *("shadow_mode", "failover_dir", "cohort", "engine_id", "wake", "system_host", "system_port"),
    *("num_shadows",),
    *("discovery", "discovery_target", "discovery_ttl_s"),
}
_ROUTER = (_ROUTER - _CHOSEN) | {"worker_api_key"}
_ENGINE = {each.name for each in fields(EngineConfig)} - (_ROUTER - _ALIKE) - _CHOSEN


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterConfig:
    """The options of one cluster. It can be used in place of a class of :class:`segue.options.Options`."""

    size: ClusterSize
    router: RouterConfig
    engine: EngineConfig  # of every worker, without its role and addresses

    # Each class with the names of those of its options that the cluster takes. Where two have the same name,
    # the flag has the text and the default of the first.
    _parts: ClassVar[tuple[tuple[type[Options], set[str]], ...]] = (
        (ClusterSize, {each.name for each in fields(ClusterSize)}),
        (RouterConfig, _ROUTER),
        (EngineConfig, _ENGINE),
    )

    def __post_init__(self) -> None:
        """Check how the engines of a worker come to their weights; raises ConfigError."""
        mode, directory = self.engine.gms_mode, self.engine.gms_dir
        if self.size.shadows and (mode == "rw" or (mode == "ro" and directory is None)):
            fault = "only one engine may load" if mode == "rw" else "no engine would load"
            raise ConfigError(
                f"gms_mode={mode!r}: with shadows, {fault} the weights that all of them read; "
                "leave --gms-mode out",
                param="gms_mode",
            )

    @classmethod
    def listed(cls) -> list[tuple[Field[Any], Any]]:
        """Return each option with its declared type."""
        found: dict[str, tuple[Field[Any], Any]] = {}
        for options_class, names in cls._parts:
            hints = get_type_hints(options_class)
            for each in fields(options_class):
                if each.name in names:
                    found.setdefault(each.name, (each, hints[each.name]))
        return list(found.values())

    @classmethod
    def create(
        cls,
        environ: Mapping[str, str] | None = None,
        *,
        file: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> Self:
        """Build the options: explicit ones first, then ``SEGUE_…`` variables, a file's values, and defaults.

        Raises:
            ConfigError: an option is unknown, or its value breaks its rule.
            ClusterSizeError: workers of these roles cannot serve requests.
        """
        given = os.environ if environ is None else environ
        known = {each.name for each, _ in cls.listed()}
        settings = file or {}
        for name in {*options, *settings} - known:
            raise ConfigError(f"unknown option {name!r}; known: {', '.join(sorted(known))}", param=name)
        size, router, engine = (
            options_class.create(
                {key: given[key] for name in names if (key := variable(name)) in given},
                file={name: value for name, value in settings.items() if name in names},
                **{name: value for name, value in options.items() if name in names},
            )
            for options_class, names in cls._parts
        )
        assert isinstance(router, RouterConfig) and isinstance(engine, EngineConfig)
        assert isinstance(size, ClusterSize)
        return cls(size=size, router=router, engine=engine)

    @classmethod
    def with_shadows(
        cls, engine: EngineConfig, shadows: int, environ: Mapping[str, str] | None = None
    ) -> Self:
        """Return one worker with ``shadows`` engines behind it, from the options of ``segue serve``.

        What clients notice of the engine's options, such as the port, becomes the router's.

        Raises:
            ConfigError: an option cannot be used together with ``--shadows``.
        """
        defaults = {each.name: each.default for each in fields(EngineConfig)}
        for name in sorted(_CHOSEN & defaults.keys()):
            if (value := getattr(engine, name)) != defaults[name]:
                raise ConfigError(
                    f"{name}={value!r}: with --shadows, Segue chooses this option of each engine; leave "
                    f"{spelling(name)} out, or start each engine with --shadow-mode by hand",
                    param=name,
                )
        shared = {name: getattr(engine, name) for name in (_ROUTER & defaults.keys())}
        given = os.environ if environ is None else environ
        routing = {key: given[key] for name in _ROUTER - defaults.keys() if (key := variable(name)) in given}
        own: dict[str, Any] = {name: defaults[name] for name in _ROUTER & defaults.keys() - _ALIKE}
        return cls(
            size=ClusterSize(workers=1, shadows=shadows),
            router=RouterConfig.create(routing, **shared),
            engine=replace(engine, **own),
        )
