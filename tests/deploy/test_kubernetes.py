"""The manifests: valid for Kubernetes, and their commands are ones that Atoll takes."""

from __future__ import annotations

import copy
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from atoll.config import parse_spec
from atoll.net.endpoint import parse_ticket
from tests.deploy.commands import refusal
from tests.patience import PATIENCE_S

FOLDER = Path(__file__).resolve().parents[2] / "deploy" / "kubernetes"
FILES = sorted(path.name for path in FOLDER.glob("*.yaml") if path.name != "kustomization.yaml")


def documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((FOLDER / name).read_text()))


def everything() -> dict[str, dict[str, Any]]:
    """Return all objects by kind and name."""
    found = [document for name in FILES for document in documents(name)]
    return {f"{item['kind']}/{item['metadata']['name']}": item for item in found}


def check(document: dict[str, Any]) -> None:
    kubernetes_validate.validate(document, kubernetes_validate.latest_version(), strict=True)


def pods() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield every template of a pod."""
    for name, item in everything().items():
        template = item.get("spec", {}).get("template")
        if template is not None:
            yield name, template["spec"]


def containers() -> Iterator[tuple[str, dict[str, Any]]]:
    for name, pod in pods():
        for container in [*pod.get("initContainers", []), *pod["containers"]]:
            yield f"{name}/{container['name']}", container


@pytest.mark.parametrize("name", FILES)
def test_manifests_are_valid(name: str) -> None:
    for document in documents(name):
        check(document)


def test_broken_manifests_would_be_noticed() -> None:
    hub = everything()["StatefulSet/atoll-hub"]
    wrong = copy.deepcopy(hub)
    wrong["spec"]["replicas"] = "one"
    with pytest.raises(kubernetes_validate.ValidationError):
        check(wrong)
    wrong = copy.deepcopy(hub)
    wrong["spec"]["template"]["spec"]["containers"][0]["imagePolicy"] = "x"  # no such field
    with pytest.raises(kubernetes_validate.ValidationError):
        check(wrong)
    wrong = copy.deepcopy(hub)
    del wrong["spec"]["serviceName"], wrong["spec"]["selector"]
    with pytest.raises(kubernetes_validate.ValidationError):
        check(wrong)


def test_atoll_takes_every_command() -> None:
    found = {name: container["args"] for name, container in containers()}
    assert len(found) == 4
    assert {name: told for name, args in found.items() if (told := refusal(args))} == {}


def test_what_refers_to_something_refers_to_what_is_there() -> None:
    objects = everything()
    for name, pod in pods():
        item = objects[name]
        labels = item["spec"]["template"]["metadata"]["labels"]
        if "selector" in item["spec"]:
            assert item["spec"]["selector"]["matchLabels"].items() <= labels.items()
        claims = item["spec"].get("volumeClaimTemplates", [])
        volumes = {volume["name"] for volume in pod.get("volumes", [])}
        volumes |= {claim["metadata"]["name"] for claim in claims}
        for container in [*pod.get("initContainers", []), *pod["containers"]]:
            assert {mount["name"] for mount in container["volumeMounts"]} <= volumes
    hub = objects["StatefulSet/atoll-hub"]["spec"]
    service = objects[f"Service/{hub['serviceName']}"]["spec"]
    assert service["selector"].items() <= hub["template"]["metadata"]["labels"].items()
    (container,) = hub["template"]["spec"]["containers"]
    (port,) = container["ports"]
    assert port == {"name": service["ports"][0]["targetPort"], "containerPort": 7700}
    assert f"--advertise={hub['serviceName']}" in container["args"]
    target = objects["HorizontalPodAutoscaler/atoll-nodes"]["spec"]["scaleTargetRef"]
    assert f"{target['kind']}/{target['name']}" in objects
    assert "replicas" not in objects["Deployment/atoll-nodes"]["spec"]
    secrets = {
        volume["secret"]["secretName"] for _, pod in pods() for volume in pod["volumes"]
        if "secret" in volume
    }  # fmt: skip
    assert secrets == {"atoll-ticket", "atoll-operator"}
    assert list(objects["Secret/atoll-ticket"]["stringData"]) == ["ticket"]
    parse_ticket(objects["Secret/atoll-ticket"]["stringData"]["ticket"])


def test_pods_have_minimal_rights_and_time_to_leave() -> None:
    for name, pod in pods():
        assert pod["securityContext"]["runAsNonRoot"] is True, name
        assert pod["automountServiceAccountToken"] is False, name
    for name, container in containers():
        rights = container["securityContext"]
        assert rights["allowPrivilegeEscalation"] is False, name
        assert rights["capabilities"] == {"drop": ["ALL"]}, name
    nodes = everything()["Deployment/atoll-nodes"]["spec"]["template"]["spec"]
    assert nodes["terminationGracePeriodSeconds"] >= 30


def test_the_job_of_the_example_is_a_job_file() -> None:
    spec = parse_spec(everything()["ConfigMap/letters"]["data"]["job.toml"])
    limits = everything()["HorizontalPodAutoscaler/atoll-nodes"]["spec"]
    assert (spec.job.min_nodes, spec.job.nodes) == (limits["minReplicas"], limits["maxReplicas"])


def test_the_kustomization_names_what_is_there() -> None:
    content = yaml.safe_load((FOLDER / "kustomization.yaml").read_text())
    assert set(content["resources"]) <= set(FILES)
    images = {container["image"] for _, container in containers()}
    assert {image["name"] for image in content["images"]} == images
    assert content["namespace"] == everything()["Namespace/atoll"]["metadata"]["name"]


def test_kubectl_puts_it_together() -> None:
    try:
        done = subprocess.run(
            ["kubectl", "kustomize", str(FOLDER)],
            capture_output=True, text=True, timeout=PATIENCE_S, check=False,
        )  # fmt: skip
    except FileNotFoundError:
        pytest.skip("kubectl is not installed")
    if "unknown command" in done.stderr:
        pytest.skip("this kubectl has no kustomize")
    assert done.returncode == 0, done.stderr
    made = [item for item in yaml.safe_load_all(done.stdout) if item["kind"] != "Namespace"]
    assert {item["metadata"]["namespace"] for item in made} == {"atoll"}
    for item in made:
        check(item)
