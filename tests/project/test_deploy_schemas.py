"""Files of deploy/ fit the schemas of their consumers: Kubernetes, Kustomize and Kubeflow.

No test uses a network or a cluster; each tool contains its schemas.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from tests.support.artefacts import KUBERNETES, TRAININGS, documents, pods

pytestmark = pytest.mark.slow

CUSTOM = {"ServiceMonitor"}  # its schema comes with the operator, in no package from the index
KUBEFLOW = {path.name: path for path in TRAININGS.glob("kubeflow/*.yaml")}


def tool(module: str) -> Any:
    return pytest.importorskip(module, reason=f"{module} is not installed: pip install 'zeus-plugins[deploy]'")


def kustomized(folder: Path) -> list[dict[str, Any]]:
    """Return the objects that `kubectl kustomize` generates from a folder."""
    kubectl, kustomize = shutil.which("kubectl"), shutil.which("kustomize")
    if kubectl is None and kustomize is None:
        pytest.skip("neither kubectl nor kustomize is installed")
    command = [kubectl, "kustomize"] if kubectl is not None else [str(kustomize), "build"]
    done = subprocess.run([*command, str(folder)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return [document for document in yaml.safe_load_all(done.stdout) if document]


@pytest.fixture(params=["sqlite", "postgresql", "sqlite, monitoring", "postgresql, monitoring", "sqlite, backup"])
def installation(request: pytest.FixtureRequest, tmp_path: Path) -> list[dict[str, Any]]:
    overlay, _, component = request.param.partition(", ")
    folder = KUBERNETES / "overlays" / overlay
    if not component:
        return kustomized(folder)
    parts = {"resources": [folder], "components": [KUBERNETES / "components" / component]}
    kustomization: dict[str, object] = {
        key: [os.path.relpath(path, tmp_path.resolve()) for path in paths] for key, paths in parts.items()
    }
    kustomization["namespace"] = "zeus-bso"
    (tmp_path / "kustomization.yaml").write_text(yaml.safe_dump(kustomization))
    found = kustomized(tmp_path)
    assert {"monitoring": "ServiceMonitor", "backup": "CronJob"}[component] in {each["kind"] for each in found}
    return found


class TestAnInstallation:
    def test_kubernetes_accepts_the_installation(self, installation: list[dict[str, Any]]) -> None:
        validator = tool("kubernetes_validate")
        for document in installation:
            if document["kind"] not in CUSTOM:
                validator.validate(document, validator.latest_version(), strict=True)

    def test_selectors_of_the_installation_match(self, installation: list[dict[str, Any]]) -> None:
        kinds = {each["kind"]: each for each in installation}
        (labels,) = [each["spec"]["template"]["metadata"]["labels"] for each in [kinds["Deployment"]]]
        selectors = [kinds["Service"]["spec"]["selector"], kinds["Deployment"]["spec"]["selector"]["matchLabels"]]
        selectors += [
            each["spec"]["podSelector"]["matchLabels"] for each in installation if each["kind"] == "NetworkPolicy"
        ]
        if "ServiceMonitor" in kinds:
            monitored = kinds["ServiceMonitor"]["spec"]["selector"]["matchLabels"]
            assert monitored.items() <= kinds["Service"]["metadata"]["labels"].items()
        if "PodDisruptionBudget" in kinds:
            selectors.append(kinds["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"])
        assert all(selector.items() <= labels.items() for selector in selectors)
        # The Service must not send requests to the pods that copy the database or upgrade its schema.
        if "CronJob" in kinds:
            copying = kinds["CronJob"]["spec"]["jobTemplate"]["spec"]["template"]
            assert not kinds["Service"]["spec"]["selector"].items() <= copying["metadata"]["labels"].items()
            (beside,) = copying["spec"]["affinity"]["podAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
            assert beside["labelSelector"]["matchLabels"].items() <= labels.items()
            claims = {
                each["metadata"]["name"]: each["spec"]
                for each in installation
                if each["kind"] == "PersistentVolumeClaim"
            }
            mounted = {one["persistentVolumeClaim"]["claimName"] for one in copying["spec"]["volumes"][1:]}
            assert mounted == claims.keys()
            # A claim for a single pod would keep the second pod waiting forever.
            assert {mode for claim in claims.values() for mode in claim["accessModes"]} == {"ReadWriteOnce"}
        if "Job" in kinds:
            of_job = kinds["Job"]["spec"]["template"]["metadata"]["labels"]
            assert not kinds["Service"]["spec"]["selector"].items() <= of_job.items()
            scaled = kinds["HorizontalPodAutoscaler"]["spec"]["scaleTargetRef"]
            assert (scaled["kind"], scaled["name"]) == ("Deployment", kinds["Deployment"]["metadata"]["name"])
            assert "replicas" not in kinds["Deployment"]["spec"]
        else:
            assert kinds["Deployment"]["spec"]["replicas"] == 1
        assert {each["metadata"].get("namespace", each["metadata"]["name"]) for each in installation} == {"zeus-bso"}

    def test_pods_of_the_installation_pass_the_restricted_standard(self, installation: list[dict[str, Any]]) -> None:
        found = [pod for document in installation for pod in pods(document)]
        assert found
        for pod in found:
            assert violations(pod) == []


def violations(pod: dict[str, Any]) -> list[str]:
    """Return violations of the restricted Pod Security Standard and of a read-only root file system."""
    missed = []
    of_pod = pod.get("securityContext", {})
    if of_pod.get("runAsNonRoot") is not True or not of_pod.get("runAsUser"):
        missed.append("it may run as root")
    if of_pod.get("seccompProfile") != {"type": "RuntimeDefault"}:
        missed.append("no seccomp profile")
    if any(pod.get(shared) for shared in ("hostNetwork", "hostPID", "hostIPC")):
        missed.append("a namespace of the host")
    allowed = {"configMap", "emptyDir", "persistentVolumeClaim", "projected", "secret"}
    missed += [f"volume {each['name']}" for each in pod.get("volumes", ()) if not each.keys() - {"name"} <= allowed]
    if pod.get("automountServiceAccountToken") is not False or pod.get("enableServiceLinks") is not False:
        missed.append("it is given what it does not need")
    mounted = {each["name"] for container in pod["containers"] for each in container.get("volumeMounts", ())}
    missed += [f"volume {name} is missing" for name in mounted - {each["name"] for each in pod.get("volumes", ())}]
    for container in pod["containers"]:
        context = container.get("securityContext", {})
        if context.get("allowPrivilegeEscalation") is not False or context.get("capabilities") != {"drop": ["ALL"]}:
            missed.append(f"{container['name']} has privileges")
        if context.get("readOnlyRootFilesystem") is not True:
            missed.append(f"{container['name']} may write anywhere")
    return missed


class TestANightlyTraining:
    def test_kubernetes_accepts_the_nightly_training(self) -> None:
        validator = tool("kubernetes_validate")
        for document in documents(TRAININGS / "kubernetes" / "nightly.yaml"):
            validator.validate(document, validator.latest_version(), strict=True)

    def test_pods_of_the_nightly_training_pass_the_restricted_standard(self) -> None:
        (pod,) = pods(documents(TRAININGS / "kubernetes" / "nightly.yaml"))
        assert violations(pod) == []


@pytest.mark.parametrize("name", sorted(name for name in KUBEFLOW if name.startswith("trainjob")))
def test_kubeflow_trainer_preserves_every_key_of_a_job(name: str) -> None:
    models = tool("kubeflow_trainer_api.models")
    (document,) = documents(KUBEFLOW[name])
    job = models.TrainerV1alpha1TrainJob.from_dict(document)
    assert job.to_dict() == document


@pytest.mark.parametrize("name", sorted(name for name in KUBEFLOW if name.startswith("pytorchjob")))
class TestAPyTorchJob:
    def test_training_operator_preserves_every_key_of_a_job(self, name: str) -> None:
        client = tool("kubeflow.training.api_client").ApiClient()
        (document,) = documents(KUBEFLOW[name])
        answer = SimpleNamespace(data=json.dumps(document))  # like the answer of an API server
        job = client.deserialize(answer, "KubeflowOrgV1PyTorchJob")
        assert client.sanitize_for_serialization(job) == document

    def test_kubernetes_accepts_the_pods_of_a_pytorchjob(self, name: str) -> None:
        validator = tool("kubernetes_validate")
        (document,) = documents(KUBEFLOW[name])
        for replica in document["spec"]["pytorchReplicaSpecs"].values():
            pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "one"}, "spec": replica["template"]["spec"]}
            validator.validate(pod, validator.latest_version(), strict=True)
