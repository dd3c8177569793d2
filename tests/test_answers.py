"""A document about a product that nobody knows, and eight questions, by every way of asking."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from command_line import Here
from server.applications import serving
from server.serving import MODEL

from ckv_jax import Engine, EngineConfig
from tests.real_model import smollm2_in_transformers

DOCUMENT = """The Zephyra 400 is a folding bicycle pump made by Oakhollow Tools. It was designed by
Marta Lindqvist in 2019. The pump costs 48 euros and comes in green.

The Zephyra 400 is built in the town of Varnby, in a workshop of eleven people. Each pump is tested
at a pressure of 9 bar before it leaves the workshop.

The pump weighs 310 grams. It has a wooden handle made of ash, and a hose that is 40 centimetres
long.

The most important rule: never oil the piston with anything but lanolin. Any other oil makes the
seal swell within a week.

The warranty lasts seven years. Repairs are sent to the workshop in Varnby, which returns a pump
within ten days. A spare seal costs 3 euros.
"""
QUESTIONS = {
    "What is the name of the product?": "Zephyra",
    "How much does the pump cost?": "48 euros",
    "In which town is the pump built?": "Varnby",
    "What may the piston be oiled with?": "lanolin",
    "Who designed the pump?": "Lindqvist",
    "How long does the warranty last?": r"(seven|7) years",
    "How much does the pump weigh?": "310 grams",
    "Which colour is the pump?": "green",
}
TOKENS = 24
EXACT = EngineConfig(budget=1.0, dtype="float32")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.usefixtures("optimised"),
]


@pytest.fixture(scope="module")
def home(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("pump")
    (home / "pump.txt").write_text(DOCUMENT)
    return home


@pytest.fixture(scope="module")
def engine(home: Path, smollm2: Path) -> Iterator[Engine]:
    with Engine.from_pretrained(smollm2, store=home / "kv", config=EXACT) as engine:
        yield engine


@pytest.fixture(scope="module")
def expected(engine: Engine, smollm2: Path) -> list[str]:
    """transformers' answers to the same messages."""
    import torch

    model, tokenizer = smollm2_in_transformers(smollm2), engine.tokenizer
    prompts = [tokenizer.encode(tokenizer.apply_chat(messages(each))) for each in QUESTIONS]
    longest = max(map(len, prompts))
    ids = torch.zeros((len(prompts), longest), dtype=torch.long)
    for row, prompt in zip(ids, prompts, strict=True):
        row[longest - len(prompt) :] = torch.from_numpy(prompt)
    mask = torch.stack([torch.arange(longest) >= longest - len(prompt) for prompt in prompts])
    found = model.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=TOKENS)
    rows = found[:, longest:].tolist()
    return [tokenizer.decode(row, skip_special=True).strip() for row in rows]


def messages(question: str) -> list[dict[str, str]]:
    return [{"role": "system", "content": DOCUMENT.strip()}, {"role": "user", "content": question}]


def right(answers: list[str]) -> int:
    return sum(
        re.search(fact, answer) is not None
        for answer, fact in zip(answers, QUESTIONS.values(), strict=True)
    )


def test_every_way_of_asking_gives_the_same_answers(
    engine: Engine,
    expected: list[str],
    home: Path,
    smollm2: Path,
    here: Here,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from ckv_jax import SamplingParams

    sampling = SamplingParams(max_tokens=TOKENS)
    store = ("--store", home / "kv", "--dtype", "float32")
    code, out, err = here("ingest", smollm2, home / "pump.txt", *store, "--name", "pump", "--json")
    assert code == 0, err
    prefix = engine.ingest(DOCUMENT)
    assert json.loads(out)["prefix"] == prefix.id

    answers = [engine.ask(prefix, question, sampling=sampling).text for question in QUESTIONS]
    assert right(answers) >= right(expected)
    assert "Zephyra" in answers[0]
    assert engine.ask("pump", next(iter(QUESTIONS))).text.startswith(answers[0])

    sure = engine.ask(prefix, "How long does the warranty last?", sampling=sampling)
    assert any("The warranty lasts seven years." in passage.text for passage in sure.citations)

    ask = ("ask", smollm2, *store, "--prefix", "pump", "--budget", 1, "--max-tokens", TOKENS)
    few = list(zip(QUESTIONS, answers, strict=True))[:3]
    for question, answer in few:
        code, out, err = here(*ask, question)
        assert code == 0, err
        assert out.strip().startswith(answer)

    lines = [{"question": question, "max_tokens": TOKENS} for question in QUESTIONS]
    (home / "lines.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    batch = ("batch", smollm2, home / "lines.jsonl", *store, "--out", home / "out.jsonl")
    code, _, err = here(*batch, "--prefix", "pump", "--budget", 1)
    assert code == 0, err
    rows = [json.loads(line) for line in (home / "out.jsonl").read_text().splitlines()]
    rows.sort(key=lambda row: row["line"])
    assert [row["text"].strip() for row in rows] == answers

    monkeypatch.setattr("sys.stdin", io.StringIO(f"{next(iter(QUESTIONS))}\n"))
    talk = ("chat", smollm2, home / "pump.txt", *store, "--budget", 1, "--max-tokens", TOKENS)
    code, out, err = here(*talk)
    assert code == 0, err
    assert out.startswith(answers[0]) and f"of {prefix.num_tokens} tokens" in " ".join(out.split())

    with serving(engine) as url:
        body = {"model": MODEL, "max_tokens": TOKENS, "temperature": 0}
        for question, answer in few:
            chat = body | {"messages": messages(question)}
            reply = httpx.post(f"{url}/v1/chat/completions", json=chat, timeout=120).json()
            assert reply["choices"][0]["message"]["content"].strip() == answer
            cached = reply["usage"]["prompt_tokens_details"]["cached_tokens"]
            assert cached >= prefix.num_tokens  # more where an earlier turn was stored
        stored = httpx.post(f"{url}/v1/prefixes", json={"document": DOCUMENT}, timeout=120).json()
    assert stored["id"] == prefix.id
