"""Which tests lie near a folder: those that a change in it should be noticed by, fastest first.

A file belongs to the longest of the folders that it lies in.
"""

from __future__ import annotations

from pathlib import Path

NEAR: dict[str, tuple[str, ...]] = {
    "storage": ("tests/storage",),
    "storage/digest": (
        "tests/storage/test_digests.py",
        "tests/storage/test_digest_faults.py", "tests/storage/test_probe_spans.py",
        "tests/storage/test_landmarks.py",
        "tests/storage/test_tools.py", "tests/storage/test_round_trip.py",
    ),
    "storage/place": ("tests/storage/place", *(
        f"tests/storage/test_{name}.py"
        for name in (
            "words", "places", "bad_places", "durability", "descriptors", "limits",
            "kernel_queue", "direct_reads", "unknown", "hidden_names", "objects", "mending",
            "waits", "room", "faults",
        )
    )),
    "storage/segment": tuple(
        f"tests/storage/test_{name}.py"
        for name in (
            "segment_parts", "array_files", "manifests", "segment_writer", "deadline", "reader",
            "open_segments", "piecewise_reads", "segment", "alike_continued", "round_trip",
            "landmarks", "quantised", "codec", "provenance", "limits", "mending", "remaking",
            "tensorstore", "direct_reads", "writer_memory", "promises", "durability", "faults",
            "unknown", "hidden_names", "tenants", "probe_spans", "alike", "mending_alike",
        )
    ),
    "storage/tools": (
        "tests/storage/test_repairs.py", "tests/storage/test_tools.py",
        "tests/storage/test_codec.py",
        "tests/storage/test_fate.py", "tests/storage/test_mending.py",
        "tests/storage/test_unknown.py", "tests/storage/test_hidden_names.py",
        "tests/storage/test_room.py", "tests/storage/test_pins.py",
        "tests/cli/test_store_tools.py",
    ),
    "storage/index": (
        "tests/storage/test_eviction.py", "tests/storage/test_database.py",
        "tests/storage/test_marks.py", "tests/storage/test_alike.py",
        "tests/storage/test_tenants.py", "tests/storage/test_limits.py",
        "tests/storage/test_mending.py",
        "tests/storage/test_lookup.py", "tests/storage/test_pins.py",
        "tests/storage/test_probe_spans.py", "tests/storage/test_places.py",
        "tests/storage/test_bounds.py", "tests/storage/test_tools.py",
        "tests/storage/test_faults.py", "tests/storage/test_provenance.py",
        "tests/storage/test_room.py", "tests/storage/test_waits.py",
    ),
    "ckv_jax/prefix": (
        "tests/prefix", "tests/pipeline/test_targets.py", "tests/pipeline/test_bytes_on_disk.py",
        "tests/test_engine.py", "tests/pipeline/test_same_answers.py", "tests/test_hints.py",
    ),
    "ckv_jax/selection": (
        "tests/selection", "tests/baselines", "tests/baselines/test_layerwise.py",
    ),
    "ckv_jax/pipeline": (
        "tests/selection", "tests/prefix/test_recurrence.py", "tests/pipeline",
        "tests/test_engine.py", "tests/test_generate.py", "tests/test_heads_apart.py",
        "tests/serving/test_compaction.py",
        "tests/test_any_traffic.py",
    ),
    "ckv_jax/decode": (
        "tests/decode", "tests/test_generate.py", "tests/test_heads_apart.py",
        "tests/serving/test_compaction.py", "tests/test_any_traffic.py",
    ),
    "ckv_jax/baselines": ("tests/baselines", "tests/baselines/test_layerwise.py"),
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
