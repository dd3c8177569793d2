"""Turn a training run into the checkpoint that ships: weights, tokenizer, model card.

    python -m bench.ship_reference --run /data/reference-run --out ckv_jax/data/reference

The card's accuracies are measured here, on ledgers of names that were never trained on, with the
weights as they are written.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
import textwrap
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench.accuracy import ask
from bench.common import existing_path, interval, positive, result_folder
from bench.json_file import read_json
from bench.tasks import tokenizer
from bench.tasks.dense import Params, answer_logits, join, split
from bench.train_reference import CONFIG, Run
from ckv_jax.config import EngineConfig
from ckv_jax.data import words
from ckv_jax.data.ledger import FAMILIES, Ledger
from ckv_jax.data.reference import LEARNED, demo_ledger
from ckv_jax.engine import Engine
from ckv_jax.model.weights import save_pretrained

_TRAINING = (
    "`python -m bench.train_reference --seed {seed}`: repeated random sequences, then random "
    "triples of words that come again in another order, then such triples beside ledgers of 192 to "
    "4,096 tokens, with Muon. The start is structured (`bench/tasks/initial.py`): the biases of "
    "some heads favour the tokens just before, some query and key kernels start aligned; nothing "
    "of the tasks is built in. {steps:,} steps."
)
_CHANCE = {"recall": 98, "multikey": 98, "induction": 6, "verify": 2, "tracking": 98}


def evaluate(params: Params, tokens: int, seeds: Sequence[int]) -> dict[str, tuple[int, int]]:
    """(right, asked) of every family with everything attended to, float32 activations."""
    answer = jax.jit(partial(_answers, params))
    found = {family: (0, 0) for family in FAMILIES}
    for seed in seeds:
        page = demo_ledger(seed, tokens, questions=None)
        right = np.asarray(answer(page.tokens, page.questions, page.lengths)) == page.answers
        for index, family in enumerate(FAMILIES):
            mine = right[page.families == index]
            before = found[family]
            found[family] = (before[0] + int(mine.sum()), before[1] + len(mine))
    return found


def _answers(params: Params, tokens: Any, questions: Any, lengths: Any) -> jax.Array:
    logits = answer_logits(params, CONFIG, tokens[None], questions[None], lengths[None])
    return logits[0].argmax(-1)


def by_engine(folder: Path, pages: Sequence[Ledger]) -> list[np.ndarray]:
    """bool [Q] a ledger: right answers of the engine at budget 1, in bfloat16."""
    config = EngineConfig(system="as-lru", prefill_block=4096)  # no request waits
    with (
        tempfile.TemporaryDirectory() as store,
        Engine.from_pretrained(folder, store=store, config=config) as engine,
    ):
        return [ask(engine, page, 1.0)[0] for page in pages]


def by_transformers(folder: Path, pages: Sequence[Ledger]) -> list[np.ndarray]:
    """The same by `transformers` on PyTorch, in bfloat16: the ledger once, then its questions side
    by side, each of which sees the ledger and itself."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    found = []
    with torch.no_grad():
        for page in pages:
            read = model(torch.from_numpy(page.tokens.astype(np.int64))[None], logits_to_keep=1)
            asked = np.arange(page.questions.shape[1]) < page.lengths[:, None]
            owner, place = np.nonzero(asked)
            own = (owner[:, None] == owner) & (place[:, None] >= place)
            seen = np.concatenate([np.ones((len(own), len(page.tokens)), bool), own], axis=1)
            said = model(
                torch.from_numpy(page.questions[asked].astype(np.int64))[None],
                torch.from_numpy(seen)[None, None],
                torch.from_numpy(len(page.tokens) + place)[None],
                read.past_key_values,
            ).logits[0].argmax(-1).numpy()  # fmt: skip
            found.append(said[np.cumsum(page.lengths) - 1] == page.answers)
    return found


def counts(pages: Sequence[Ledger], right: Sequence[np.ndarray]) -> dict[str, tuple[int, int]]:
    """(right, asked) of every family that was asked."""
    kinds, good = np.concatenate([page.families for page in pages]), np.concatenate(right)
    return {
        family: (int(good[kinds == index].sum()), int((kinds == index).sum()))
        for index, family in enumerate(FAMILIES)
        if (kinds == index).any()
    }


def card(
    results: dict[str, dict[str, tuple[int, int]]], *, seed: int, steps: int, compute: str
) -> str:
    """The README of the checkpoint."""
    lines = [
        "---", "license: apache-2.0", "library_name: transformers", "language: en", "tags:",
        "- qwen2", "- long-context", "- retrieval", "- synthetic", "---", "",
        "# ckv_jax reference checkpoint", "",
        f"A Qwen2.5-architecture model of {CONFIG.num_layers} layers, width {CONFIG.hidden_size}, "
        f"{CONFIG.num_kv_heads} KV heads of {CONFIG.head_dim} and {CONFIG.vocab_size} tokens, "
        "trained from nothing to answer",
        "questions about generated ledgers of up to 4,096 tokens. It exists to measure what is "
        "lost when only a part",
        "of a prefix's KV cache takes part in attention. It knows nothing of the world and is no "
        "use for anything else.", "",
        "## Data", "",
        "Ledgers of facts among filler sentences, generated by `ckv_jax/data/ledger.py`; five "
        "kinds of question, each answered",
        "in one token. Names and topics of the test split are never part of a training ledger "
        "(their embeddings are trained",
        "on random token sequences alone). Training saw no other text.", "",
        "| family | the document says | question | answer |", "|---|---|---|---|",
        "| recall | `code anna copper.` | `code anna` | copper |",
        "| multikey | `room anna lime.` and `team anna teal.` | `room anna` | lime |",
        "| induction | `sample atom laser science.` (many a class) | `sample orbit laser` | "
        "science |",
        "| verify | `check boat broken.` | `check boat` | no |",
        "| tracking | `let irene oslo.` and `trace kurt irene.` | `trace kurt` | oslo |", "",
        "## Training", "",
        *textwrap.wrap(f"{_TRAINING.format(seed=seed, steps=steps)} {compute}", 118), "",
        "## Accuracy with the whole prefix attended to", "",
        "Test split, weights in bfloat16; 95% Wilson intervals. First every question of each "
        "ledger, activations in float32; then",
        "50 questions per ledger by the engine (budget 1.0) and by transformers, all in bfloat16.",
        "",
        "| tokens | " + " | ".join(FAMILIES) + " |", "|---|" + "---|" * len(FAMILIES),
    ]  # fmt: skip
    for name, found in results.items():
        cells = []
        for family in FAMILIES:
            right, asked = found.get(family, (0, 0))
            low, high = interval(right, asked) if asked else (0.0, 0.0)
            cells.append(f"{right / asked:.1%} ({low:.1%} to {high:.1%})" if asked else "")
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    chance = " · ".join(f"{family} 1/{n}" for family, n in _CHANCE.items())
    lines += [
        "", f"Chance: {chance}.", "",
        "## Limits", "",
        "Questions must follow the ledger's wording. `tracking` was not asked in training "
        "and is guessed. Beyond 4,096",
        "tokens, or with several questions in one suffix, it was not trained and not measured. The "
        "tokenizer spells unknown words",
        "in letters and bytes, whose embeddings hardly learned.",
    ]  # fmt: skip
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--run", type=existing_path, required=True, help="the folder of a training run"
    )
    parser.add_argument("--out", type=result_folder, required=True, help="the checkpoint's folder")
    parser.add_argument("--documents", type=positive, default=4, help="test ledgers at each length")
    parser.add_argument("--lengths", type=positive, nargs="+", default=[512, 1024, 2048, 4096])
    parser.add_argument("--compute", default="", help="a sentence on hardware and time")
    args = parser.parse_args()
    about = args.run / "run.json"
    if not about.is_file():
        parser.error(f"{args.run} is no folder of a training run: it has no run.json")
    seed = read_json(about)["seed"]
    run = Run(args.run, seed)
    model = join(run.state["params"], CONFIG, dtype="bfloat16")
    shipped = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), split(model))
    results = {f"{n:,}": evaluate(shipped, n, range(args.documents)) for n in args.lengths}
    partial_folder = args.out.with_name(args.out.name + ".partial")
    shutil.rmtree(partial_folder, ignore_errors=True)
    save_pretrained(model, partial_folder)
    tokenizer.save(partial_folder)
    generation = {"do_sample": False, "eos_token_id": 0, "pad_token_id": 0}
    text = json.dumps(generation, indent=2) + "\n"
    (partial_folder / "generation_config.json").write_text(text, encoding="utf-8")
    pages = [demo_ledger(seed, asked=LEARNED) for seed in range(args.documents)]
    for name, answers in (("engine", by_engine), ("transformers", by_transformers)):
        results[f"4,096, {name}"] = counts(pages, answers(partial_folder, pages))
    for name, found in results.items():
        shown = "  ".join(f"{family} {r}/{n}" for family, (r, n) in found.items())
        print(f"{name} tokens: {shown}", flush=True)
    text = card(results, seed=seed, steps=run.place["step"], compute=args.compute)
    (partial_folder / "README.md").write_text(text, encoding="utf-8")
    shutil.rmtree(args.out, ignore_errors=True)
    partial_folder.rename(args.out)
    size = sum(file.stat().st_size for file in args.out.iterdir())
    print(f"{args.out}: {size / 1e6:.1f} MB, {len(words.vocabulary())} tokens")


if __name__ == "__main__":
    main()
