"""Compiles programs for one device and model in a process of its own (`bench.aot.worker`).

Reads what to compile as JSON from standard input; prints a line `begin NAME` before each program
and a line `row JSON` after it. A compiler that crashes takes nothing else with it.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from bench.aot import dumps, traffic
from bench.aot.chips import Chip, parted
from bench.aot.kernels import KERNELS
from bench.aot.programs import PROGRAMS
from bench.aot.shapes import MODELS, Program, Sizes
from bench.aot.verdict import judged, temp_bound
from bench.common import Json
from ckv_jax.kernels_pallas.target import Target, dispatches
from ckv_jax.model.shardings import WHOLE, Shardings


def devices_of(chip: Chip, count: int) -> list[Any]:
    """Devices that only compile."""
    from jax.experimental import topologies

    if chip.kind == "tpu":
        name = chip.topology if count <= 4 else chip.eight
        topology = topologies.get_topology_desc(platform="tpu", topology_name=name)
    else:
        import jax_plugins.xla_cuda13  # noqa: F401  (makes the platform known)

        topology = topologies.get_topology_desc(
            "", "cuda", target_config=chip.config, topology="1x1x1"
        )
    return list(topology.devices[:count])


class Compiler:
    """One device, or some that a model is split over, and that model."""

    def __init__(
        self, chip: Chip, count: int, model: str, folder: Path, *, instructions: bool,
        known: Mapping[str, Json],
    ) -> None:  # fmt: skip
        """`instructions`: whether the compiler writes them down; `known`: what it said of programs
        by their digests."""
        self.chip = chip
        self._folder = folder
        self._model = model
        self._instructions = instructions
        self._known = dict(known)
        devices = devices_of(chip, count)
        self._device = devices[0]
        config = MODELS[model]
        shardings = Shardings.over(config, count, devices=devices)
        self.sizes = Sizes(
            config, Target.of(self._device), memory_bytes=chip.memory_bytes, shardings=shardings
        )

    def row(self, name: str) -> Json:
        """Everything about one program."""
        dumps.empty(self._folder)
        jax.clear_caches()  # what was traced before would choose nothing again
        program = (PROGRAMS | KERNELS)[name](self.sizes)
        args = self._placed(program)
        start = time.perf_counter()
        with dispatches() as made:
            lowered = program.jitted.lower(*args, **program.named)
        digest = self._digest(lowered, program)
        lower_s = round(time.perf_counter() - start, 2)
        said = self._known.get(digest) or self._compiled(program, lowered)
        self._known[digest] = said
        found: Json = {
            "implementation": _joined(one.implementation for one in made),
            "kernels_expected": program.kernels,
            "compiled": True,
            "why": _joined(why for one in made for why in one.refused),
            "lower_s": lower_s,
            "temp_bound": temp_bound(self.sizes, program.tokens, program.room),
            "must_read_bytes": program.must_read,
            "moves_more": program.moves_more,
            "spills_more": program.spills_more,
            "devices": self.sizes.shardings.size,
            "sums_expected": program.sums if self.sizes.shardings.size > 1 else 0,
            "gathers": program.gathers,
            "kinds_dropped": program.pinned and not said["host_argument_bytes"],
            "digest": digest,
            **said,
            **self._fit(program, said),
        }
        return judged(found)

    def _digest(self, lowered: Any, program: Program) -> str:
        """Names a program as this compiler gets it: what it says of one, it says of its like."""
        which = (self.chip.compiled_as, self._instructions, program.big, program.pinned)
        return hashlib.sha256(f"{which}{lowered.as_text()}".encode()).hexdigest()[:16]

    def _compiled(self, program: Program, lowered: Any) -> Json:
        """What the compiler says of a program."""
        start = time.perf_counter()
        compiled = lowered.compile()
        ended = time.perf_counter()
        text, memory = compiled.as_text(), compiled.memory_analysis()
        cost = compiled.cost_analysis() or {}
        ours = dumps.kernels(text)
        parts = self.sizes.shardings.size
        donated = sum(
            int(np.prod(info.shape)) * info.dtype.itemsize
            for info in jax.tree.leaves(lowered.args_info)
            if info.donated
        )
        donated //= parts  # pools and buffers: each device has its heads
        big = [(*shape[:-1], shape[-1] // parts) for shape in program.big]
        copies = dumps.copies_of(text, big)
        seconds = dumps.optimal_seconds(text, cost.get("optimal_seconds"))
        return {
            "compiled_for": f"{self.chip.name} {self._model}",
            "kernels": len(ours),
            "compile_s": round(ended - start, 2),
            "argument_bytes": memory.argument_size_in_bytes,
            "host_argument_bytes": memory.host_argument_size_in_bytes,
            "output_bytes": memory.output_size_in_bytes,
            "temp_bytes": memory.temp_size_in_bytes,
            "aliased_bytes": memory.alias_size_in_bytes,
            "donated_bytes": donated,
            "pool_copies": sum(not copy.on_chip for copy in copies),
            "pool_prefetches": sum(copy.on_chip for copy in copies),
            "optimal_ms": None if seconds is None else seconds * 1e3,
            "flops": cost.get("flops"),
            "bytes_accessed": cost.get("bytes accessed"),
            "collectives": dumps.collectives(text),
            **self._kernel_facts(program, ours),
        }

    def _placed(self, program: Program) -> tuple[Any, ...]:
        kind = {"memory_kind": "pinned_host"} if program.pinned else {}
        own = self.sizes.shardings
        whole: Any = own.place(WHOLE)
        if whole is None:
            whole = jax.sharding.SingleDeviceSharding(self._device, **kind)

        def placed(path: Any, x: Any) -> Any:
            where = getattr(x, "sharding", None) or whole
            if own.size > 1 and isinstance(path[-1], jax.tree_util.DictKey):  # a parameter
                where = own.place(own.of_name(str(path[-1].key), x.shape, out_first=True))
            return jax.ShapeDtypeStruct(np.shape(x), np.result_type(x), sharding=where)

        args: tuple[Any, ...] = jax.tree_util.tree_map_with_path(placed, program.args)
        return args

    def _fit(self, program: Program, said: Json) -> Json:
        """All that must be on the device while this program runs: the whole model, the pool, the
        donated buffers of all layers, the program's results and temporary arrays."""
        sizes = self.sizes
        whole = program.whole_model
        buffers = int(said["donated_bytes"] * whole) if whole > 1 else 0
        fresh = said["output_bytes"] - said["aliased_bytes"]
        need = (
            sizes.weight_bytes + sizes.pool_bytes // sizes.shardings.size + buffers + max(0, fresh)
            + said["temp_bytes"]
        )  # fmt: skip
        return {
            "weight_bytes": sizes.weight_bytes,
            "device_bytes": need,
            "memory_bytes": self.chip.memory_bytes,
            "fits": need <= self.chip.memory_bytes,
        }

    def _kernel_facts(self, program: Program, ours: list[str]) -> Json:
        facts: Json = dict.fromkeys(
            ("spill_bytes", "registers", "shared_bytes", "blocks", "bundles", "scalar_ops",
             "spill_stores", "grid_steps", "kernel_bytes", "declared_bytes")
        )  # fmt: skip
        gpu = dumps.gpu_kernels(self._folder)
        if gpu is not None:
            facts |= {"spill_bytes": gpu.spill_bytes, "registers": gpu.registers,
                      "shared_bytes": gpu.shared_bytes, "blocks": gpu.blocks}  # fmt: skip
        tables = dumps.tpu_kernels(self._folder, ours)
        if tables:
            facts |= {
                "bundles": sum(table.count for table in tables),
                "scalar_ops": sum(table.scalar for table in tables),
                "spill_stores": sum(table.spills for table in tables),
            }
        if program.example is not None and self.chip.kind == "tpu" and ours:
            calls = traffic.calls(program.jitted, program.example())
            moved = [call.moved for call in calls]
            declared = [call.declared for call in calls]
            facts |= {
                "grid_steps": sum(call.steps for call in calls),
                "kernel_bytes": None if None in moved else sum(moved),
                "declared_bytes": None if None in declared else sum(declared),
            }
        return facts


def _joined(texts: Iterable[str]) -> str | None:
    return "; ".join(dict.fromkeys(texts)) or None


def main() -> None:
    """The command."""
    order = json.load(sys.stdin)
    chip, count = parted(order["target"])
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(os.environ.get("BENCH_AOT_DUMPS", scratch))
        compiler = Compiler(
            chip, count, order["model"], folder,
            instructions=order["instructions"], known=order["known"],
        )  # fmt: skip
        for name in order["programs"]:
            print(f"begin {name}", flush=True)
            try:
                row = compiler.row(name)
            except Exception as error:  # whatever a compiler throws is this row's outcome
                why = f"{type(error).__name__}: {str(error).strip().splitlines()[0][:300]}"
                row = {"compiled": False, "why": why, "status": "failed", "failures": [why]}
            print(f"row {json.dumps(row)}", flush=True)


if __name__ == "__main__":
    main()
