"""Train the reference checkpoint: copying heads first, then ledgers of growing length.

    python -m bench.train_reference --out /data/reference-run        # starts, or resumes

Every batch depends on the seed and the step alone, so a run that was stopped continues as if it
had not been. A stage ends when its accuracy goal is reached, or at its last step.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp

from bench.common import amount, result_folder, whole
from bench.json_file import read_json, write_text
from bench.tasks.batches import LedgerBatch, ahead, ledger_batch, repeats, shuffled, stretched
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
    """One length of the curriculum; without `tokens`, a warm-up on copying alone."""

    name: str
    copies: int  # rows of the copying text
    batch: int = 0  # ledgers
    tokens: int = 0
    questions: int = 0
    steps: int
    goal: float  # running accuracy, of the worst family, that ends the stage
    rate: float = 1e-3
    density: float = 1.0  # most facts, as a multiple of what a test ledger holds
    light: bool = False  # no gradient through the prefix's hidden states
    cooling: bool = False  # the rate falls linearly to nothing at the last step
    stretch: bool = False  # let half of the texts stand at positions up to 4,096
    triples: int = 0  # copying is of so many shuffled triples: all that test words learn from


_long = partial(Stage, copies=1, batch=1, light=True, stretch=True, triples=341)

STAGES = (
    Stage(name="copy", copies=64, steps=800, goal=0.9),
    Stage(name="triples", copies=32, steps=800, goal=0.9, triples=16),
    Stage(
        name="192", copies=4, batch=8, tokens=192, questions=24, steps=300, goal=0.95, triples=32
    ),
    Stage(
        name="512", copies=2, batch=3, tokens=512, questions=48, steps=200, goal=0.95, density=2.0,
        stretch=True, triples=85,
    ),
    _long(name="1024", tokens=1024, questions=112, steps=400, goal=0.97, rate=8e-4, density=3.0),
    _long(name="2048", tokens=2048, questions=160, steps=80, goal=0.97, rate=6e-4, density=2.5),
    _long(name="4096", tokens=4096, questions=160, steps=80, goal=0.985, rate=5e-4, density=1.2),
    _long(
        name="1024 again", tokens=1024, questions=112, steps=250, goal=1.01, rate=8e-4, density=3.0
    ),
    _long(
        name="4096 cooling", tokens=4096, questions=160, steps=75, goal=1.01, rate=5e-4,
        density=1.2, cooling=True,
    ),
)  # fmt: skip
_COPY_TOKENS = 48
_LONGEST = 4096
_ASKED = FAMILIES[:-1]  # chains of two facts stand in the ledgers but are not asked: only noise


def optimiser() -> optax.GradientTransformation:
    """Muon (arXiv 2502.16982) for the stacked kernels, Adam for embeddings, biases and norms."""

    def matrices(params: Params) -> Any:
        each_layer = optax.contrib.MuonDimensionNumbers(reduction_axis=1, output_axis=2)
        return jax.tree.map(lambda leaf: each_layer if leaf.ndim == 3 else None, params)

    muon = optax.contrib.muon(
        learning_rate=1.0, adam_b2=0.98, consistent_rms=0.2, muon_weight_dimension_numbers=matrices
    )
    return optax.chain(optax.clip_by_global_norm(1.0), muon)


def copy_loss(params: Params, data: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
    """Cross-entropy over the repeats, and (right, asked)."""
    tokens, targets, weights, positions = data
    logits = text_logits(params, CONFIG, tokens, positions)
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
    right = (logits.argmax(-1) == targets) * weights
    total = weights.sum()
    return (loss * weights).sum() / total, jnp.stack([right.sum(), total])[:, None]


def ledger_loss(
    params: Params, data: tuple[jax.Array, ...], light: bool
) -> tuple[jax.Array, jax.Array]:
    """Cross-entropy of the answers, the mean over families, and (right, asked) of each."""
    tokens, questions, lengths, answers, families, positions = data
    logits = answer_logits(params, CONFIG, tokens, questions, lengths, positions, light=light)
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, answers)
    kinds = (families[:, :, None] == np.arange(len(_ASKED))[None, None]).astype(jnp.float32)
    right = (logits.argmax(-1) == answers).astype(jnp.float32)[:, :, None] * kinds
    asked = kinds.sum((0, 1))
    each = (loss[:, :, None] * kinds).sum((0, 1)) / jnp.maximum(asked, 1.0)
    return each.mean(), jnp.stack([right.sum((0, 1)), asked])


@partial(jax.jit, donate_argnums=(0, 1), static_argnames="light")
def train_step(
    params: Params,
    moments: Any,
    rate: jax.Array,
    copy: tuple[jax.Array, ...],
    ledger: tuple[jax.Array, ...] | None,
    light: bool,
) -> tuple[Params, Any, jax.Array, jax.Array]:
    """One step on the copying loss, plus the ledger's where there is one.

    Also returns (right, asked) of the copying and then of each family: float32 [2, 5].
    """

    def loss(params: Params) -> tuple[jax.Array, jax.Array]:
        value, copied = copy_loss(params, copy)
        answered = jnp.zeros((2, len(_ASKED)))
        if ledger is not None:
            more, answered = ledger_loss(params, ledger, light)
            value = value + more
        return value, jnp.concatenate([copied, answered], axis=1)

    (value, counts), grads = jax.value_and_grad(loss, has_aux=True)(params)
    updates, moments = optimiser().update(grads, moments, params)
    updates = jax.tree.map(lambda leaf: leaf * rate, updates)
    return optax.apply_updates(params, updates), moments, value, counts


def batch_of(stage: Stage, seed: int, step: int) -> tuple[Any, Any]:
    """The copying batch and the ledger batch (None in the warm-up) of one step."""
    rng = np.random.default_rng((seed, 1, step))
    end = _LONGEST if stage.stretch else 0
    if stage.triples:
        text = shuffled(rng, stage.copies, stage.triples)
    else:
        text = repeats(rng, stage.copies, _COPY_TOKENS)
    places = stretched(rng, text.tokens.shape[1], end)
    copy = (text.tokens, text.targets, text.weights, places)
    if not stage.tokens:
        return copy, None
    page: LedgerBatch = ledger_batch(
        rng, stage.batch, stage.tokens, stage.questions, asked=_ASKED, max_density=stage.density
    )
    positions = stretched(rng, stage.tokens, end)
    return copy, (
        page.tokens, page.questions, page.lengths, page.answers, page.families, positions,
    )  # fmt: skip


class Run:
    """Parameters, Adam's moments and the place in the curriculum, kept in Orbax checkpoints."""

    def __init__(self, folder: Path, seed: int) -> None:
        _same_run(folder, {"seed": seed, "stages": [stage.name for stage in STAGES]})
        self.manager = ocp.CheckpointManager(
            folder.absolute() / "checkpoints",
            options=ocp.CheckpointManagerOptions(max_to_keep=4, enable_async_checkpointing=False),
        )
        params = initial(CONFIG, seed)
        self.state = {
            "params": params,
            "moments": optimiser().init(params),
            "recent": np.zeros((2, 1 + len(_ASKED)), np.float32),  # decaying (right, asked)
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


def _same_run(folder: Path, about: dict[str, Any]) -> None:
    """Notes in the folder what is run there; ends the program if that is something else."""
    path = folder / "run.json"
    if not path.is_file():
        write_text(path, json.dumps(about) + "\n")
    elif (before := read_json(path)) != about:
        raise SystemExit(f"{folder} holds a run of {before}, got {about}: name another folder")


def train(run: Run, seed: int, stages: tuple[Stage, ...], save_every_s: float) -> None:
    """Run the stages that are left, with a line of progress every ten steps."""
    while (place := run.place)["stage"] < len(stages):
        _run_stage(run, stages[place["stage"]], seed, save_every_s)
        place = run.place
        run.advance(step=place["step"], stage=place["stage"] + 1, into=0)
        run.save()


def _run_stage(run: Run, stage: Stage, seed: int, save_every_s: float) -> None:
    place, state = run.place, run.state
    first = place["step"]
    batches = ahead(partial(batch_of, stage, seed), first)
    saved = clock = time.monotonic()
    if not place["into"]:
        state["recent"] = np.zeros_like(state["recent"])
    for into in range(place["into"], stage.steps):
        copy, ledger = next(batches)
        rate = stage.rate * min(1.0, (into + 1) / 20)
        rate *= 1 - into / stage.steps if stage.cooling else 1
        state["params"], state["moments"], loss, counts = train_step(
            state["params"], state["moments"], jnp.float32(rate), copy, ledger, stage.light
        )
        step = first + into - place["into"] + 1
        run.advance(step=step, stage=place["stage"], into=into + 1)
        state["recent"] = (0.95 * state["recent"] + np.asarray(counts)).astype(np.float32)
        right, asked = state["recent"]
        accuracy = right / np.maximum(asked, 1)
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
        judged = accuracy[1:] if stage.tokens else accuracy[:1]
        if into >= 40 and judged.min() >= stage.goal:
            break


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=result_folder, required=True, help="the run's folder")
    parser.add_argument("--seed", type=whole, default=0)
    parser.add_argument("--save-every", type=amount, default=300, help="seconds")
    args = parser.parse_args()
    run = Run(args.out, args.seed)
    train(run, args.seed, STAGES, args.save_every)


if __name__ == "__main__":
    main()
