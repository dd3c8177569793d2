"""Selections to replay through caches: a seeded generator, a file, or the structured model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bench.common import Setting
from bench.floor import recording
from bench.lab import Lab
from ckv_jax.systems import SYSTEMS

SEED = 42


@dataclass(frozen=True, slots=True, kw_only=True)
class Selections:
    """What each question on each prefix selects."""

    name: str
    num_chunks: int
    """M."""
    chunks: np.ndarray
    """int [P, Q, G, N]: distinct chunk ids for each selection group; G packs per chunk."""
    attention: np.ndarray
    """float [P, Q, G, N]: Equation 1's A of each."""
    important: np.ndarray
    """float [P, Q, G, N]: share of the chunk's tokens among the question's important tokens."""
    everywhere: np.ndarray
    """float [P, Q, G, M]: A of every chunk."""

    def __post_init__(self) -> None:
        shape = self.chunks.shape
        if not shape == self.attention.shape == self.important.shape or (
            self.everywhere.shape != (*shape[:3], self.num_chunks)
        ):
            raise ValueError(f"got arrays of different shapes for selections {self.name!r}")


def synthetic(
    budget: float, *, prefixes: int = 24, questions: int = 64, groups: int = 4, chunks: int = 313
) -> Selections:
    """Seeded selections: Zipf importance of a prefix's chunks, changed by each question.

    A prefix has one order of importance that its groups share in part; a question moves every
    chunk by a log-normal factor of its own, and every token within it by an exponential one. The
    most important tokens of a question are as many as the chosen chunks hold.
    """
    rng = np.random.default_rng(SEED)
    tokens = 16
    count = max(1, round(budget * chunks))
    shape = (prefixes, questions, groups, count)
    chosen = np.zeros(shape, np.int32)
    attention, important = np.zeros(shape), np.zeros(shape)
    everywhere = np.zeros((*shape[:3], chunks), np.float32)
    zipf = 1.0 / np.arange(1, chunks + 1)
    for prefix in range(prefixes):
        common = rng.normal(size=chunks)
        for group in range(groups):
            taste = common + 0.5 * rng.normal(size=chunks)
            weight = np.empty(chunks)
            weight[np.argsort(taste)] = zipf
            mass = weight * np.exp(rng.normal(size=(questions, chunks)))
            spread = rng.exponential(size=(questions, chunks, tokens))
            per_token = mass[..., None] * spread
            per_token /= per_token.sum((1, 2), keepdims=True)
            score = per_token.sum(-1)  # [Q, M]
            ids = np.argpartition(-score, count - 1, axis=1)[:, :count]
            flat = per_token.reshape(questions, -1)
            limit = -np.partition(-flat, count * tokens - 1, axis=1)[:, count * tokens - 1]
            share = (per_token >= limit[:, None, None]).mean(-1)
            chosen[prefix, :, group] = ids
            everywhere[prefix, :, group] = score
            attention[prefix, :, group] = np.take_along_axis(score, ids, 1)
            important[prefix, :, group] = np.take_along_axis(share, ids, 1)
    return Selections(
        name=f"synthetic at {budget:.0%}",
        num_chunks=chunks,
        chunks=chosen,
        attention=attention,
        important=important,
        everywhere=everywhere,
    )


def recorded(path: Path) -> Iterator[Selections]:
    """Selections of a file: `RULE` int [P, Q, G, N] beside `RULE attention` float [P, Q, G, M].

    `RULE important` may give the shares of important tokens. Without it every token of a chosen
    chunk counts as important, as in ContiguousKV, where the chunk is what is selected.
    """
    with np.load(path, allow_pickle=False) as arrays:
        rules = [name for name in arrays if arrays[name].dtype.kind in "iu"]
        for rule in rules:
            if f"{rule} attention" not in arrays:
                raise ValueError(f"got no array '{rule} attention' in {path}, expected one")
            chunks = arrays[rule].astype(np.int32)
            everywhere = arrays[f"{rule} attention"]
            shares = f"{rule} important"
            yield Selections(
                name=rule,
                num_chunks=everywhere.shape[-1],
                chunks=chunks,
                attention=np.take_along_axis(everywhere, chunks, axis=-1).astype(np.float64),
                important=arrays[shares] if shares in arrays else np.ones(chunks.shape),
                everywhere=everywhere,
            )


def structured(setting: Setting, budgets: Sequence[float], questions: int) -> list[Selections]:
    """What the structured model chooses with `contiguous-kv`: real requests on the real engine.

    All of a prefix's questions at one budget after the other; every period is a group.
    """
    found: dict[float, list[list[list[tuple[np.ndarray, ...]]]]] = {b: [] for b in budgets}
    with Lab(setting) as lab, lab.engine(SYSTEMS["contiguous-kv"]) as engine:
        for prefix in range(setting.prefixes):
            for budget in budgets:
                asked = []
                for question in range(questions):
                    with recording(engine) as calls:
                        lab.ask(engine, prefix, prefix * questions + question, budget)
                    asked.append(
                        [
                            tuple(np.asarray(result[i])[0] for i in (0, 1, 3))
                            for call, result in zip(calls.calls, calls.results, strict=True)
                            if call.name == "select"
                        ]
                    )
                found[budget].append(asked)
        chunks = lab.prefix(0, engine).num_chunks
    selections = []
    for budget, parts in found.items():
        padded, attention, scores = (
            np.array([[[call[i] for call in asked] for asked in part] for part in parts])
            for i in range(3)
        )  # [P, Q, G, n], the same, [P, Q, G, M and more]
        real = padded >= 0  # padding is anywhere, but alike in number
        shape = (*real.shape[:3], int(real[0, 0, 0].sum()))
        ids = padded[real].reshape(shape)
        selections.append(
            Selections(
                name=f"structured at {budget:.0%}",
                num_chunks=chunks,
                chunks=ids,
                attention=attention[real].reshape(shape).astype(np.float64),
                important=np.ones(ids.shape),
                everywhere=scores[..., :chunks],
            )
        )
    return selections
