"""How important tokens scatter over chunks of 64, and what reordering them saves (IMPRESS).

Taken from the jitted calls of real requests: which tokens IMPRESS chose in each layer, how far its
probe heads agreed, and what attention each token got. `amplification` is chunks loaded, in tokens,
over tokens chosen: in order of position; in the one order for all layers that our IMPRESS stores;
and in an order of its own for each layer, which the paper's implementation keeps (§5).
"""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from dataclasses import dataclass

import numpy as np

from bench.common import Json
from bench.floor import recording
from bench.lab import WARM_UP, Lab
from bench.measure import measured
from ckv_jax import Engine
from ckv_jax.systems import REORDER_EVERY, SYSTEMS

WARM = 10_000
"""The number of the first question before measuring, as in `Lab.warm`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """What one request chose, layer by layer, and why."""

    tokens: np.ndarray
    """bool [L, T]: chosen."""
    importance: np.ndarray
    """float [L, T]: share of the scoring heads' attention."""
    agreement: np.ndarray
    """float [L]: mean Jaccard index of the probe heads' sets."""
    fell_back: int
    """Layers that loaded all keys after that."""


def chosen(lab: Lab, engine: Engine, question: int, budget: float) -> Chosen:
    """Asks IMPRESS over prefix 0 and reads its choices off the calls."""
    with recording(engine) as found:
        sample = measured(lab, engine, 0, question, budget)
    layers, size = lab.config.num_layers, lab.work.prefix_tokens
    tokens, importance = np.zeros((layers, size), bool), np.zeros((layers, size))
    agreement = np.ones(layers)
    layer = 0
    asked = zip(found.calls, found.results, strict=True)
    # The first request of its shape begins with calls that only compile the fallback.
    for call, result in itertools.dropwhile(lambda pair: pair[0].name != "_by_probe", asked):
        if call.name in ("attend_tokens", "attend_all"):  # a layer ends
            layer += 1
        if call.name not in ("_by_probe", "by_heads", "by_keys"):
            continue
        ids, _, _, agreed, weight = (np.asarray(leaf) for leaf in result)
        tokens[layer] = False  # of the probe, if the layer fell back
        tokens[layer, ids[ids >= 0]] = True  # of any head
        importance[layer] = weight[:size] / weight.sum()
        if call.name == "_by_probe":
            agreement[layer] = agreed[0]
    return Chosen(
        tokens=tokens, importance=importance, agreement=agreement, fell_back=sample.fell_back
    )


def amplification(tokens: np.ndarray, order: np.ndarray | None, chunk: int) -> float:
    """Tokens of the chunks that hold any of `tokens` bool [R, L, T], over those chosen.

    `order` int [T] or [L, T] says which token is stored where; None: its position.
    """
    if order is not None:
        order = np.broadcast_to(order, tokens.shape[1:])
        tokens = np.take_along_axis(tokens, order[None], axis=2)
    padded = np.pad(tokens, ((0, 0), (0, 0), (0, -tokens.shape[2] % chunk)))
    loaded = padded.reshape(*padded.shape[:2], -1, chunk).any(-1).sum() * chunk
    return float(loaded / tokens.sum())


def scatter(lab: Lab, budget: float) -> Json:
    """IMPRESS at one budget, over prefix 0."""
    chunk = SYSTEMS["impress"].chunk_tokens
    with lab.engine(dataclasses.replace(SYSTEMS["impress"], reorder_every=0)) as engine:
        before = [chosen(lab, engine, WARM + i, budget) for i in range(REORDER_EVERY)]
        asked = [chosen(lab, engine, i, budget) for i in range(lab.setting.repeats)]
    tokens = np.stack([one.tokens for one in asked])
    mean = np.mean([one.importance for one in before], axis=0)  # [L, T]
    in_order = amplification(tokens, None, chunk)
    shared = amplification(tokens, np.argsort(-mean.mean(0), kind="stable"), chunk)
    by_layer = amplification(tokens, np.argsort(-mean, axis=1, kind="stable"), chunk)
    return {
        "jaccard": float(np.mean([one.agreement for one in asked])),
        "fallback_share": statistics.fmean(one.fell_back for one in asked) / lab.config.num_layers,
        "amplification": in_order,
        "reordered": shared,
        "reordered_by_layer": by_layer,
        "saved": in_order / shared,
        "saved_by_layer": in_order / by_layer,
    }


def loaded(lab: Lab, budget: float) -> Json:
    """Measured: read amplification of IMPRESS and of H2O, and our tokens as a share of IMPRESS's.

    IMPRESS after its reordering; all cold.
    """
    with lab.engine("impress") as engine:
        for turn in range(WARM_UP):
            lab.ask(engine, 0, WARM + turn, budget)
        engine.settle()
        impress = [measured(lab, engine, 0, i, budget) for i in range(lab.setting.repeats)]
    with lab.engine("as-h2o-lfu") as engine:
        h2o = [measured(lab, engine, 0, i, budget) for i in range(lab.setting.repeats)]
    with lab.engine("contiguous-kv") as engine:
        ours = [measured(lab, engine, 0, i, budget) for i in range(lab.setting.repeats)]
    return {
        "impress": statistics.fmean(sample.read_amplification for sample in impress),
        "as-h2o": statistics.fmean(sample.read_amplification for sample in h2o),
        "share_of_impress": sum(sample.demanded_bytes for sample in ours)
        / sum(sample.demanded_bytes for sample in impress),
        "attention_mass": statistics.fmean(sample.attention_mass for sample in ours),
    }
