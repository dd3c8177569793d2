"""Which tests lie near a folder: those that a change in it should be noticed by, fastest first.

A file belongs to the longest of the folders that it lies in.
"""

from __future__ import annotations

from pathlib import Path


def storage(*names: str) -> tuple[str, ...]:
    """Files of the store's tests."""
    return tuple(f"tests/storage/test_{name}.py" for name in names)


NEAR: dict[str, tuple[str, ...]] = {
    "storage": ("tests/storage",),
    "storage/place": storage(
        "queues", "places", "words", "durability", "pins", "direct_reads", "objects", "mending",
        "unknown", "waits", "eviction", "faults",
    ),
    "storage/segment": storage(
        "round_trip", "manifests", "codec", "alike", "mending", "mending_alike", "tensorstore",
        "direct_reads", "durability", "tenants", "faults", "unknown",
    ),
    "storage/tools": (
        *storage("repairs", "tools", "codec", "mending", "pins", "eviction", "unknown"),
        "tests/cli/test_store_tools.py",
    ),
    "storage/index": storage(
        "eviction", "database", "tenants", "lookup", "pins", "manifests", "alike",
        "places", "tools", "faults", "waits",
    ),
    "ckv_jax/prefix": (
        "tests/prefix", "tests/pipeline/test_targets.py", "tests/pipeline/test_bytes_on_disk.py",
        "tests/test_engine.py", "tests/pipeline/test_same_answers.py", "tests/test_any_traffic.py",
        "tests/decode/test_every_token.py", "tests/test_hints.py",
    ),
    "ckv_jax/selection": ("tests/selection", "tests/baselines"),
    "ckv_jax/pipeline": (
        "tests/selection", "tests/pipeline",
        "tests/test_engine.py", "tests/test_generate.py", "tests/test_heads_apart.py",
        "tests/test_any_traffic.py", "tests/test_batch.py",
        "tests/test_budget.py", "tests/baselines/test_reorder.py",
        "tests/test_repair_alike.py",
    ),
    "ckv_jax/decode": (
        "tests/decode", "tests/test_generate.py", "tests/test_heads_apart.py",
        "tests/test_any_traffic.py", "tests/serving/test_segments.py",
    ),
    "ckv_jax/baselines": ("tests/baselines",),
    "ckv_jax/serving": (
        "tests/serving", "tests/test_tenants.py", "tests/test_batch.py",
        "tests/test_generate.py", "tests/test_engine.py", "tests/test_documents.py",
        "tests/test_budget.py", "tests/test_hints.py", "tests/baselines/test_reorder.py",
    ),
}  # fmt: skip
"""Folder -> test files and folders. Those that are not there are left out."""


def folder_of(file: str) -> str | None:
    """The folder of `NEAR` that a file, named from the checkout's root, belongs to."""
    holding = [folder for folder in NEAR if file.startswith(f"{folder}/")]
    return max(holding, key=len, default=None)


def tests_of(root: Path, folder: str) -> list[str]:
    """The tests near `folder` that exist; `ValueError` if none does."""
    found = [path for path in NEAR[folder] if (root / path).exists()]
    if not found:
        raise ValueError(f"got no tests near {folder}, expected some of {', '.join(NEAR[folder])}")
    return found
