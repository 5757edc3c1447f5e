"""The files of deploy/ as the tests read them: their documents, containers, variables and commands."""

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
        place: Where it is said.
        image: The image, without registry and tag; empty where there is none.
        tag: The image's tag, or empty.
        command: What replaces the image's entry point; empty: nothing.
        arguments: What follows it.
        environ: The variables that are set; None: to what only the platform knows.
    """

    place: str
    image: str = ""
    tag: str = ""
    command: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ()
    environ: dict[str, str | None] = field(default_factory=dict)


def documents(path: Path) -> list[dict[str, Any]]:
    """The YAML documents of a file."""
    return [document for document in yaml.safe_load_all(path.read_text()) if document]


def manifests() -> Iterator[tuple[Path, dict[str, Any]]]:
    """Every document for Kubernetes, kustomizations and patches among them."""
    for path in sorted([*KUBERNETES.rglob("*.yaml"), *TRAININGS.rglob("*.yaml")]):
        for document in documents(path):
            yield path, document


def pods(document: Any) -> Iterator[dict[str, Any]]:
    """The specifications of pods in a document, however deep."""
    if isinstance(document, dict):
        if isinstance(document.get("containers"), list):
            yield document
        for value in document.values():
            yield from pods(value)
    elif isinstance(document, list):
        for value in document:
            yield from pods(value)


def launches() -> Iterator[Launch]:
    """Every program that compose, Kubernetes or Kubeflow start, and the images' own."""
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
    # Patches, which name no image, are all of the server's container.
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
