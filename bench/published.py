"""What the ContiguousKV paper reports of time and bytes, as its text gives it.

Bars and curves whose values the text does not name are kept as what it says of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["speedup", "gap", "loaded"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One number of the text."""

    kind: Kind
    value: float
    """Times faster, seconds, or a share."""
    where: str
    """Section and figure."""
    says: str
    rival: str = "impress"
    models: tuple[str, ...] = ("7B", "14B", "32B")
    datasets: tuple[str, ...] = ("SST-2", "SubJ", "TREC", "RTE")
    budget: float = 0.05
    tokens: int | None = None
    """Of a prefix, where it is not a dataset's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """What the text says of bars without numbers."""

    name: str
    where: str
    says: str


def _gap(model: str, seconds: float) -> Figure:
    return Figure(
        kind="gap", value=seconds, where="§5.2, Figure 11", models=(model,),
        datasets=("SST-2", "RTE"),
        says=f"P95 TTFT less than the others', {model}, mean of the three",
    )  # fmt: skip


def _loaded(dataset: str, model: str, share: float) -> Figure:
    return Figure(
        kind="loaded", value=share, where="Table 2", models=(model,), datasets=(dataset,),
        says=f"tokens from the SSD over IMPRESS's, {dataset}, {model}; taken to be at 5%",
    )  # fmt: skip


FIGURES = (
    Figure(kind="speedup", value=6.16, where="§5.2, Figure 10", rival="as-lru",
           says="mean TTFT of AS+LRU over ContiguousKV's"),
    Figure(kind="speedup", value=5.83, where="§5.2, Figure 10", rival="as-h2o-lfu",
           says="mean TTFT of AS+H2O+LFU over ContiguousKV's"),
    Figure(kind="speedup", value=3.85, where="§5.2, Figure 10",
           says="mean TTFT of IMPRESS over ContiguousKV's"),
    Figure(kind="speedup", value=2.6, where="§5.4, Figure 16(a)", models=("7B",),
           datasets=("RTE",), budget=0.25, tokens=10_000,
           says="mean TTFT of IMPRESS over ContiguousKV's, prefixes of 10,000 tokens"),
    _gap("7B", 0.42), _gap("14B", 0.89), _gap("32B", 1.17),
    _loaded("SST-2", "7B", 0.0621), _loaded("SST-2", "14B", 0.0664),
    _loaded("RTE", "7B", 0.0600), _loaded("RTE", "14B", 0.0571),
)  # fmt: skip

CLAIMS = (
    Claim(name="less at 25%", where="§5.2, Figure 10",
          says="every speed-up is smaller at 25% than at 5%"),
    Claim(name="chunks matter most", where="§5.3, Figure 12",
          says="chunks alone give more of the gain over IMPRESS than prefetching and policy"),
    Claim(name="prefetching and size", where="§5.3, Figure 12",
          says="prefetching gains more with 32B than with 14B"),
    Claim(name="policy and data", where="§5.3, Figure 12",
          says="the cache policy gains more on RTE than on SST-2"),
    Claim(name="I/O of IMPRESS", where="§3.1, Figure 5",
          says="waiting for reads is over 65% of IMPRESS's time at 5 to 50%, 7B, RTE"),
    Claim(name="longer prefixes", where="§5.4, Figure 16(a)",
          says="the speed-up over IMPRESS grows from 4,000 to 10,000 tokens, 7B, 25%"),
    Claim(name="longer periods", where="§5.4, Figure 15",
          says="periods of 4, 8, 16 layers are the faster the longer, 7B and 14B"),
    Claim(name="subperiods", where="§5.4, Figure 16(b)",
          says="subperiods of 4 layers are faster than of 1, and than of 8, the whole period"),
)  # fmt: skip
