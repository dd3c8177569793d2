"""Train the reference checkpoint: copying heads first, then ledgers of growing length.

    python -m bench.train_reference --out /data/reference-run        # starts, or resumes
    python -m bench.train_reference --out /data/reference-run --export ckv_jax/data/reference

Every batch depends on the seed and the step alone, so a run that was stopped continues as if it
had not been. A stage ends when its accuracy goal is reached, or at its last step.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp

from bench.tasks.batches import LedgerBatch, Repeats, ahead, ledger_batch, repeats, stretched
from bench.tasks.dense import Params, answer_logits, text_logits
from bench.tasks.initial import initial
from ckv_jax.data import words
from ckv_jax.data.ledger import FAMILIES
from ckv_jax.model.config import ModelConfig

CONFIG = ModelConfig(
    vocab_size=len(words.vocabulary()),
    hidden_size=128,
    intermediate_size=256,
    num_layers=16,
    num_heads=4,
    num_kv_heads=4,
    head_dim=32,
    rope_theta=3e7,
    max_position_embeddings=8192,
    tie_word_embeddings=True,
    eos_token_ids=(0,),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One length of the curriculum; `tokens` 0 is the copying warm-up."""

    name: str
    batch: int
    tokens: int = 0
    questions: int = 0
    steps: int
    goal: float  # running accuracy of the worst full-weight family that ends the stage
    rate: float = 1e-3
    density: float = 1.0  # most facts, as a multiple of what a test ledger holds
    light: bool = False  # no gradient through the prefix's hidden states
    cooling: bool = False  # the rate falls linearly to nothing at the last step
    stretch: bool = False  # let half of the ledgers stand at positions up to 4,096


STAGES = (
    Stage(name="copy", batch=64, steps=3000, goal=0.9),
    Stage(name="192", batch=8, tokens=192, questions=24, steps=170, goal=0.95),
    Stage(name="512", batch=2, tokens=512, questions=32, steps=120, goal=0.97),
    Stage(name="256", batch=5, tokens=256, questions=28, steps=300, goal=0.94, rate=6e-4),
    Stage(name="512b", batch=2, tokens=512, questions=32, steps=100, goal=0.95, rate=5e-4),
    Stage(name="1024", batch=1, tokens=1024, questions=48, steps=30, goal=0.95, rate=5e-4),
    Stage(
        name="1024 dense",
        batch=1,
        tokens=1024,
        questions=96,
        steps=200,
        goal=0.96,
        rate=5e-4,
        density=3.0,
        stretch=True,
    ),
    Stage(
        name="2048",
        batch=1,
        tokens=2048,
        questions=128,
        steps=30,
        goal=0.96,
        rate=5e-4,
        density=2.0,
        stretch=True,
    ),
    Stage(
        name="4096",
        batch=1,
        tokens=4096,
        questions=96,
        steps=75,
        goal=0.99,
        rate=4e-4,
        light=True,
    ),
    Stage(
        name="4096 cooling",
        batch=1,
        tokens=4096,
        questions=128,
        steps=110,
        goal=0.99,
        rate=4e-4,
        light=True,
        cooling=True,
    ),
)
_COPY_TOKENS = 48
_LONGEST = 4096
_WEIGHTS = (1.0, 1.0, 1.0, 0.5, 0.5)  # of each family in the loss: the hard ones are noise


def optimiser(rate: float) -> optax.GradientTransformation:
    return optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.scale_by_adam(b1=0.9, b2=0.98),
        optax.scale(-rate),
    )


def copy_loss(params: Params, data: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
    """Cross-entropy over the repeats, and (right, asked)."""
    tokens, targets, weights = data
    logits = text_logits(params, CONFIG, tokens)
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
    right = (logits.argmax(-1) == targets) * weights
    total = weights.sum()
    return (loss * weights).sum() / total, jnp.stack([right.sum(), total])[:, None]


def ledger_loss(
    params: Params, data: tuple[jax.Array, ...], light: bool
) -> tuple[jax.Array, jax.Array]:
    """Cross-entropy of the answers, by `_WEIGHTS` over families, and (right, asked) of each."""
    tokens, questions, lengths, answers, families, positions = data
    logits = answer_logits(params, CONFIG, tokens, questions, lengths, positions, light=light)
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, answers)
    kinds = (families[:, :, None] == np.arange(len(FAMILIES))[None, None]).astype(jnp.float32)
    right = (logits.argmax(-1) == answers).astype(jnp.float32)[:, :, None] * kinds
    asked = kinds.sum((0, 1))
    each = (loss[:, :, None] * kinds).sum((0, 1)) / jnp.maximum(asked, 1.0)
    weights = np.asarray(_WEIGHTS) / sum(_WEIGHTS)
    return (each * weights).sum(), jnp.stack([right.sum((0, 1)), asked])


@partial(jax.jit, donate_argnums=(0, 1), static_argnames="light")
def train_step(
    params: Params,
    moments: Any,
    rate: jax.Array,
    copy: tuple[jax.Array, ...],
    ledger: tuple[jax.Array, ...] | None,
    light: bool,
) -> tuple[Params, Any, jax.Array, jax.Array]:
    """One Adam step on the copying loss, plus the ledger's where there is one."""

    def loss(params: Params) -> tuple[jax.Array, jax.Array]:
        value, counts = copy_loss(params, copy)
        if ledger is not None:
            value, (more, counts) = 0.3 * value, ledger_loss(params, ledger, light)
            value = value + more
        return value, counts

    (value, counts), grads = jax.value_and_grad(loss, has_aux=True)(params)
    updates, moments = optimiser(1.0).update(grads, moments, params)
    updates = jax.tree.map(lambda leaf: leaf * rate, updates)
    return optax.apply_updates(params, updates), moments, value, counts


def batch_of(stage: Stage, seed: int, step: int) -> tuple[Any, Any]:
    """The copying batch and the ledger batch (None in the warm-up) of one step."""
    rng = np.random.default_rng((seed, 1, step))
    text: Repeats = repeats(rng, stage.batch if not stage.tokens else 8, _COPY_TOKENS)
    copy = (text.tokens, text.targets, text.weights)
    if not stage.tokens:
        return copy, None
    page: LedgerBatch = ledger_batch(
        rng, stage.batch, stage.tokens, stage.questions, max_density=stage.density
    )
    end = _LONGEST if stage.stretch else 0
    positions = stretched(rng, stage.tokens, end)
    return copy, (
        page.tokens, page.questions, page.lengths, page.answers, page.families, positions,
    )  # fmt: skip


class Run:
    """Parameters, Adam's moments and the place in the curriculum, kept in Orbax checkpoints."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.manager = ocp.CheckpointManager(
            folder.absolute() / "checkpoints",
            options=ocp.CheckpointManagerOptions(max_to_keep=4, enable_async_checkpointing=False),
        )
        params = initial(CONFIG, seed)
        self.state = {
            "params": params,
            "moments": optimiser(1.0).init(params),
            "place": {"step": np.array(0), "stage": np.array(0), "into": np.array(0)},
        }
        latest = self.manager.latest_step()
        if latest is not None:
            target = jax.tree.map(ocp.utils.to_shape_dtype_struct, self.state)
            self.state = self.manager.restore(latest, args=ocp.args.StandardRestore(target))

    @property
    def place(self) -> dict[str, int]:
        return {name: int(value) for name, value in self.state["place"].items()}

    def advance(self, **place: int) -> None:
        self.state["place"] = {name: np.array(value) for name, value in place.items()}

    def save(self) -> None:
        self.manager.save(self.place["step"], args=ocp.args.StandardSave(self.state))


def train(folder: Path, seed: int, stages: tuple[Stage, ...], save_every_s: float) -> None:
    """Run the stages that are left, with a line of progress every ten steps."""
    run = Run(folder, seed)
    while (place := run.place)["stage"] < len(stages):
        _run_stage(run, stages[place["stage"]], seed, save_every_s)
        place = run.place
        run.advance(step=place["step"], stage=place["stage"] + 1, into=0)
        run.save()


def _run_stage(run: Run, stage: Stage, seed: int, save_every_s: float) -> None:
    place = run.place
    first = place["step"]
    batches = ahead(partial(batch_of, stage, seed), first)
    recent, saved, clock = None, time.monotonic(), time.monotonic()
    for into in range(place["into"], stage.steps):
        copy, ledger = next(batches)
        rate = stage.rate * min(1.0, (into + 1) / 20)
        rate *= 1 - into / stage.steps if stage.cooling else 1
        state = run.state
        state["params"], state["moments"], loss, counts = train_step(
            state["params"], state["moments"], jnp.float32(rate), copy, ledger, stage.light
        )
        step = first + into - place["into"] + 1
        run.advance(step=step, stage=place["stage"], into=into + 1)
        counts = np.asarray(counts)
        recent = counts if recent is None else 0.95 * recent + counts
        accuracy = recent[0] / np.maximum(recent[1], 1)
        if (into + 1) % 10 == 0:
            each, clock = (time.monotonic() - clock) / 10, time.monotonic()
            shown = " ".join(f"{value:.3f}" for value in accuracy)
            print(
                f"{time.strftime('%H:%M:%S')} step {step} stage {stage.name} {into + 1} "
                f"loss {float(loss):.3f} accuracy {shown} {each:.2f} s/step",
                flush=True,
            )
        if time.monotonic() - saved > save_every_s:
            run.save()
            saved = time.monotonic()
        core = [value for value, weight in zip(accuracy, _WEIGHTS, strict=False) if weight == 1]
        if into >= 40 and min(core) >= stage.goal:
            break


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="the run's folder")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save-every", type=float, default=300, help="seconds")
    parser.add_argument("--stages", type=Path, help="JSON: changes to stages, by name")
    args = parser.parse_args()
    stages = STAGES
    if args.stages is not None:
        changes = json.loads(args.stages.read_text())
        stages = tuple(replace(stage, **changes.get(stage.name, {})) for stage in STAGES)
    train(args.out, args.seed, stages, args.save_every)


if __name__ == "__main__":
    main()
