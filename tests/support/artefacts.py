"""Files of deploy/ as the tests read them: documents, containers, variables and commands."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from tests.support import ROOT

DEPLOY = ROOT / "deploy"
KUBERNETES = DEPLOY / "kubernetes"
TRAININGS = DEPLOY / "trainings"
COMPOSE: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
WORKFLOW_FILE = DEPLOY / "github" / "nightly-training.yaml"
WORKFLOW: dict[str, Any] = yaml.safe_load(WORKFLOW_FILE.read_text())
DOCKERFILES = (DEPLOY / "Dockerfile", DEPLOY / "training.Dockerfile")

SERVER_IMAGE = "zeus-bso-server"
TRAINING_IMAGE = "zeus-training"


@dataclass(frozen=True)
class Launch:
    """A program that an artefact starts.

    Attributes:
        place: Description of its place.
        image: The image, without registry and tag, or empty.
        tag: The image's tag, or empty.
        command: Replacement of the image's entry point, or empty.
        arguments: Arguments of the command.
        environ: Variables that are set; None if only the platform knows the value.
    """

    place: str
    image: str = ""
    tag: str = ""
    command: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ()
    environ: dict[str, str | None] = field(default_factory=dict)


def documents(path: Path) -> list[dict[str, Any]]:
    """Return the YAML documents of a file."""
    return [document for document in yaml.safe_load_all(path.read_text()) if document]


def manifests() -> Iterator[tuple[Path, dict[str, Any]]]:
    """Yield every document for Kubernetes, including kustomizations and patches."""
    for path in sorted([*KUBERNETES.rglob("*.yaml"), *TRAININGS.rglob("*.yaml")]):
        for document in documents(path):
            yield path, document


def pods(document: Any) -> Iterator[dict[str, Any]]:
    """Yield the specifications of pods at any depth of a document."""
    if isinstance(document, dict):
        if isinstance(document.get("containers"), list):
            yield document
        for value in document.values():
            yield from pods(value)
    elif isinstance(document, list):
        for value in document:
            yield from pods(value)


def launches() -> Iterator[Launch]:
    """Yield every program that compose, Kubernetes, Kubeflow or an image starts."""
    for name, service in COMPOSE["services"].items():
        yield _launch(f"compose, {name}", service, service.get("command", ()), service.get("environment", {}))
    for path, document in manifests():
        place = str(path.relative_to(DEPLOY))
        if document["kind"] == "TrainJob":
            yield _container(place, document["spec"]["trainer"])
            continue
        for pod in pods(document):
            for container in pod["containers"]:
                yield _container(place, container)
    for path in DOCKERFILES:
        text = path.read_text()
        environ = dict(re.findall(r"\b(ZEUS_\w+)=(\S+)", text))
        yield Launch(path.name, _image_of(path), arguments=_cmd(text), environ=dict(environ))
    job = WORKFLOW["jobs"]["train"]
    yield Launch("workflow", environ=dict.fromkeys(job["env"]))


def _container(place: str, container: dict[str, Any]) -> Launch:
    environ = {one["name"]: one.get("value") for one in container.get("env", ())}
    # Patches, which name no image, all apply to the server's container.
    container = {"image": SERVER_IMAGE} | container
    return _launch(place, container, container.get("args", ()), environ, tuple(container.get("command", ())))


def _launch(
    place: str, said: dict[str, Any], arguments: Any, environ: dict[str, str | None], command: tuple[str, ...] = ()
) -> Launch:
    name, _, tag = said.get("image", "").rpartition("/")[2].partition(":")
    return Launch(place, name, tag, command, tuple(arguments), environ)


def _image_of(dockerfile: Path) -> str:
    return TRAINING_IMAGE if dockerfile.name.startswith("training") else SERVER_IMAGE


def _cmd(dockerfile: str) -> tuple[str, ...]:
    (said,) = re.findall(r"^CMD \[(.*)\]$", dockerfile, re.MULTILINE)
    return tuple(re.findall(r'"([^"]*)"', said))
