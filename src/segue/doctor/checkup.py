"""The check-up of an installation: all sections, in the order in which a start would fail."""

from __future__ import annotations

from collections.abc import Iterator

from segue.config import EngineConfig
from segue.doctor.findings import START, Checkup, Finding, Section
from segue.doctor.kernel import describe_kernel
from segue.doctor.machine import DriverGpu, describe_gpus, describe_machine, driver_gpus
from segue.doctor.places import describe_compiler, describe_places
from segue.doctor.versions import describe_extras, describe_versions
from segue.errors import SegueError


def check_up(config: EngineConfig) -> Checkup:
    """Look at everything that `segue serve` needs with `config`; no model is loaded, and nothing is fetched.

    Only the small files of a model of the hub are, where `--model` names one.
    """
    gpus = driver_gpus()
    versions = describe_versions()
    is_complete = not any(finding.status == "failed" for finding in versions)
    choices, compiler = _choices(config) if is_complete else ([_NOT_CHOSEN], [])
    return Checkup.of(
        [
            Section(title="Versions", findings=versions),
            Section(title="Optional packages", findings=describe_extras(config)),
            Section(
                title="Devices",
                findings=[*describe_machine(), *describe_gpus(gpus), *(_unseen(gpus) if is_complete else [])],
            ),
            Section(title="What an engine would choose", findings=choices),
            Section(title="Ports and directories", findings=[*describe_places(config), *compiler]),
            Section(title="Kernel", findings=describe_kernel()),
        ]
    )


_NOT_CHOSEN = Finding(name="choices", value="unknown", why="a package that the engine needs is missing")


def _choices(config: EngineConfig) -> tuple[list[Finding], list[Finding]]:
    """Return the findings about what is chosen, and about the compiler that the chosen device needs."""
    from segue.doctor.chosen import describe_choices

    try:
        chosen = describe_choices(config)
    except SegueError as error:
        return [Finding(name=START, value=error.message, status="failed")], []
    except RuntimeError as error:  # torch's, for a GPU that does not start
        text = f"torch cannot use the GPU ({str(error).splitlines()[0]})"
        remedy = "check the driver by nvidia-smi, or use --device cpu"
        return [Finding(name=START, value=text, status="failed", remedy=remedy)], []
    return chosen.findings, list(describe_compiler(chosen.device))


def _unseen(gpus: list[DriverGpu]) -> Iterator[Finding]:
    """Yield a finding if the machine has a GPU that torch does not see: an engine would take the CPU."""
    import torch

    if not gpus or torch.cuda.is_available():
        return
    if torch.version.cuda is None:
        why, remedy = "this torch is built for CPUs", "install a build of torch for CUDA"
    else:
        why = f"this torch is built for CUDA {torch.version.cuda}, the driver is {gpus[0].driver}"
        remedy = "install a newer driver or another build of torch; check CUDA_VISIBLE_DEVICES"
    yield Finding(name="torch and GPU", value="torch sees none", status="missing", why=why, remedy=remedy)
