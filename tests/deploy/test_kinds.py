"""The manifests of single engines, groups, KServe and the Prometheus Operator.

Kubernetes' own kinds are checked against its published schemas, and all others against those
in `deploy/schemas`. Rules that a schema cannot say, such as those in CEL, are not checked.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator
from functools import cache
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from scripts.crd_schema import json_schema
from segue.config import EngineConfig
from segue.failover.pod import HttpGet, ProbeKind, read_pod
from segue.router.app import create_router_app
from segue.router.config import RouterConfig
from segue.server import system_app
from segue.server.app import create_app
from tests.deploy.test_manifests import FOLDER, VERSIONS
from tests.deploy.test_manifests import documents as failover

DEPLOY = FOLDER.parent
SCHEMAS = DEPLOY / "schemas"
FOLDERS = ("engine", "kserve", "leaderworkerset", "prometheus")
OWN_KINDS = {"apps/v1", "policy/v1", "v1"}  # of Kubernetes itself
SET_BY_OTHERS = {"LWS_LEADER_ADDRESS": "segue-group-0.segue-group.default"}  # of LeaderWorkerSet


@cache
def _read() -> str:
    found = [
        each
        for folder in FOLDERS
        for file in sorted((DEPLOY / folder).glob("*.yaml"))
        for each in yaml.safe_load_all(file.read_text())
    ]
    return json.dumps(found)


def documents() -> dict[str, dict[str, Any]]:
    """Every object, by its kind and name."""
    return {f"{each['kind']}/{each['metadata']['name']}": each for each in json.loads(_read())}


def schema_of(document: dict[str, Any]) -> dict[str, Any]:
    version = document["apiVersion"].split("/")[1]
    found: dict[str, Any] = json.loads((SCHEMAS / f"{document['kind'].lower()}-{version}.json").read_text())
    return found


def pod_templates() -> dict[str, dict[str, Any]]:
    """The templates of pods, by the object and, if it has several, the part of it."""
    found = documents()
    group = found["LeaderWorkerSet/segue-group"]["spec"]["leaderWorkerTemplate"]
    return {
        "engine": found["Deployment/segue-engine"]["spec"]["template"],
        "leader": group["leaderTemplate"],
        "worker": group["workerTemplate"],
        "kserve": {"spec": found["ServingRuntime/segue"]["spec"]},
    }


def containers() -> Iterator[tuple[str, dict[str, Any]]]:
    for name, template in pod_templates().items():
        for container in template["spec"]["containers"]:
            yield name, container


def arguments(container: dict[str, Any]) -> tuple[list[str], dict[str, str]]:
    """A container's words and variables, as it would get them."""
    environ = {each["name"]: each.get("value", "10.0.0.7") for each in container["env"]} | SET_BY_OTHERS
    words = [re.sub(r"\$\((\w+)\)", lambda found: environ[found[1]], word) for word in container["args"]]
    return [word.replace("{{.Name}}", "qwen3") for word in words], environ


@pytest.mark.parametrize(
    "name", [name for name, each in documents().items() if each["apiVersion"] in OWN_KINDS]
)
@pytest.mark.parametrize("version", VERSIONS)
def test_each_object_of_kubernetes_is_valid(name: str, version: str) -> None:
    assert kubernetes_validate.validate(documents()[name], version, strict=True) == version


@pytest.mark.parametrize(
    "name", [name for name, each in documents().items() if each["apiVersion"] not in OWN_KINDS]
)
def test_each_other_object_is_valid_and_a_wrong_field_would_be_found(name: str) -> None:
    document = documents()[name]
    validator = jsonschema.Draft202012Validator(schema_of(document))
    validator.check_schema(validator.schema)
    assert [error.message for error in validator.iter_errors(document)] == []
    for where, path in enumerate(_objects(document["spec"])):
        wrong = copy.deepcopy(document)
        part = wrong["spec"]
        for key in path:
            part = part[key]
        part["notAField"] = 1
        assert not validator.is_valid(wrong), (where, path)


def _objects(part: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The ways to all objects that have fixed fields."""
    if isinstance(part, dict):
        if path[-1:] not in {("labels",), ("matchLabels",), ("requests",), ("limits",), ("metadata",)}:
            yield path
            for key, value in part.items():
                yield from _objects(value, (*path, key))
    elif isinstance(part, list):
        for index, value in enumerate(part):
            yield from _objects(value, (*path, index))


@pytest.mark.parametrize("name", ["leader", "worker"])
def test_the_pods_of_a_group_are_pods_of_kubernetes(name: str) -> None:
    """The schema of LeaderWorkerSet is of another version of Kubernetes."""
    template = pod_templates()[name]
    deployment = {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": "segue"},
        "spec": {"selector": {"matchLabels": template["metadata"]["labels"]}, "template": template},
    }
    for version in VERSIONS:
        kubernetes_validate.validate(deployment, version, strict=True)


@cache
def routes_of(kind: str) -> set[str]:
    """The paths that a server has: that of `serve`, of `router`, or of the system port."""
    if kind == "system":
        return {route.path for route in (*system_app.probes, *system_app.scraped)}
    app = create_app(EngineConfig()) if kind == "serve" else create_router_app(RouterConfig())
    return {str(getattr(route, "path", "")) for route in app.routes}


@pytest.mark.parametrize("name", pod_templates())
def test_probes_ask_routes_at_ports_that_the_container_listens_on(name: str) -> None:
    (container,) = pod_templates()[name]["spec"]["containers"]
    words, _ = arguments(container)
    (read,) = read_pod(json.dumps({"kind": "Pod", "spec": {"containers": [container]}})).values()
    options = dict(word.removeprefix("--").split("=", 1) for word in words[1:])
    assert options["host"] == "0.0.0.0", "the kubelet asks the pod's address"
    assert {str(number) for number in read.ports.values()} == {
        options[each] for each in ("port", "system-port") if each in options
    }
    assert read.probes.keys() >= {ProbeKind.LIVENESS, ProbeKind.READINESS}
    for probe in read.probes.values():
        assert isinstance(probe.action, HttpGet)
        number = read.ports.get(str(probe.action.port), probe.action.port)
        assert number in read.ports.values()
        is_system = str(number) == options.get("system-port")
        assert probe.action.path in routes_of("system" if is_system else words[0])


def test_a_pod_may_take_as_long_to_end_as_its_requests() -> None:
    templates = pod_templates()
    service = documents()["InferenceService/qwen3"]["spec"]["predictor"]
    graces = {name: each["spec"].get("terminationGracePeriodSeconds") for name, each in templates.items()}
    graces["kserve"] = service["terminationGracePeriodSeconds"]
    for name, container in containers():
        pause = container.get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0)
        assert graces[name] > EngineConfig().drain_s + 2 + pause


def test_services_and_budgets_select_pods_and_lead_to_their_ports() -> None:
    found, templates = documents(), pod_templates()
    for name, template in (("segue-engine", templates["engine"]), ("segue-group", templates["leader"])):
        service, labels = found[f"Service/{name}"], template["metadata"]["labels"]
        assert service["spec"]["selector"].items() <= labels.items()
        ports = {port["name"] for port in template["spec"]["containers"][0]["ports"]}
        assert service["spec"]["ports"][0]["targetPort"] in ports
    assert not (
        found["Service/segue-group"]["spec"]["selector"].items()
        <= templates["worker"]["metadata"]["labels"].items()
    ), "clients use the router"
    engine = found["Deployment/segue-engine"]["spec"]
    assert engine["selector"]["matchLabels"] == templates["engine"]["metadata"]["labels"]
    budget = found["PodDisruptionBudget/segue-engine"]["spec"]
    assert budget["selector"] == engine["selector"]


def test_monitors_select_services_and_scrape_routes_of_their_components() -> None:
    found = documents()
    services = [found["Service/segue-engine"], found["Service/segue-group"], failover()["Service"]]
    kinds = {"engine": "serve", "router": "router"}
    seen = []
    for name in ("segue-engines", "segue-routers"):
        spec = found[f"ServiceMonitor/{name}"]["spec"]
        labels = spec["selector"]["matchLabels"]
        selected = [each for each in services if labels.items() <= each["metadata"]["labels"].items()]
        seen += selected
        for endpoint in spec["endpoints"]:
            assert endpoint["path"] in routes_of(kinds[labels["app.kubernetes.io/component"]])
            assert endpoint["authorization"]["credentials"] == {"name": "segue", "key": "api-key"}
            for service in selected:
                assert endpoint["port"] in {port["name"] for port in service["spec"]["ports"]}
    assert sorted(each["metadata"]["name"] for each in seen) == ["segue", "segue-engine", "segue-group"]


def test_the_engines_of_a_group_register_at_its_router() -> None:
    (router,), (engine,) = (pod_templates()[each]["spec"]["containers"] for each in ("leader", "worker"))
    assert (
        "--register=http://$(LWS_LEADER_ADDRESS):8000" in engine["args"] and "--port=8000" in router["args"]
    )
    keys = {
        container["name"]: {
            each["name"]: each["valueFrom"]["secretKeyRef"]["key"]
            for each in container["env"]
            if "secretKeyRef" in each.get("valueFrom", {})
        }
        for container in (router, engine)
    }
    assert keys == {
        "router": {
            "SEGUE_API_KEY": "api-key",
            "SEGUE_ADMIN_API_KEY": "admin-api-key",
            "SEGUE_WORKER_API_KEY": "api-key",
            "SEGUE_WORKER_ADMIN_KEY": "admin-api-key",
        },
        "engine": {
            "SEGUE_API_KEY": "api-key",
            "SEGUE_ADMIN_API_KEY": "admin-api-key",
            "SEGUE_REGISTER_KEY": "admin-api-key",
        },
    }


def test_the_service_of_kserve_names_the_runtime_and_a_format_of_it() -> None:
    model = documents()["InferenceService/qwen3"]["spec"]["predictor"]["model"]
    runtime = documents()[f"ServingRuntime/{model['runtime']}"]["spec"]
    assert model["modelFormat"]["name"] in {each["name"] for each in runtime["supportedModelFormats"]}
    assert runtime["containers"][0]["name"] == "kserve-container"
    assert len(runtime["containers"][0]["ports"]) == 1, "a Knative service has one"


def test_each_schema_says_where_it_is_from() -> None:
    table = (SCHEMAS / "README.md").read_text()
    for file in SCHEMAS.glob("*.json"):
        schema = json.loads(file.read_text())
        source = re.search(r"https://github.com/[\w.-]+/[\w.-]+/blob/(v[\d.]+)/\S+\.yaml", schema["$comment"])
        assert source and "Apache License 2.0" in schema["$comment"]
        assert f"| `{file.name}` |" in table and source[1] in table and f"({source[0]})" in table


def test_a_schema_is_made_of_the_stored_version_and_closed() -> None:
    part = {
        "type": "object",
        "description": "gone",
        "properties": {"name": {"type": "string", "maxLength": 63}},
    }
    port = {"x-kubernetes-int-or-string": True}
    spec = {
        "type": "object",
        "properties": {"a": part, "b": part, "port": port, "c": part | {"nullable": True}},
    }
    fields = {"metadata": {"type": "object"}, "spec": spec, "status": part}
    whole = {"type": "object", "properties": fields}
    versions = [
        {"name": "v1", "storage": True, "schema": {"openAPIV3Schema": whole}},
        {"name": "v0", "storage": False},
    ]
    names = {"kind": "Thing"}
    name, schema = json_schema({"spec": {"group": "g", "names": names, "versions": versions}}, "a source")
    assert name == "thing-v1.json" and "description" not in json.dumps(schema)
    validator = jsonschema.Draft202012Validator(schema)
    thing = {"apiVersion": "g/v1", "kind": "Thing", "metadata": {}}
    good = {"a": {"name": "x"}, "b": {"name": "y"}, "c": None, "port": "http"}
    assert validator.is_valid(thing | {"spec": good})
    for wrong in ({"a": {"nam": "x"}}, {"b": {"name": "x" * 64}}, {"a": None}, {"port": 1.5}, {"d": 1}):
        assert not validator.is_valid(thing | {"spec": wrong}), wrong
    assert not validator.is_valid(thing | {"status": {}})
