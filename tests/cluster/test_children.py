"""The command lines and environments of a cluster's processes."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from segue.cli.flags import with_options
from segue.cluster.children import ClusterHost, flags_of, make_children
from segue.cluster.config import ClusterConfig
from segue.cluster.processes import ChildSpec
from segue.config import EngineConfig
from segue.failover.pod import bundled_manifest, read_pod
from segue.router.config import RouterConfig

PORTS = [41001, 41002, 41003, 41004]
SYSTEM_PORTS = [42001, 42002, 42003, 42004]


def children(
    environ: dict[str, str] | None = None,
    gpus: str = "",
    *,
    router_url: str = "http://127.0.0.1:40000",
    **options: Any,
) -> dict[str, ChildSpec]:
    given = environ or {}
    config = ClusterConfig.create(given, **options)
    host = ClusterHost(
        environ=given,
        gpus=list(gpus),
        num_cores=8,
        router_url=router_url,
        worker_ports=PORTS[: config.size.num_engines],
        system_ports=SYSTEM_PORTS[: config.size.num_engines] if config.size.shadows else [],
        failover_dir="/run/failover",
        gms_dir="/run/gms",
    )
    return {each.name: each for each in make_children(config, host, ["segue"])}


def words(spec: ChildSpec, number: int = 1) -> dict[str, str]:
    """The flags of a command line, with their values."""
    flags = dict(word.partition("=")[::2] for word in spec.command[number + 1 :])
    assert all(flag.startswith("--") for flag in flags)
    return flags


def test_each_worker_has_a_name_a_role_and_a_port() -> None:
    found = children(workers=1, prefill=1, decode=2)
    assert list(found) == ["worker-0", "prefill-0", "decode-0", "decode-1", "router"]
    assert [words(found[name]).get("--role") for name in found] == [None, "prefill", "decode", "decode", None]
    assert [words(found[name])["--port"] for name in found] == [*map(str, PORTS), "40000"]
    assert [each.role for each in found.values()] == [
        "worker", "prefill worker", "decode worker", "decode worker", "router"
    ]  # fmt: skip
    assert [each.command[1] for each in found.values()] == ["serve"] * 4 + ["router"]


def test_no_child_reads_the_file_of_options_again() -> None:
    found = children({"SEGUE_CONFIG": "/etc/segue.toml", "PATH": "/bin"}, workers=1, shadows=1)
    assert {each.environment.get("PATH") for each in found.values()} == {"/bin"}
    assert not any(each.environment.get("SEGUE_CONFIG") for each in found.values())


def test_the_router_ends_before_the_workers_and_is_ready_after_them() -> None:
    found = children(workers=2)
    assert found["router"].stage > found["worker-0"].stage == found["worker-1"].stage
    assert found["router"].probe.min_serving == 2 and found["worker-1"].probe.min_serving == 0
    assert found["worker-1"].probe.url == f"http://127.0.0.1:{PORTS[1]}/ready"
    assert words(found["router"])["--worker"] == ",".join(f"http://127.0.0.1:{port}" for port in PORTS[:2])


def test_the_workers_share_a_key_that_is_drawn_anew_and_on_no_command_line() -> None:
    first, second = (children(workers=2, api_key="users", admin_api_key="admins") for _ in range(2))
    key = first["worker-0"].environment["SEGUE_API_KEY"]
    assert len(key) >= 32 and key != second["worker-0"].environment["SEGUE_API_KEY"]
    assert key == first["worker-1"].environment["SEGUE_API_KEY"]
    router = first["router"].environment
    assert router["SEGUE_WORKER_API_KEY"] == key
    assert (router["SEGUE_API_KEY"], router["SEGUE_ADMIN_API_KEY"]) == ("users", "admins")
    assert "SEGUE_ADMIN_API_KEY" not in first["worker-0"].environment
    for spec in first.values():
        assert not {key, "users", "admins"} & {part for word in spec.command for part in word.split("=")}


def test_who_calls_the_workers_directly_may_give_their_key() -> None:
    found = children({"SEGUE_WORKER_API_KEY": "trainers"}, prefill=1, decode=1, shadows=1)
    engines = [each.environment["SEGUE_API_KEY"] for name, each in found.items() if name[:2] in ("pr", "de")]
    assert engines == ["trainers"] * 4
    assert found["router"].environment["SEGUE_WORKER_API_KEY"] == "trainers"
    assert "SEGUE_API_KEY" not in found["router"].environment


def test_kv_is_handed_over_with_a_key() -> None:
    found = children(prefill=1, decode=1)
    key = found["prefill-0"].environment["SEGUE_PD_KEY"]
    assert len(key) >= 32 and key == found["decode-0"].environment["SEGUE_PD_KEY"]
    assert "SEGUE_PD_KEY" not in found["router"].environment
    assert children(prefill=1, decode=1, pd_key="mine")["decode-0"].environment["SEGUE_PD_KEY"] == "mine"
    assert words(found["prefill-0"])["--disaggregation-bootstrap-port"] == "0"


@pytest.mark.parametrize(
    ("gpus", "chosen", "kind"),
    [("", {}, "shm"), ("abcd", {}, "cuda_ipc"), ("", {"pd_transport": "nixl"}, "nixl")],
)
def test_workers_that_hand_kv_over_open_no_ports_to_other_hosts_unless_told(
    gpus: str, chosen: dict[str, Any], kind: str
) -> None:
    found = children(gpus=gpus, workers=1, prefill=1, decode=1, **chosen)
    assert {words(found[name])["--pd-transport"] for name in ("prefill-0", "decode-0")} == {kind}
    assert words(found["worker-0"]).get("--pd-transport") == chosen.get("pd_transport")


def test_children_get_options_by_their_command_lines_alone() -> None:
    environ = {"SEGUE_PREFILL": "1", "SEGUE_DECODE": "1", "SEGUE_TP": "2", "SEGUE_PORT": "7", "HOME": "/h"}
    environ |= {"SEGUE_DISAGGREGATION_MODE": "decode", "SEGUE_WORKER": "http://a:1"}
    for spec in children(environ, tp=1).values():
        mine = {name for name in spec.environment if name.startswith("SEGUE_")}
        assert mine <= {"SEGUE_API_KEY", "SEGUE_WORKER_API_KEY", "SEGUE_PD_KEY"}
        assert spec.environment["HOME"] == "/h" and "--tp" not in words(spec)


def test_the_router_gets_its_number_of_processes() -> None:
    router = children(processes=3, workers=1)["router"]
    assert words(router)["--processes"] == "3"


def test_the_router_alone_speaks_tls_and_is_probed_so() -> None:
    tls = {"ssl_certfile": "/c.pem", "ssl_keyfile": "/k.pem", "ssl_keyfile_password": "secret"}
    found = children(workers=1, shadows=1, root_path="/p", router_url="https://127.0.0.1:40000", **tls)
    router = words(found["router"])
    assert (router["--ssl-certfile"], router["--ssl-keyfile"], router["--root-path"]) == (
        "/c.pem",
        "/k.pem",
        "/p",
    )
    assert "secret" not in str(found["router"].command)
    assert found["router"].environment["SEGUE_SSL_KEYFILE_PASSWORD"] == "secret"
    health = found["router"].health
    assert health is not None and {probe.action.scheme for probe in health.probes.values()} == {"HTTPS"}  # type: ignore[union-attr]
    for name in ("engine-a", "engine-b"):
        assert not {"--ssl-certfile", "--ssl-keyfile", "--root-path"} & words(found[name]).keys()
        assert "SEGUE_SSL_KEYFILE_PASSWORD" not in found[name].environment
        health = found[name].health
        assert health is not None and {probe.action.scheme for probe in health.probes.values()} == {"HTTP"}  # type: ignore[union-attr]


def test_every_child_writes_the_log_in_the_same_form() -> None:
    found = children(workers=1, shadows=1, log_format="json")
    for name in ("engine-a", "router"):
        assert words(found[name])["--log-format"] == "json"
    for name in ("gms", "gms-holder"):
        assert found[name].environment["SEGUE_LOG_FORMAT"] == "json"


def test_flags_make_the_same_options_again() -> None:
    app, found = typer.Typer(), []

    @app.command()
    @with_options(EngineConfig)
    def go(config: EngineConfig) -> None:
        found.append(config)

    config = EngineConfig(
        model="-m", tp=2, deterministic=True, role="decode", batch_prefill_batch_sizes="1,2"
    )
    assert CliRunner().invoke(app, flags_of(config)).exit_code == 0
    assert found == [config]
    assert flags_of(EngineConfig()) == flags_of(RouterConfig()) == []


@pytest.mark.parametrize("options_class", [EngineConfig, RouterConfig])
def test_no_switch_is_on_by_default(options_class: type[EngineConfig | RouterConfig]) -> None:
    # A flag that has no value can only turn a switch on.
    assert [each.name for each in fields(options_class) if each.default is True] == []


def test_workers_on_the_cpu_share_cores_and_memory() -> None:
    found = children(workers=2, memory_ratio=0.6, tp=2)
    for name in ("worker-0", "worker-1"):
        assert found[name].environment["OMP_NUM_THREADS"] == "2"
        assert words(found[name])["--memory-ratio"] == "0.3"
        assert "CUDA_VISIBLE_DEVICES" not in found[name].environment
    assert "OMP_NUM_THREADS" not in found["router"].environment


def test_the_users_number_of_threads_stays() -> None:
    assert children({"OMP_NUM_THREADS": "3"}, workers=2)["worker-1"].environment["OMP_NUM_THREADS"] == "3"


@pytest.mark.parametrize(
    ("sizes", "visible"),
    [({"workers": 2}, ["a,b", "c,d"]), ({"prefill": 1, "decode": 1}, ["a,b,c,d", "c,d,a,b"])],
)
def test_workers_on_gpus_see_their_own_first_and_those_they_copy_to(
    sizes: dict[str, int], visible: list[str]
) -> None:
    found = list(children(None, "abcde", tp=2, memory_ratio=0.6, **sizes).values())[:2]
    assert [each.environment["CUDA_VISIBLE_DEVICES"] for each in found] == visible
    assert words(found[0])["--memory-ratio"] == "0.6"


def test_with_shadows_engines_differ_in_name_and_ports_alone() -> None:
    found = children(workers=1, shadows=1)
    assert list(found) == ["gms-holder", "gms", "engine-a", "engine-b", "router"]
    a, b = words(found["engine-a"]), words(found["engine-b"])
    own = {"--engine-id", "--port", "--system-port"}
    assert {name for name in a if a[name] != b[name]} == own and a.keys() == b.keys()
    assert (a["--cohort"], a["--failover-dir"]) == ("worker-0", "/run/failover")
    assert "--discovery" not in a, "files are the default"
    assert "--shadow-mode" in a and found["engine-a"].environment == found["engine-b"].environment
    assert found["engine-a"].probe.url == "http://127.0.0.1:42001/startup"
    router = words(found["router"])
    assert (router["--discovery"], router["--discovery-target"]) == ("file", "/run/failover")
    assert "--worker" not in router and found["router"].probe.min_serving == 1


def test_with_shadows_children_have_the_probes_of_the_manifest() -> None:
    found = children(workers=1, shadows=1)
    pod = read_pod(bundled_manifest())
    for name, index in (("engine-a", 0), ("engine-b", 1)):
        health = found[name].health
        assert health is not None and health.probes == pod[name].probes
        assert health.ports == {"api": PORTS[index], "system": SYSTEM_PORTS[index]}
    health = found["router"].health
    assert health is not None and health.probes == pod["router"].probes and health.ports == {"http": 40000}
    assert all(child.health is None for child in children(workers=2).values())
    pauses = {name: child.restart_after_s for name, child in found.items()}
    assert pauses == {"gms-holder": 0.0, "gms": 0.0, "engine-a": 3.0, "engine-b": 3.0, "router": 0.0}


def test_the_router_is_probed_where_it_listens() -> None:
    found = children(workers=1, shadows=1, host="::1", router_url="http://[::1]:40000")
    health = found["router"].health
    assert health is not None and (health.host, health.ports) == ("::1", {"http": 40000})
    for name in ("engine-a", "engine-b"):
        health = found[name].health
        assert health is not None and health.host == "127.0.0.1"


def test_each_worker_of_a_cluster_is_a_cohort_with_its_own_shadows() -> None:
    found = children(prefill=1, decode=1, shadows=1)
    engines = ["prefill-0-a", "prefill-0-b", "decode-0-a", "decode-0-b"]
    assert list(found) == ["gms-holder", "gms", *engines, "router"]
    assert {words(found[name])["--gms-dir"] for name in engines} == {"/run/gms"}, "one copy for all of them"
    cohorts = {name: words(found[name]).get("--cohort") for name in engines}
    assert cohorts["prefill-0-a"] == cohorts["prefill-0-b"] == "prefill-0"
    assert cohorts["decode-0-a"] == "decode-0"
    assert words(found["decode-0-b"])["--role"] == "decode"
    assert found["router"].probe.min_serving == 2, "two of the four engines serve"


def test_shadows_share_their_workers_gpus_and_cores() -> None:
    found = children(workers=2, shadows=1, gpus="01", device="cuda")
    gpus = [
        found[f"worker-{name}"].environment["CUDA_VISIBLE_DEVICES"] for name in ("0-a", "0-b", "1-a", "1-b")
    ]
    assert gpus == ["0", "0", "1", "1"]
    assert found["worker-0-a"].environment["OMP_NUM_THREADS"] == "4", "a parked engine needs no core"


@pytest.mark.parametrize(("gpus", "devices"), [("", "cpu"), ("01", "all")])
def test_shadows_share_weights_that_a_service_of_their_own_keeps(gpus: str, devices: str) -> None:
    found = children(workers=1, shadows=2, memory_ratio=0.6, gms_token="secret", gpus=gpus)
    for name in ("engine-a", "engine-b", "engine-c"):
        given = words(found[name])
        assert (given["--gms-dir"], given["--num-shadows"]) == ("/run/gms", "2")
        assert given["--memory-ratio"] == "0.6", "which is for all three of them"
    service, holder = found["gms"], found["gms-holder"]
    assert service.command[-2:] == ("serve", f"--devices={devices}") and holder.command[-1] == "hold"
    for child in (service, holder):
        assert child.environment["SEGUE_GMS_DIR"] == "/run/gms"
        assert child.environment["SEGUE_GMS_TOKEN"] == "secret"
        assert child.stage < found["engine-a"].stage, "engines end first"


@pytest.mark.parametrize(
    ("options", "directory"),
    [({"gms_mode": "off"}, None), ({"enable_memory_saver": True}, None), ({"gms_dir": "/mine"}, "/mine")],
)
def test_no_service_is_started_for_engines_that_cannot_or_shall_not_use_it(
    options: dict[str, Any], directory: str | None
) -> None:
    found = children(workers=1, shadows=1, **options)
    assert "gms" not in found and "gms-holder" not in found
    assert words(found["engine-a"]).get("--gms-dir") == directory
    assert "gms" not in children(workers=1), "without shadows nobody shares"


@pytest.mark.parametrize(
    ("options", "root"),
    [
        ({}, None),
        ({"host": "0.0.0.0"}, "/dev/null"),
        ({"host": "0.0.0.0", "api_key": "k"}, "/dev/null"),
        ({"host": "0.0.0.0", "admin_api_key": "k"}, None),
        ({"host": "0.0.0.0", "weights_root": "/models"}, "/models"),
    ],
)
def test_what_clients_may_have_an_engine_read_depends_on_the_routers_address(
    options: dict[str, str], root: str | None
) -> None:
    found = children(workers=1, **options)
    assert words(found["worker-0"]).get("--weights-root") == root
