"""Decode on modelled devices: each stage of a token takes what a machine's rates say (KVDrive §6).

    python -m bench.device_model COUNTS... --json OUT

COUNTS are results of `bench.decode`: what a token of a text found in windows, in host memory, on
the SSD, and read ahead, in real runs of real caches. Here the four stages of each layer are held to
a machine in place of this one, whose two cores do all of them:

- select: reads a layer's index from device memory.
- look-up: the CPU compares a selection with a window, slot by slot.
- fetch: what the window lacks crosses the link; what host memory lacks comes from the SSD first.
- compute: reads the layer's weights once for the batch, and what each text attends to.

KVDrive's micro-batches run through the first three as through a pipeline, in which each stage takes
one at a time, and the whole batch computes then (§6.1). All others do one stage after the other.
Layers follow one another. A token's packs are spread evenly over texts and layers, and no stage
slows another one down. What is read ahead takes no time of a demand, as far as the SSD is idle.

`paper` is the same model with the paper's models, contexts, batches and hit rates (its Table 3),
beside what its text says: with rates of data sheets times what common kernels reach of them
(`rates`); with calls that cost so much, or stages that are slower than the rates by so much, that
ShadowKV and RetroInfer wait for half of a layer (`calls`, `slow`: Figure 4); and as the latter with
windows of up to four selections (`wide`).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path

import numpy as np

from bench.common import SHAPES, Json, command, finish, table
from ckv_jax.config import layout_of
from ckv_jax.systems import system_named

MICRO_BATCHES = (1, 2, 4, 8)
CALL_S = 20e-6
"""What a stage costs however little it does: launches and a synchronisation."""
LOOK_UP_S = 2e-9
"""Of the CPU, for a slot of one head's window (a hash table, many threads)."""
LEAST_COPY_S = 60e-6
"""A copy of scattered pieces takes so long at least, see `Machine.fetch_s`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Rates of a machine in bytes a second, of data sheets times what kernels reach of them."""

    name: str
    memory: float
    """Device memory."""
    link: float
    room: float
    """Bytes of device memory."""
    host: float
    """Bytes of host memory."""
    ssd: float = 6.5e9
    call_s: float = CALL_S
    """What selecting, looking up and fetching cost each, however little they do."""
    slow: float = 1.0
    """What all else of these takes, over what it takes by the rates."""

    def select_s(self, texts: int, index: float) -> float:
        """Of so many texts, with an index of so many bytes in a layer."""
        return self.call_s + self.slow * texts * index / (0.6 * self.memory)

    def look_s(self, slots: float) -> float:
        """Of so many slots of windows."""
        return self.call_s + self.slow * slots * LOOK_UP_S

    def fetch_s(self, host: float, ssd: float) -> tuple[float, float]:
        """(on the link, on the SSD) of bytes that come from each."""
        moved = host + ssd
        link = (
            self.call_s + max(LEAST_COPY_S, self.slow * moved / (0.7 * self.link)) if moved else 0.0
        )
        return link, ssd / self.ssd

    def compute_s(self, weights: float, attended: float) -> float:
        """Of a layer."""
        return CALL_S + weights / (0.85 * self.memory) + attended / (0.7 * self.memory)


MACHINES = (
    Machine(name="L20", memory=864e9, link=26e9, room=48e9, host=100e9),
    Machine(name="H20", memory=4000e9, link=52e9, room=96e9, host=200e9),
    Machine(name="4090", memory=1008e9, link=26e9, room=24e9, host=120e9),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One layer of one token of a batch. Arrays have a number for each text."""

    weights: float
    attended: float
    """Bytes of each text."""
    index: float
    """Bytes of each text that a selection reads; 0: nothing is selected."""
    slots: float
    """Of all heads' windows of a text; 0: nothing is kept."""
    host: np.ndarray
    """Bytes from host memory."""
    ssd: np.ndarray
    """Bytes from the SSD that nothing has read ahead."""

    def stages(self, machine: Machine, micro_batches: int) -> dict[str, float]:
        """Seconds of stages and of the layer, whose micro-batches overlap but for computing."""
        clock = dict.fromkeys(("select", "look", "ssd", "link"), 0.0)
        busy = dict.fromkeys((*clock, "compute"), 0.0)
        for some in np.array_split(np.arange(len(self.host)), min(micro_batches, len(self.host))):
            host, ssd = float(self.host[some].sum()), float(self.ssd[some].sum())
            link_s, ssd_s = machine.fetch_s(host, ssd)
            took = {
                "select": machine.select_s(len(some), self.index) if self.index else 0.0,
                "look": machine.look_s(len(some) * self.slots) if self.slots else 0.0,
                "ssd": ssd_s,
                "link": link_s,
            }
            ready = 0.0
            for stage, seconds in took.items():  # each takes one micro-batch at a time
                clock[stage] = ready = max(ready, clock[stage]) + seconds
                busy[stage] += seconds
        texts = len(self.host)
        busy["compute"] = machine.compute_s(self.weights, texts * self.attended)
        return busy | {"all": clock["link"] + busy["compute"]}


# -- counts of real runs ---------------------------------------------------------------------------

INDEX = {"quest": 1 / 4, "shadowkv": 1 / 8, "retroinfer": 1 / 16, "kvdrive": 1 / 16}
"""Vectors of a token that a selection reads: two of each 8, one of 8, one of 16."""
KEPT = 68
"""Sinks and local tokens."""
THIN, SEVEN_B = 0.19e9, 15.2e9
"""Bytes of weights: of kv7b-thin, and of the model that has such KV."""


def modelled(row: Json, machine: Machine, micro_batches: int, weights: float) -> Json:
    """A row of `bench.decode` on `machine`: tokens a second, and ms of stages for a token of all
    texts. `weights`: bytes of the model."""
    system, model = row["system"].split(",")[0], SHAPES["kv7b-thin"]
    layers, texts, tokens = model.num_layers, row["sequences"], row["tokens"]
    pack = layout_of(system_named(system), model, "bfloat16").pack_bytes
    vectors = 2.0 * model.num_kv_heads * model.head_dim  # bytes of keys, or values, of a token
    reads = row["bytes_per_token"] / pack  # of a text
    ssd = reads * (1 - row["unused_share"])
    early = min(reads * row["ahead_share"], ssd)
    host = row["host_hits"] * ssd / (1 - row["device_hits"] - row["host_hits"])
    selected = row["budget"] * tokens
    layer = Layer(
        weights=weights / layers, attended=2 * (selected + KEPT) * vectors,
        index=INDEX[system] * tokens * vectors,
        slots=row["window"] * selected / 16 * model.num_kv_heads,
        host=np.full(texts, (host + early) * pack / layers),
        ssd=np.full(texts, (ssd - early) * pack / layers),
    )  # fmt: skip
    found = layer.stages(machine, micro_batches)
    behind = texts * (reads - ssd + early) * pack / machine.ssd  # in what is idle of the SSD
    step = layers * found.pop("all")
    step += max(0.0, behind - (step - layers * found["ssd"]))
    return {
        "system": row["system"], "sequences": texts, "tokens": tokens,
        "machine": machine.name, "weights_gb": weights / 1e9,
        "micro_batches": micro_batches, "tokens_s": texts / step, "step_ms": 1e3 * step,
        "stages_ms": {name: 1e3 * layers * spent for name, spent in found.items()},
    }  # fmt: skip


def of_counts(rows: Sequence[Json], paper: Paper) -> list[Json]:
    """Rows on every machine, for thin weights and those of a 7B; `kvdrive` with the best number of
    micro-batches unless its name says that it has none, all others with one.

    `over_best_rival`: tokens a second over those of the best other system of the same result;
    `bound`: the same if nothing but computing took time.
    """
    found = []
    for machine, weights in product(map(paper.machine, range(3)), (THIN, SEVEN_B)):
        mine = []
        for row in rows:
            if row["system"].split(",")[0] not in INDEX:
                continue
            whole = "kvdrive" not in row["system"] or row["system"].endswith(WHOLE)
            mine.append(max(
                (modelled(row, machine, count, weights)
                 for count in MICRO_BATCHES[: 1 if whole else 4]),
                key=lambda one: one["tokens_s"],
            ))  # fmt: skip
        best = max(one["tokens_s"] for one in mine if "kvdrive" not in one["system"])
        for one in mine:
            computing = one["sequences"] / (1e-3 * one["stages_ms"]["compute"])
            one |= {"over_best_rival": one["tokens_s"] / best, "bound": computing / best}
        found += mine
    return found


WHOLE = ("no micro-batches", "none of these")
"""How names of rows without micro-batches end."""


# -- the paper's machines --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A model of the paper, whose heads have 128 dimensions."""

    name: str
    layers: int
    heads: int
    """KV heads."""
    weights: float
    hits: dict[str, float]
    """Table 3, with windows of two selections: ShadowKV and RetroInfer by LRU, KVDrive by
    lookahead."""

    @property
    def row(self) -> float:
        """Bytes of a token's keys, or values, in a layer."""
        return 2.0 * self.heads * 128


MODELS = (
    Model(name="Llama-3-8B", layers=32, heads=8, weights=16.1e9,
          hits={"shadowkv": 0.842, "retroinfer": 0.807, "kvdrive": 0.815}),
    Model(name="Qwen3-8B", layers=36, heads=8, weights=16.4e9,
          hits={"shadowkv": 0.81, "retroinfer": 0.70, "kvdrive": 0.79}),
    Model(name="Phi-4-mini", layers=32, heads=8, weights=7.7e9,
          hits={"shadowkv": 0.861, "retroinfer": 0.783, "kvdrive": 0.81}),
)  # fmt: skip
CONTEXTS = ((60_000, 8), (90_000, 4), (120_000, 4), (240_000, 2), (360_000, 2))
"""Tokens and batch of Figure 13."""
SHARE = 1 / 64


def paper_layer(
    model: Model, system: str, tokens: int, texts: int, *, hits: float | None = None,
    window: float = 2, in_host: float = 1.0,
) -> Layer:  # fmt: skip
    """`hits`: default: those of the paper; `in_host`: the share of what windows lack that host
    memory has."""
    selected = SHARE * tokens
    known = 0.0 if system == "quest" else model.hits[system]
    size = selected * model.row * (1 if system == "shadowkv" else 2)  # it fetches values alone
    moved = np.full(texts, size * (1 - (known if hits is None else hits)))
    return Layer(
        weights=model.weights / model.layers, attended=2 * (selected + KEPT) * model.row,
        index=INDEX[system] * tokens * model.row,
        slots=0 if system == "quest" else window * selected / 16 * model.heads,
        host=moved * in_host, ssd=moved * (1 - in_host),
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Paper:
    """The paper's machines under some assumptions."""

    call_s: float = CALL_S
    slow: float = 1.0
    """See `Machine`, as of the one before."""
    windows: tuple[float, ...] = (2.0,)
    """That KVDrive may take. The paper gives hit rates of two selections; here a selection more
    halves the misses, which favours KVDrive."""

    def machine(self, which: int) -> Machine:
        """L20, H20 or 4090."""
        return replace(MACHINES[which], call_s=self.call_s, slow=self.slow)

    def layer_s(
        self, model: Model, system: str, machine: Machine, cell: tuple[int, int],
        in_host: float = 1.0,
    ) -> tuple[float, float]:  # fmt: skip
        """Seconds of a layer with the best micro-batches and window that a system has; which."""
        if system != "kvdrive":
            return paper_layer(model, system, *cell).stages(machine, 1)["all"], 2.0
        return min(
            (paper_layer(
                model, system, *cell, window=window, in_host=in_host,
                hits=1 - (1 - model.hits[system]) * 0.5 ** (window - 2),
            ).stages(machine, cut)["all"], window)
            for cut, window in product(MICRO_BATCHES, self.windows)
        )  # fmt: skip

    def over(self, model: Model, machine: Machine, cell: tuple[int, int], *rivals: str) -> float:
        """Tokens a second of KVDrive over the best of its rivals."""
        best = min(self.layer_s(model, rival, machine, cell)[0] for rival in rivals)
        return best / self.layer_s(model, "kvdrive", machine, cell)[0]

    def waits(self, system: str, cell: tuple[int, int] = (60_000, 8)) -> float:
        """The share of a layer, on an L20, in which nothing is computed."""
        found = paper_layer(MODELS[0], system, *cell).stages(self.machine(0), 1)
        return 1 - found["compute"] / found["all"]

    def claims(self) -> list[tuple[str, float, float]]:
        """(what, what the paper says, what the model says)."""
        l20, h20, rtx = map(self.machine, range(3))
        llama, cells, rivals = MODELS[0], [*product(MODELS, CONTEXTS)], ("quest", "shadowkv",
                                                                        "retroinfer")  # fmt: skip
        text = 120_000 * 2 * llama.row  # bytes of a layer
        far = [self.over(m, where, c, *rivals) for where in (h20, rtx) for m, c in cells]
        dense = int((h20.room - llama.weights) / (text * llama.layers))
        dense_s = h20.compute_s(llama.weights / llama.layers, dense * text) / dense
        kept = text * (2 * SHARE + 1 / 32) * llama.layers  # windows and index
        drive = int(0.9 * (rtx.room - llama.weights) / kept)
        drive_s = self.layer_s(llama, "kvdrive", rtx, (120_000, drive))[0] / drive
        held = l20.host / (8 * 122_000 * 2 * llama.row * llama.layers)
        memory, ssd = (
            self.layer_s(llama, "kvdrive", l20, (122_000, 8), share)[0] for share in (1.0, held)
        )
        return [
            ("Figure 4: select and fetch in ShadowKV, 60k, 8 texts", 0.5, self.waits("shadowkv")),
            ("Figure 4: in RetroInfer", 0.5, self.waits("retroinfer")),
            ("Figure 4: in Quest", 0.5, self.waits("quest")),
            ("Figure 13: most over ShadowKV, L20", 1.70,
             max(self.over(m, l20, cell, "shadowkv") for m, cell in cells)),
            ("the same if nothing but computing took time", 1.70,
             max(1 / (1 - paper_waits(m, cell, l20)) for m, cell in cells)),
            ("Figure 14: most over the best rival, H20 and 4090", 1.53, max(far)),
            ("Figure 14: least", 1.23, min(far)),
            ("Figure 16: window at one text", 2,
             self.layer_s(llama, "kvdrive", l20, (120_000, 1))[1]),
            ("Figure 16: window at four texts", 4,
             self.layer_s(llama, "kvdrive", l20, (120_000, 4))[1]),
            ("Figure 3: MB a token, nothing kept, 60k at 6.25%", 500,
             4 * SHARE * 60_000 * 2 * llama.row * llama.layers / 1e6),
            ("Figure 13: FlexGen's tokens a second, 120k, at most", 1.0,
             0.7 * l20.link / (text * llama.layers)),
            ("Figure 20: Quest's index over KVDrive's", 4.0, INDEX["quest"] / INDEX["kvdrive"]),
            ("Figure 21: from the SSD over host memory alone", 0.60, memory / ssd),
            ("Figure 23: tokens a second of a 4090 over an H20 in memory", 3.0, dense_s / drive_s),
            ("Figure 23: memory of an H20 over a 4090's", 4.0,
             (llama.weights + dense * text * llama.layers) / (llama.weights + dense * kept)),
        ]  # fmt: skip


def paper_waits(model: Model, cell: tuple[int, int], machine: Machine) -> float:
    """The share of a layer of ShadowKV in which nothing is computed."""
    found = paper_layer(model, "shadowkv", *cell).stages(machine, 1)
    return 1 - found["compute"] / found["all"]


def like_figure_4(paper: Callable[[float], Paper], low: float, high: float) -> Paper:
    """The one between two numbers with which ShadowKV and RetroInfer wait for half of a layer on
    average, as the text beside Figure 4 says."""
    for _ in range(40):
        middle = (low + high) / 2
        found = paper(middle)
        wait = (found.waits("shadowkv") + found.waits("retroinfer")) / 2
        low, high = (middle, high) if wait < 0.5 else (low, middle)
    return found


def assumptions() -> dict[str, Paper]:
    """Data sheets alone; two ways of being as slow as Figure 4 says; the second one with wider
    windows besides."""
    slow = like_figure_4(lambda value: Paper(slow=value), 1.0, 10.0)
    return {
        "rates": Paper(),
        "calls": like_figure_4(Paper, 0.0, 1e-3),
        "slow": slow,
        "wide": replace(slow, windows=(2.0, 3.0, 4.0)),
    }


def of_paper(papers: dict[str, Paper]) -> list[Json]:
    """Claims beside the model. `within`: by which assumptions they are within a quarter."""
    rows = []
    for several in zip(*(paper.claims() for paper in papers.values()), strict=True):
        what, said, _ = several[0]
        found = dict(zip(papers, [one[2] for one in several], strict=True))
        near = [name for name, value in found.items() if abs(value / said - 1) <= 0.25]
        rows.append({"what": what, "paper": said, **found, "within": ", ".join(near)})
    return rows


def of_parts(papers: dict[str, Paper]) -> list[Json]:
    """Tokens a second of KVDrive on an L20 over those without micro-batches and with windows of two
    selections, for each of the paper's contexts: with one of them, and both."""
    rows = []
    for (name, paper), cell in product(papers.items(), CONTEXTS):
        model, machine = MODELS[0], paper.machine(0)

        def fastest(
            cuts: Sequence[int], windows: Sequence[float], cell: tuple[int, int] = cell,
            model: Model = model, machine: Machine = machine,
        ) -> float:  # fmt: skip
            return min(
                paper_layer(
                    model, "kvdrive", *cell, window=window,
                    hits=1 - (1 - model.hits["kvdrive"]) * 0.5 ** (window - 2),
                ).stages(machine, cut)["all"]
                for cut, window in product(cuts, windows)
            )  # fmt: skip

        neither = fastest((1,), (2.0,))
        rows.append({
            "as": name, "tokens": cell[0], "texts": cell[1],
            "micro_batches": neither / fastest(MICRO_BATCHES, (2.0,)),
            "windows": neither / fastest((1,), (2.0, 3.0, 4.0)),
            "both": neither / fastest(MICRO_BATCHES, (2.0, 3.0, 4.0)),
        })  # fmt: skip
    return rows


def main() -> None:
    """The command."""
    p = command(__doc__)
    p.add_argument("counts", type=Path, nargs="*", help="results of bench.decode")
    args: argparse.Namespace = p.parse_args()
    papers = assumptions()
    counted = [
        {"counts": path.name, "as": name} | one
        for path in args.counts
        for name in ("rates", "calls", "slow")
        for one in of_counts(json.loads(path.read_text())["rows"], papers[name])
    ]
    columns = (
        "as", "system", "sequences", "tokens", "machine", "weights_gb", "micro_batches", "tokens_s",
        "over_best_rival", "bound",
    )  # fmt: skip
    print(table([[row[c] for c in columns] for row in counted], columns))
    claims = of_paper(papers)
    print(table([[*row.values()] for row in claims], [*claims[0]]))
    parts = of_parts({name: papers[name] for name in ("rates", "calls", "slow")})
    print(table([[*row.values()] for row in parts], [*parts[0]]))
    setting = {name: asdict(paper) for name, paper in papers.items()}
    finish(args, None, {"setting": setting, "rows": counted, "paper": claims, "parts": parts})


if __name__ == "__main__":
    main()
