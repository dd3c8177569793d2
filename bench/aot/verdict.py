"""Verdict on a row: whether it passes, and if not, the reason."""

from __future__ import annotations

from bench.aot.chips import GIB
from bench.aot.shapes import Sizes
from bench.common import Json

SPARE = 16 << 20
"""Temporary bytes that any program may have."""
MOVED = 1.2
"""Bytes that a kernel may move for each that it must."""
SPILLED = 0.05
"""Share of a TPU kernel's instructions that may store registers for want of room."""
SPILLED_MOST = 0.6
"""The same where a version that spills less was found to take more instructions."""

SAID = (
    "compiled_for", "kernels", "compile_s", "argument_bytes", "host_argument_bytes", "output_bytes",
    "temp_bytes", "aliased_bytes", "donated_bytes", "pool_copies", "pool_prefetches", "optimal_ms",
    "flops", "bytes_accessed", "collectives", "spill_bytes", "registers", "shared_bytes", "blocks",
    "bundles", "scalar_ops", "spill_stores", "grid_steps", "kernel_bytes", "declared_bytes",
)  # fmt: skip
"""What of a row its compiler says of the program alone."""


def temp_bound(sizes: Sizes, tokens: int, room: int) -> int:
    """Temporary bytes that a program over `tokens` new tokens may need: of each a few rows as wide
    as the widest of the model in float32, and `room` for arithmetic of its own."""
    config = sizes.config
    widest = 2 * config.intermediate_size + 2 * config.num_heads * config.head_dim
    widest //= sizes.shardings.size
    return SPARE + 3 * 4 * tokens * (widest + 2 * config.hidden_size) + room


def judged(row: Json) -> Json:
    """The row with its `status`: ok, explained, or failed, and `failures`."""
    failures = []
    if not row["compiled"]:
        return row | {"status": "failed", "failures": [row["why"]]}
    if row["pool_copies"]:
        failures.append(f"copies the whole pool {row['pool_copies']} times")
    if row["temp_bytes"] > row["temp_bound"]:
        failures.append(
            f"{row['temp_bytes'] / 1e6:.0f} MB temporary, at most {row['temp_bound'] / 1e6:.0f}"
        )
    if row["aliased_bytes"] < 0.99 * row["donated_bytes"]:
        failures.append(
            f"of {row['donated_bytes']} donated bytes {row['aliased_bytes']} are used again"
        )
    explained = None
    if row.get("pool_prefetches"):
        explained = "a device's share of the pool fits the chip's own memory, and is brought there"
    sent = dict(row.get("collectives") or {})
    if sent != ({"all-reduce": row["sums_expected"]} if row.get("sums_expected") else {}):
        said = ", ".join(f"{count} {name}" for name, count in sorted(sent.items())) or "nothing"
        if row.get("gathers"):
            explained = f"devices send each other {said}: {row['gathers']}"
        else:
            failures.append(
                f"devices send each other {said}, expected {row.get('sums_expected', 0)} all-reduce"
            )
    if row["kinds_dropped"]:
        explained = "this compiler drops memory kinds: that it compiles proves nothing"
    if row["kernels"] < row["kernels_expected"] and row["implementation"] != "reference":
        if "compute capability" in (row["why"] or ""):
            explained = row["why"]
        else:
            failures.append(f"{row['kernels']} kernels in it, expected {row['kernels_expected']}")
    if row["implementation"] == "reference" and row["kernels_expected"]:
        if row["why"] and "compute capability" in row["why"]:
            explained = row["why"]
        else:
            failures.append(f"runs the reference: {row['why'] or 'nothing says why'}")
    moved = row.get("kernel_bytes") or row.get("declared_bytes")
    if moved and moved > MOVED * row["must_read_bytes"]:
        said = f"moves {moved / row['must_read_bytes']:.1f} times the bytes that it must"
        if row["moves_more"]:
            explained = f"{said}: {row['moves_more']}"
        else:
            failures.append(said)
    if row["spill_bytes"]:
        failures.append(f"{row['spill_bytes']} bytes spilled")
    if row["bundles"] and row["spill_stores"] > SPILLED * row["bundles"]:
        said = f"{row['spill_stores']} spills in {row['bundles']} instructions"
        if row.get("spills_more") and row["spill_stores"] <= SPILLED_MOST * row["bundles"]:
            explained = f"{said}: {row['spills_more']}"
        else:
            failures.append(said)
    if not row["fits"]:
        alone = row["weight_bytes"] + GIB
        if alone > row["memory_bytes"]:
            explained = (
                f"weights of {row['weight_bytes'] / GIB:.1f} GiB do not leave 1 of this device's "
                f"{row['memory_bytes'] / GIB:.1f} GiB"
            )
        else:
            failures.append(
                f"needs {row['device_bytes'] / GIB:.2f} GiB of {row['memory_bytes'] / GIB:.2f}"
            )
    status = "failed" if failures else "explained" if explained else "ok"
    why = "; ".join(failures) or explained
    return row | {"status": status, "failures": failures, "why": why}
