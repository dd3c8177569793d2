"""The manifest for KubeRay parses, and says nothing that the application does not know."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest

yaml = pytest.importorskip("yaml", reason="the manifest is YAML: PyYAML reads it")
pytest.importorskip("ray", reason="replicas need the extra `ray`")

FILE = Path(__file__).parents[2] / "deploy" / "kuberay.yaml"


def test_the_manifest_fits_the_application() -> None:
    with warnings.catch_warnings(action="ignore"):  # Ray's own
        from ckv_jax.server.ray_app import Settings

    spec = yaml.safe_load(FILE.read_text())["spec"]
    (application,) = yaml.safe_load(spec["serveConfigV2"])["applications"]
    assert application["import_path"] == "ckv_jax.server.ray_app:build"
    settings = Settings(**application["args"])
    assert settings.config.model == settings.name
    cluster = spec["rayClusterConfig"]
    (head,) = cluster["headGroupSpec"]["template"]["spec"]["containers"]
    ports = {port["name"]: port["containerPort"] for port in head["ports"]}
    assert ports == {"gcs-server": 6379, "dashboard": 8265, "client": 10001, "serve": 8000}
    (workers,) = cluster["workerGroupSpecs"]
    assert workers["replicas"] == settings.replicas
    (worker,) = workers["template"]["spec"]["containers"]
    assert int(worker["resources"]["limits"]["nvidia.com/gpu"]) == settings.gpus
