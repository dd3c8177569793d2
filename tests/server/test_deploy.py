"""What `deploy/` holds parses, and says nothing that the application does not know."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import warnings
from pathlib import Path

import pytest

yaml = pytest.importorskip("yaml", reason="the manifest is YAML: PyYAML reads it")

DEPLOY = Path(__file__).parents[2] / "deploy"
FILE = DEPLOY / "kuberay.yaml"
PROBES = ("startupProbe", "readinessProbe", "livenessProbe")
KUBERNETES = "1.33"
METRIC = re.compile(r"ckv_[a-z_]+")
INDICATORS = {
    "ckv_time_to_first_token_seconds_bucket", "ckv_requests_waiting", "ckv_cached_tokens_total",
    "ckv_prompt_tokens_total",
}  # fmt: skip
"""Shown, and no alert: what is too much is for people to say."""


def test_the_manifest_fits_the_application() -> None:
    pytest.importorskip("ray", reason="replicas need the extra `ray`")
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


def test_the_processors_of_replicas_are_all_that_is_taken() -> None:
    pytest.importorskip("ray", reason="replicas need the extra `ray`")
    with warnings.catch_warnings(action="ignore"):
        from ckv_jax.server.ray_app import build

    ingress = build({"checkpoint": "c", "store": "s", "name": "n"})._bound_deployment
    replica = ingress.init_args[0]._bound_deployment
    assert ingress.ray_actor_options["num_cpus"] == 0
    assert replica.ray_actor_options["num_cpus"] == 1


def test_the_deployment_is_one_application() -> None:
    claim, deployment, service = yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text())
    pod = deployment["spec"]["template"]
    labels = pod["metadata"]["labels"]
    assert deployment["spec"]["selector"]["matchLabels"] == labels == service["spec"]["selector"]
    (container,) = pod["spec"]["containers"]
    claims = [volume["persistentVolumeClaim"]["claimName"] for volume in pod["spec"]["volumes"]]
    assert claim["metadata"]["name"] in claims
    names = {volume["name"] for volume in pod["spec"]["volumes"]}
    assert {mount["name"] for mount in container["volumeMounts"]} == names
    assert {"requests", "limits"} == container["resources"].keys()
    assert pod["spec"]["securityContext"]["fsGroup"]
    paths = {probe: container[probe]["httpGet"]["path"] for probe in PROBES}
    assert paths == {
        "startupProbe": "/health",
        "readinessProbe": "/ready",
        "livenessProbe": "/health",
    }
    _check_options(container["args"])


def test_the_manifests_fit_the_schemas_of_kubernetes() -> None:
    kubernetes = pytest.importorskip(
        "kubernetes_validate", reason="kubernetes-validate has the schemas"
    )
    cluster = yaml.safe_load(FILE.read_text())["spec"]["rayClusterConfig"]
    pods = [
        {"apiVersion": "v1", "kind": "Pod", **{"metadata": {"name": "pod"}, **group["template"]}}
        for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"])
    ]
    for one in (*yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text()), *pods):
        kubernetes.validate(one, KUBERNETES, strict=True)
    pods[0]["spec"]["containers"][0]["imagee"] = "ckv"
    with pytest.raises(kubernetes.ValidationError):
        kubernetes.validate(pods[0], KUBERNETES, strict=True)


def test_the_compose_file_names_what_is_there() -> None:
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    for service in compose["services"].values():
        assert {one["source"] for one in service.get("configs", ())} <= compose["configs"].keys()
    for config in compose["configs"].values():
        if "file" in config:
            assert (DEPLOY / config["file"]).is_file()
        else:
            yaml.safe_load(config["content"])
    _check_options(compose["services"]["ckv"]["command"])


def test_alerts_and_figures_are_documented_ones() -> None:
    (group,) = yaml.safe_load((DEPLOY / "prometheus-rules.yaml").read_text())["groups"]
    dashboard = json.loads((DEPLOY / "grafana-dashboard.json").read_text())
    page = (DEPLOY.parent / "docs" / "server.md").read_text()
    table = page[page.index("| alert on |") : page.index("`vllm:num_requests_waiting`")]
    expressions = [rule["expr"] for rule in group["rules"]]
    shown = [t["expr"] for panel in dashboard["panels"] for t in panel["targets"]]
    alerted = {name for one in expressions for name in METRIC.findall(one)}
    assert alerted == set(METRIC.findall(table)) - INDICATORS
    source = (DEPLOY.parent / "ckv_jax" / "server" / "observability.py").read_text()
    for name in {name for one in (*expressions, *shown) for name in METRIC.findall(one)}:
        plain = name.removesuffix("_bucket").removesuffix("_total").removesuffix("_seconds")
        assert plain.removeprefix("ckv_") in source, name
    assert set(METRIC.findall(table)) <= {n for one in shown for n in METRIC.findall(one)}
    if (promtool := shutil.which("promtool")) is not None:
        command = [promtool, "check", "rules", str(DEPLOY / "prometheus-rules.yaml")]
        assert subprocess.run(command, check=False).returncode == 0


def _check_options(arguments: list[str]) -> None:
    """Those of `ckv serve`."""
    cli = DEPLOY.parent / "ckv_jax" / "cli"
    source = (cli / "serve.py").read_text() + (cli / "options.py").read_text()
    for argument in arguments:
        assert not argument.startswith("--") or f'"{argument}"' in source, argument
