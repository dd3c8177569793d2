"""Benchmarks and evaluations that people have, unpatched, in environments of their own.

The environments are made once, in the user's cache folder; without an index that has the package a
test is skipped, with pip's reason.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import venv
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from server.serving import MODEL, Served

from ckv_jax.data.ledger import make_ledger
from ckv_jax.model.tokenizer import load_tokenizer
from ckv_jax.user_cache import cache_folder

pytestmark = [pytest.mark.slow, pytest.mark.nightly, pytest.mark.timeout(1200)]
REFERENCE = Path(__file__).resolve().parents[2] / "ckv_jax" / "data" / "reference"
_INSTALL_S = 900


def environment(name: str, *steps: tuple[str, ...], **settings: str) -> Path:
    """The folder of commands of an environment that these calls of `pip install` made, under these
    settings; skips where they fail."""
    home = cache_folder() / "clients" / name
    made = home / "made"
    done = made.read_text().splitlines() if made.exists() else []
    if not made.exists():
        venv.create(home, with_pip=True, clear=True)
    for packages in steps:
        if (line := " ".join(packages)) in done:
            continue
        pip = [home / "bin" / "python", "-m", "pip", "install", "--quiet", *packages]
        try:
            ended = subprocess.run(
                pip,
                capture_output=True,
                text=True,
                timeout=_INSTALL_S,
                env={**os.environ, **settings},
            )
        except subprocess.TimeoutExpired:
            pytest.skip(f"{packages[-1]} does not install within {_INSTALL_S} s")
        if ended.returncode:
            pytest.skip(f"{packages[-1]} does not install: {ended.stderr.strip().splitlines()[-1]}")
        done.append(line)
        made.write_text("\n".join(done))
    return home / "bin"


def run(*command: object, cwd: Path) -> str:
    """What a command of another environment prints."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    env |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    ended = subprocess.run(
        [str(word) for word in command], cwd=cwd, env=env, text=True, timeout=600,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout[-4000:]
    return ended.stdout


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server over the checkpoint that ships with the package."""
    store = tmp_path_factory.mktemp("reference") / "kv"
    server = Served(REFERENCE, store, "--no-guard-disk", "--store-tokens", 128)
    yield server
    assert server.stop() == 0


def tokenizer_alone(folder: Path) -> Path:
    """A folder with the reference's tokenizer and no model, by whose type transformers would take a
    tokenizer of Qwen's for it."""
    folder.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(REFERENCE / name, folder)
    return folder


# -- lm-evaluation-harness -------------------------------------------------------------------------

_TASK = """
task: ledger
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{answer}}}}"
metric_list: [{{metric: acc}}]
"""


def ledger_questions(count: int) -> list[dict]:
    """Questions after one document, each with four choices of which the first is right."""
    rng = np.random.default_rng(3)
    ledger, tokenizer = make_ledger(rng, 300), load_tokenizer(REFERENCE)
    document = tokenizer.decode(ledger.tokens.tolist())
    found = []
    for row in range(count):
        asked = ledger.questions[row][: ledger.lengths[row]].tolist()
        others = rng.permutation(np.setdiff1d(ledger.answers, ledger.answers[row]))[:3]
        choices = [tokenizer.decode([int(one)]) for one in (ledger.answers[row], *others)]
        question = f"{document.strip()} {tokenizer.decode(asked).strip()}"
        found.append({"question": question, "choices": choices, "answer": 0})
    return found


def chosen_by_transformers(questions: list[dict]) -> list[list[float]]:
    """Log probability of each choice of each question."""
    import torch
    from transformers import AutoModelForCausalLM

    tokenizer = load_tokenizer(REFERENCE)
    model = AutoModelForCausalLM.from_pretrained(REFERENCE, dtype=torch.float32).eval()
    found = []
    for one in questions:
        ids = torch.tensor(tokenizer.encode(one["question"]).tolist())[None]
        with torch.no_grad():
            last = torch.log_softmax(model(ids).logits[0, -1], -1)
        choices = [tokenizer.encode(f" {choice}").tolist() for choice in one["choices"]]
        found.append([float(last[choice]) for (choice,) in choices])
    return found


def test_multiple_choice_of_lm_eval_is_that_of_transformers(
    reference: Served, tmp_path: Path
) -> None:
    commands = environment("lm-eval", ("lm-eval[api]>=0.4.9", "transformers"))
    questions = ledger_questions(8)
    tokenizer = tokenizer_alone(tmp_path / "tokenizer")
    data = tmp_path / "ledger.jsonl"
    data.write_text("\n".join(map(json.dumps, questions)))
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "ledger.yaml").write_text(_TASK.format(data=data))
    run(
        commands / "python", "-m", "lm_eval", "--model", "local-completions", "--model_args",
        f"model={MODEL},base_url={reference.url}/v1/completions,tokenizer={tokenizer},"
        "num_concurrent=2,max_length=4096",
        "--tasks", "ledger", "--include_path", tmp_path / "tasks",
        "--output_path", tmp_path / "out", "--log_samples", cwd=tmp_path,
    )  # fmt: skip
    (samples,) = (tmp_path / "out").rglob("samples_ledger_*.jsonl")
    rows = sorted(map(json.loads, samples.read_text().splitlines()), key=lambda row: row["doc_id"])
    found = [[float(choice[0]) for choice in row["filtered_resps"]] for row in rows]
    expected = chosen_by_transformers(questions)
    np.testing.assert_allclose(found, expected, atol=2e-3)
    assert np.argmax(found, axis=1).tolist() == np.argmax(expected, axis=1).tolist()


# -- GuideLLM --------------------------------------------------------------------------------------

GUIDELLM = ("guidellm>=0.8", "torch==2.13.0")  # a small torch, for CPUs


def test_no_request_of_guidellm_fails(reference: Served, tmp_path: Path) -> None:
    commands = environment("guidellm", GUIDELLM)
    tokenizer = tokenizer_alone(tmp_path / "tokenizer")
    said = run(
        commands / "guidellm", "run", "--disable-console",
        "--backend", f"kind=openai_http,target={reference.url},model={MODEL}",
        "--profile", "kind=concurrent,streams=2", "--constraint", "kind=max_requests,count=6",
        "--tokenizer", f"kind=huggingface_auto,model={tokenizer}",
        "--data", "kind=synthetic_text,prompt_tokens=64,output_tokens=16",
        "--output", f"kind=json,path={tmp_path / 'out.json'}", cwd=tmp_path,
    )  # fmt: skip
    (found,) = json.loads((tmp_path / "out.json").read_text())["benchmarks"]
    counts = {name: len(requests or ()) for name, requests in found["requests"].items()}
    assert (counts["successful"], counts["errored"]) == (6, 0), said[-2000:]


# -- vLLM's client ---------------------------------------------------------------------------------

VLLM = (
    # Its client is part of a package of GPU kernels: made from source it has none. What it imports:
    (
        "setuptools<81", "setuptools-scm", "setuptools-rust", "ninja", "wheel", "jinja2", "aiohttp",
        "requests", "pillow", "pybase64", "cbor2", "psutil", "pyzmq", "openai", "msgspec",
        "cloudpickle", "cachetools", "py-cpuinfo", "fastapi", "prometheus_client",
        "partial_json_parser", "uvicorn", "llguidance", "watchfiles", "orjson", "einops",
    ),
    ("--no-deps", "openai_harmony", "xgrammar", "apache-tvm-ffi"),
    ("--no-deps", "--no-build-isolation", "--no-binary", "vllm", "vllm==0.33.0"),
)  # fmt: skip
VLLM_SETTINGS = {"VLLM_TARGET_DEVICE": "empty", "VLLM_VERSION_OVERRIDE": "0.33.0"}


def test_no_request_of_vllm_fails(reference: Served, tmp_path: Path) -> None:
    commands = environment("benchmarks", GUIDELLM, *VLLM, **VLLM_SETTINGS)
    said = run(
        commands / "vllm", "bench", "serve", "--backend", "openai-chat",
        "--endpoint", "/v1/chat/completions", "--base-url", reference.url, "--model", MODEL,
        "--tokenizer", tokenizer_alone(tmp_path / "tokenizer"), "--dataset-name", "random",
        "--random-input-len", 64, "--random-output-len", 8, "--num-prompts", 4, "--ignore-eos",
        cwd=tmp_path,
    )  # fmt: skip
    for line, number in (("Successful", 4), ("Failed", 0)):
        assert re.findall(rf"^{line} requests:\s+(\d+)\s*$", said, re.M) == [str(number)]
    assert re.findall(r"^Total generated tokens:\s+(\d+)\s*$", said, re.M) == [str(4 * 8)]
