"""The optional packages of Segue: what each is for, whether it is here, and the command that installs it."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec


@dataclass(frozen=True, slots=True, kw_only=True)
class Extra:
    """One optional package, by the name of its extra in ``pip install 'segue[NAME]'``."""

    name: str
    modules: tuple[str, ...]  # any of them will do
    purpose: str

    @property
    def is_installed(self) -> bool:
        """Whether one of the modules can be found. It is not imported, which may fail or take seconds."""
        return any(map(_is_found, self.modules))

    @property
    def remedy(self) -> str:
        """The command that installs it, into the environment of this process."""
        return f"{installer()} install 'segue[{self.name}]'"


def _is_found(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # the package that the module is in is missing
        return False


def installer() -> str:
    """Return what installs packages into this environment: those that uv has made have no pip."""
    return "uv pip" if find_spec("pip") is None else "pip"


FA3 = Extra(
    name="fa3",
    modules=("flash_attn_3",),
    purpose="--attention-backend fa3: faster prefill of long prompts on Hopper GPUs",
)
FLASHINFER = Extra(
    name="flashinfer",
    modules=("flashinfer",),
    purpose="--attention-backend flashinfer: FlashInfer's kernels, which nvcc compiles at the start",
)
NIXL = Extra(
    name="nixl",
    modules=("nixl_cu13", "nixl_cu12"),
    purpose="--pd-transport nixl: hands KV over to engines on other hosts",
)
ETCD = Extra(name="etcd", modules=("etcd3gw",), purpose="--discovery etcd")
KUBERNETES = Extra(name="kubernetes", modules=("kubernetes_asyncio",), purpose="--discovery kubernetes")
OTEL = Extra(
    name="otel",
    modules=("opentelemetry.exporter.otlp.proto.http",),
    purpose="--otlp-traces-endpoint: spans of requests and of weight updates",
)
RAY = Extra(name="ray", modules=("ray",), purpose="segue.integrations.ray: engines as actors of Ray")
EXTRAS = {extra.name: extra for extra in (FA3, FLASHINFER, NIXL, ETCD, KUBERNETES, OTEL, RAY)}
