"""The Kubernetes manifests: against the published schemas, and against what Segue itself promises."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

FOLDER = Path(__file__).resolve().parents[2] / "deploy" / "kubernetes"
VERSIONS = (
    "1.34",
    "1.37",
)  # the first with claims of resource.k8s.io/v1, and the newest whose schemas we have


def documents() -> dict[str, dict[str, Any]]:
    """Every object of the manifests, by kind."""
    found = [each for file in sorted(FOLDER.glob("*.yaml")) for each in yaml.safe_load_all(file.read_text())]
    assert len({each["kind"] for each in found}) == len(found)
    return {each["kind"]: each for each in found}


def pod() -> dict[str, Any]:
    spec: dict[str, Any] = documents()["Deployment"]["spec"]["template"]["spec"]
    return spec


def containers() -> dict[str, dict[str, Any]]:
    return {each["name"]: each for each in (*pod()["initContainers"], *pod()["containers"])}


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("kind", documents())
def test_each_object_is_valid(kind: str, version: str) -> None:
    assert kubernetes_validate.validate(documents()[kind], version, strict=True) == version


def test_a_wrong_field_would_be_found() -> None:
    document = documents()["Deployment"]
    document["spec"]["template"]["spec"]["containers"][0]["startupProb"] = {}
    with pytest.raises(kubernetes_validate.ValidationError, match="startupProb"):
        kubernetes_validate.validate(document, VERSIONS[0], strict=True)


def test_the_parts_fit_each_other() -> None:
    found = documents()
    assert found.keys() == {
        *("Deployment", "ResourceClaimTemplate", "Role", "RoleBinding", "Service", "ServiceAccount")
    }
    assert pod()["resourceClaims"] == [
        {"name": "gpu", "resourceClaimTemplateName": found["ResourceClaimTemplate"]["metadata"]["name"]}
    ]
    assert pod()["serviceAccountName"] == found["ServiceAccount"]["metadata"]["name"]
    assert found["RoleBinding"]["roleRef"]["name"] == found["Role"]["metadata"]["name"]
    assert found["RoleBinding"]["subjects"][0]["name"] == found["ServiceAccount"]["metadata"]["name"]
    labels = found["Deployment"]["spec"]["template"]["metadata"]["labels"]
    assert found["Deployment"]["spec"]["selector"]["matchLabels"] == labels
    assert found["Service"]["spec"]["selector"] == labels
    assert found["Service"]["spec"]["ports"][0]["targetPort"] in {
        port["name"] for port in containers()["router"]["ports"]
    }
    assert any(each["key"] == "nvidia.com/gpu" for each in pod()["tolerations"])


def test_the_memory_service_is_a_sidecar_that_starts_before_the_engines() -> None:
    sidecars = pod()["initContainers"]
    assert [each["name"] for each in sidecars] == ["gms-holder", "gms"]
    assert all(each["restartPolicy"] == "Always" for each in sidecars)
    assert sidecars[1]["startupProbe"]["exec"]["command"][:3] == ["segue", "gms", "ready"]
    assert [each["name"] for each in pod()["containers"]] == ["router", "engine-a", "engine-b"]


def test_memory_and_engines_share_one_claim_one_user_and_one_folder_in_memory() -> None:
    for name, container in containers().items():
        claims = container["resources"].get("claims", [])
        assert (claims == [{"name": "gpu"}]) == (name in ("gms", "engine-a", "engine-b")), name
        mounts = {each["name"]: each["mountPath"] for each in container["volumeMounts"]}
        assert mounts["run"] == "/run/segue"
        assert "runAsUser" not in container["securityContext"], "one user for all"
        assert "memory" in container["resources"]["limits"], "the budget of each container is its own"
    assert pod()["securityContext"]["runAsUser"] > 0 and pod()["shareProcessNamespace"] is True
    volumes = {each["name"]: each for each in pod()["volumes"]}
    assert volumes["run"]["emptyDir"]["medium"] == "Memory" and "medium" not in volumes["cache"]["emptyDir"]


def test_engines_differ_in_their_names_and_ports_alone() -> None:
    a, b = containers()["engine-a"], containers()["engine-b"]
    own = ("--engine-id=", "--port=", "--system-port=")
    assert len(a["args"]) == len(b["args"])
    for mine, other in zip(a["args"], b["args"], strict=True):
        assert mine == other or any(mine.startswith(each) and other.startswith(each) for each in own)
    ports = [port["containerPort"] for each in (a, b) for port in each["ports"]]
    assert len(set(ports)) == len(ports)
    for each in (a, b):
        by_name = {port["name"]: port["containerPort"] for port in each["ports"]}
        assert f"--port={by_name['api']}" in each["args"]
        assert f"--system-port={by_name['system']}" in each["args"]
    for left_out in ("name", "args", "ports"):
        del a[left_out], b[left_out]
    assert a == b and "readinessProbe" not in a


def test_the_calls_of_the_system_ports_need_the_admin_key_of_the_secret() -> None:
    secret = {"secretKeyRef": {"name": "segue", "key": "admin-api-key", "optional": True}}
    names = {
        "router": "SEGUE_WORKER_ADMIN_KEY",
        "engine-a": "SEGUE_ADMIN_API_KEY",
        "engine-b": "SEGUE_ADMIN_API_KEY",
    }
    for container, name in names.items():
        values = {each["name"]: each for each in containers()[container]["env"]}
        assert values[name].get("valueFrom") == secret


def test_the_role_allows_what_discovery_does_and_no_more() -> None:
    (rule,) = documents()["Role"]["rules"]
    assert (rule["apiGroups"], rule["resources"]) == (["coordination.k8s.io"], ["leases"])
    assert sorted(rule["verbs"]) == ["create", "delete", "get", "list", "update", "watch"]


def test_the_package_has_the_manifest_too() -> None:
    assert (files("segue.failover") / "failover-pod.yaml").read_text() == (
        FOLDER / "failover-pod.yaml"
    ).read_text()
