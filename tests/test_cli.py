"""`ckv` as a user runs it: a checkpoint by transformers, a store on disk, and real processes.

What another process cannot change, above all errors, runs in this one, through the same `main`.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from command_line import Here

from ckv_jax.cli import main
from ckv_jax.cli.store_tools import store_config
from ckv_jax.data.random_checkpoint import save_tokenizer
from ckv_jax.model.tokenizer import load_tokenizer
from ckv_jax.storage import ChunkStore, Wish
from ckv_jax.storage.config import StoreConfig
from ckv_jax.trace import STAGES

TEXT = "\n".join(f"The lamp of room {n} is number {n * 37 % 101}." for n in range(30))


QUESTION = "What is the lamp of room 7?"


def ckv(*args: object, cache: Path, code: int = 0) -> subprocess.CompletedProcess:
    """One run of the command line; fails unless it exits with `code` and shows no traceback."""
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "XDG_CACHE_HOME": str(cache),
        "NO_COLOR": "1",
        "COLUMNS": "100",
    }
    done = subprocess.run(
        [sys.executable, "-m", "ckv_jax.cli", *map(str, args)],
        capture_output=True,
        text=True,
        env=environment,
        timeout=240,
        check=False,
    )
    assert done.returncode == code, (done.args, done.stdout, done.stderr)
    assert "Traceback" not in done.stderr, done.stderr
    if code == 1:
        assert len(done.stderr.strip().splitlines()) == 1, done.stderr
        assert done.stderr.startswith("ckv: ")
    return done


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a checkpoint and a text, and the store that `ckv ingest` made of them."""
    home = tmp_path_factory.mktemp("home")
    checkpoint = home / "checkpoint"
    vocab = save_tokenizer_in(checkpoint)
    torch.manual_seed(0)
    config = transformers.Qwen2Config(
        vocab_size=vocab,
        hidden_size=128,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=4096,
    )
    transformers.Qwen2ForCausalLM(config).save_pretrained(checkpoint)
    (home / "text.txt").write_text(TEXT)
    return home


def save_tokenizer_in(folder: Path) -> int:
    folder.mkdir()
    return save_tokenizer(folder, 512)


@pytest.fixture(scope="module")
def prefix(home: Path) -> dict[str, object]:
    """What `ckv ingest` says in this process; others ask the store that it made."""
    command = (
        "ckv", "ingest", home / "checkpoint", home / "text.txt", "--store", home / "kv",
        "--name", "handbook", "--json",
    )  # fmt: skip
    with (
        pytest.MonkeyPatch.context() as patch,
        contextlib.redirect_stdout(io.StringIO()) as said,
        pytest.raises(SystemExit) as exit_,
    ):
        patch.setattr(sys, "argv", [str(part) for part in command])
        main()
    assert not exit_.value.code
    found: dict[str, object] = json.loads(said.getvalue())
    return found


@pytest.fixture(scope="module")
def answer(home: Path, prefix: dict) -> dict:
    done = ckv(
        "ask", home / "checkpoint", QUESTION, "--store", home / "kv", "--prefix", prefix["prefix"],
        "--budget", "0.25", "--trace", home / "trace.json", "--json", cache=home,
    )  # fmt: skip
    found: dict = json.loads(done.stdout)
    return found


def test_a_second_process_asks_the_store_of_the_first(
    home: Path, prefix: dict, answer: dict
) -> None:
    assert {
        "system", "model", "budget", "prefix_tokens", "suffix_tokens", "token_id", "text",
        "ttft_ms", "breakdown_ms", "bytes", "chunks", "attention_mass",
    } <= answer.keys()  # fmt: skip
    assert answer["breakdown_ms"].keys() == {
        *STAGES, "other"
    }  # fmt: skip
    assert answer["bytes"].keys() == {"ssd", "host", "device"}
    assert answer["prefix_tokens"] == prefix["tokens"]
    assert answer["bytes"]["ssd"] > 0
    assert 0.2 < answer["chunks"]["selected"] / answer["chunks"]["total"] < 0.35
    assert sum(answer["breakdown_ms"].values()) == pytest.approx(answer["ttft_ms"], abs=0.5)
    assert json.loads((home / "trace.json").read_text())["traceEvents"]


def test_asking_for_people_shows_answer_and_breakdown(home: Path, prefix: dict, here: Here) -> None:
    code, out, _ = here(
        "ask", home / "checkpoint", "What is it?", "--store", home / "kv",
        "--prefix", str(prefix["prefix"])[:6], "--max-tokens", 4,
    )  # fmt: skip
    assert code == 0
    for word in ("critical_io_wait", "compute", "ttft", "attended to", "needed", "not used"):
        assert word in out


def test_asking_over_texts_put_together(home: Path, prefix: dict, here: Here) -> None:
    code, out, _ = here(
        "ask", home / "checkpoint", "What is it?", "--store", home / "kv", "--json",
        "--prefix", "handbook", "--prefix", str(prefix["prefix"])[:6], "--recompute", "0.3",
        "--no-warm-up",
    )  # fmt: skip
    answer = json.loads(out)
    assert code == 0 and answer["prefix_tokens"] == 2 * prefix["tokens"]
    again = answer["recomputed_tokens"] / (0.25 * answer["prefix_tokens"])
    assert answer["blended_tokens"] > 0 and 0.2 < again <= 0.3


def test_ingesting_again_stores_nothing_new(
    home: Path, prefix: dict, here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(TEXT))
    code, out, _ = here("ingest", home / "checkpoint", "-", "--store", home / "kv", "--json")
    assert code == 0
    again = json.loads(out)
    assert again["prefix"] == prefix["prefix"]
    assert again["store_bytes"] == prefix["store_bytes"]


def test_ingesting_again_keeps_what_was_wished(home: Path, tmp_path: Path, here: Here) -> None:
    ingest = ("ingest", home / "checkpoint", home / "text.txt", "--store", tmp_path / "kv")

    def wish() -> Wish:
        with ChunkStore.open(tmp_path / "kv", readonly=True) as store:
            (found,) = store.wishes().values()
        return found

    assert here(*ingest, "--retain", "7d", "--priority", 3, "--name", "lamps")[0] == 0
    first = wish()
    assert (first.retain_s, first.priority, first.name) == (7 * 86400, 3, "lamps")
    assert here(*ingest)[0] == 0
    assert wish() == first
    assert here(*ingest, "--retain", "1h", "--priority", 0)[0] == 0
    assert wish() == replace(first, retain_s=3600, priority=0)


def test_a_converted_checkpoint_answers_the_same(
    home: Path, answer: dict, tmp_path: Path, here: Here
) -> None:
    folder = tmp_path / "orbax"
    code, out, _ = here("convert", home / "checkpoint", folder, "--json")
    made = json.loads(out)
    assert (code, made["checkpoint"], made["format"]) == (0, str(folder), "orbax")
    assert not list(folder.glob("*.safetensors"))
    assert here("ingest", folder, home / "text.txt", "--store", tmp_path / "kv")[0] == 0
    code, out, _ = here(
        "ask", folder, QUESTION, "--store", tmp_path / "kv", "--budget", "0.25", "--json"
    )
    assert code == 0
    again = json.loads(out)
    same = ("token_id", "text", "prefix_tokens", "chunks", "attention_mass")
    assert [again[name] for name in same] == [answer[name] for name in same]

    code, _, err = here("convert", folder, folder)
    assert code == 1 and "there already" in err
    code, _, err = here("convert", folder, tmp_path / "x", "--to", "onnx")
    assert code == 1 and "expected one of orbax, hf" in err


def test_the_stores_settings_are_those_of_the_command_line() -> None:
    settings = store_config(max_bytes="1.5MiB", eviction="lru", direct_io=False, io_concurrency=4)
    assert settings == StoreConfig(
        max_bytes=3 * 2**19, eviction="lru", direct_io=False, io_concurrency=4
    )
    default = store_config(max_bytes=None, eviction="attention", direct_io=None, io_concurrency=32)
    assert default == StoreConfig()


def test_a_text_larger_than_the_bound_is_refused(home: Path, here: Here, tmp_path: Path) -> None:
    code, _, err = here(
        "ingest", home / "checkpoint", home / "text.txt", "--store", tmp_path / "kv",
        "--max-bytes", "10kB", "--no-direct-io", "--eviction", "lru", "--io-concurrency", 4,
    )  # fmt: skip
    assert code == 1
    assert len(err.strip().splitlines()) == 1 and "10000" in err.replace(",", "")


def test_a_tenant_over_its_quota_makes_room_of_its_own(
    home: Path, here: Here, tmp_path: Path
) -> None:
    (tmp_path / "more.txt").write_text(TEXT.replace("lamp", "desk"))
    model, kv = home / "checkpoint", ("--store", tmp_path / "kv")
    mine = ("--salt", "correct horse")

    def ingested(text: Path, *options: object) -> dict:
        code, out, _ = here("ingest", model, text, *kv, *options, "--json")
        assert code == 0
        found: dict = json.loads(out)
        return found

    other = ingested(home / "text.txt", "--salt", "other")
    quota = ("--tenant-bytes", other["store_bytes"] * 3 // 2)
    first = ingested(home / "text.txt", *mine, *quota)
    second = ingested(tmp_path / "more.txt", *mine, *quota)
    with ChunkStore.open(tmp_path / "kv", readonly=True) as store:
        assert {p.id for p in store.prefixes()} == {other["prefix"], second["prefix"]}
        why = store.why_evicted(first["prefix"])
        assert why is not None and "tenant_bytes" in why.reason
    code, _, err = here("ingest", model, home / "text.txt", *kv, *mine, "--tenant-bytes", "10kB")
    assert code == 1 and len(err.strip().splitlines()) == 1 and "tenant_bytes" in err
    with ChunkStore.open(tmp_path / "kv", readonly=True) as store:
        assert {p.id for p in store.prefixes()} == {other["prefix"], second["prefix"]}


def test_ingest_prints_no_salt(home: Path, here: Here, tmp_path: Path) -> None:
    salt = "correct horse"
    ingest = ("ingest", home / "checkpoint", home / "text.txt", "--store", tmp_path / "kv")
    code, out, err = here(*ingest, "--salt", salt)
    assert code == 0 and out.rstrip().endswith("--salt …")
    assert salt not in out + err
    assert salt not in here(*ingest, "--salt", salt, "--json")[1]


def test_help_is_there_for_every_command(here: Here) -> None:
    code, overview, _ = here("--help")
    assert code == 0
    for command in (
        "demo", "ingest", "ask", "batch", "convert", "inspect", "verify", "prune", "pin"
    ):  # fmt: skip
        assert command in overview
        code, out, _ = here(command, "--help")
        assert code == 0 and "--json" in out
    code, out, _ = here("codec", "profile", "--help")
    assert code == 0 and "--target-bytes" in out and "codec" in overview
    code, out, _ = here("--version")
    assert code == 0 and out.startswith("ckv ")


def test_wrong_usage_is_exit_code_2(here: Here) -> None:
    code, _, err = here("ingest", "a", "b")
    assert code == 2 and "--store" in err
    assert here("no-such-command")[0] == 2


def test_a_process_says_what_is_wrong_in_one_line(tmp_path: Path) -> None:
    done = ckv("ask", tmp_path, "why?", "--store", tmp_path / "kv", cache=tmp_path, code=1)
    assert "there is no store" in done.stderr


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["ingest", "{home}/nowhere", "{home}/text.txt"], "nowhere"),
        (["ingest", "{home}/empty", "{home}/text.txt"], "not a checkpoint"),
        (["ingest", "{home}/no-tokenizer", "{home}/text.txt"], "tokenizer missing"),
        (["ingest", "{home}/misfit", "{home}/text.txt"], "do not fit"),
        (["ingest", "{home}/checkpoint", "{home}/nothing.txt"], "nothing.txt"),
        (["ingest", "{home}/checkpoint", "{home}/empty.txt"], "empty"),
        (["ingest", "{home}/checkpoint", "{home}/binary.txt"], "UTF-8"),
        (["ingest", "{home}/checkpoint", "{home}/long.txt"], "context"),
        (["ingest", "{home}/checkpoint", "{home}/text.txt", "--system", "magic"], "contiguous-kv"),
        (["ask", "{home}/checkpoint", "why?", "--budget", "0"], "(0, 1]"),
        (["ask", "{home}/checkpoint", "why?", "--budget", "1.5"], "(0, 1]"),
        (["ask", "{home}/checkpoint", " "], "empty"),
        (["ask", "{home}/checkpoint", "why?", "--recompute", "0.3"], "for one text"),
        (["ask", "{home}/checkpoint", "why?", "--prefix", "{wrong}"], "{prefix}"),
        (["ask", "{home}/checkpoint", "why?", "--dtype", "float32"], "dtype"),
        (["ask", "{home}/checkpoint", "why?", "--system", "contiguous-kv"], "digest"),
        (["ask", "{home}/other", "why?"], "weights"),
        (["ingest", "{home}/checkpoint", "{home}/text.txt", "--max-bytes", "much"], "a size"),
        (["ask", "{home}/checkpoint", "why?", "--eviction", "oldest"], "'lru'"),
        (["ask", "{home}/checkpoint", "why?", "--io-concurrency", "0"], "1 to 1024"),
        (["demo", "--question", " "], "empty"),
        (
            ["ingest", "{home}/checkpoint", "{home}/text.txt", "--system", "recompute"],
            "stores nothing",
        ),
    ],
)
def test_bad_input_is_one_clear_line(
    home: Path, broken: None, prefix: dict, here: Here, args: list[str], says: str
) -> None:
    stored = str(prefix["prefix"])
    names = {"home": home, "wrong": stored[:-1] + ("0" if stored[-1] != "0" else "1")}
    names["prefix"] = stored[:12]
    before = sorted((home / "kv").rglob("*"))
    more = () if args[0] == "demo" else ("--store", home / "kv")
    code, out, err = here(*(arg.format(**names) for arg in args), *more)
    assert (code, out) == (1, "")
    assert err.startswith("ckv: ") and len(err.strip().splitlines()) == 1
    assert says.format(**names) in err
    assert [path for path in (home / "kv").rglob("*") if path not in before and path.is_dir()] == []


def test_a_name_on_the_hub_is_told_how_to_come(
    home: Path, prefix: dict, tmp_path: Path, here: Here
) -> None:
    name = "Qwen/Qwen2.5-0.5B-Instruct"
    store = ("--store", home / "kv")
    for args in (
        ("ingest", name, home / "text.txt", *store),
        ("ask", name, "why?", *store),
        ("convert", name, tmp_path / "orbax"),
        ("inspect", name),
    ):
        code, out, err = here(*args)
        assert (code, out) == (1, "")
        (line,) = err.strip().splitlines()
        assert f"hf download {name} --local-dir Qwen2.5-0.5B-Instruct" in line


@pytest.mark.parametrize("command", [["inspect"], ["verify"], ["prune", "--max-bytes", "0"]])
def test_looking_after_no_store_makes_none(tmp_path: Path, here: Here, command: list[str]) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    code, _, err = here(*command, empty)
    assert code == 1 and "there is no store" in err
    assert list(empty.iterdir()) == []


def test_a_wrong_system_makes_no_store(home: Path, tmp_path: Path, here: Here) -> None:
    store = tmp_path / "kv"
    text = home / "text.txt"
    assert here("ingest", home / "checkpoint", text, "--system", "magic", "--store", store)[0] == 1
    assert not store.exists()


def test_a_full_disk_leaves_nothing_half_written(home: Path, tmp_path: Path, here: Here) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=128k", "tmpfs", str(disk)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting a small disk needs more rights")
    try:
        code, _, err = here(
            "ingest", home / "checkpoint", home / "text.txt", "--store", disk / "kv"
        )
        assert code == 1 and len(err.strip().splitlines()) == 1
        assert "room" in err or "full" in err
        found = json.loads(here("inspect", disk / "kv", "--json")[1])
        assert (found["prefixes"], found["segments"]) == ({}, [])
        assert not list(disk.rglob("*.zarr")) and not list(disk.rglob("zarr.json"))
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_the_store_is_shown_checked_pinned_and_pruned(
    home: Path, prefix: dict, tmp_path: Path, here: Here
) -> None:
    store, name = tmp_path / "kv", str(prefix["prefix"])
    shutil.copytree(home / "kv", store)

    def look_after(*args: object) -> dict:
        code, out, _ = here(*args, "--json")
        assert code == 0
        found: dict = json.loads(out)
        return found

    shown = look_after("inspect", store, name)
    assert shown["prefixes"] == {name: prefix["tokens"]}
    assert len(shown["prefix"]["layers"]) == 2
    (segment,) = shown["segments"]
    assert segment["name"] == "handbook"
    assert segment["source"] in ("text.txt", "stdin")  # another test stores it again from there
    assert segment["begins"] == "The lamp of room 0 is number 0. The lamp of room 1 is …"
    seen = here("inspect", store, name[:5])[1]
    assert name in seen and "handbook" in seen
    assert look_after("verify", store)["ok"]

    assert look_after("pin", store, name[:5])["pinned"]
    code, out, err = here("prune", store, "--max-bytes", "0", "--json")
    assert (code, json.loads(out)["removed"]) == (3, 0) and "the rest is pinned" in err
    assert not look_after("pin", store, name, "--unpin")["pinned"]
    pruned = look_after("prune", store, "--max-bytes", "1kB")
    assert (pruned["removed"], pruned["bytes_after"]) == (1, 0)


@pytest.mark.slow
def test_damage_is_found_and_repaired(home: Path, prefix: dict, tmp_path: Path, here: Here) -> None:
    store = tmp_path / "kv"
    shutil.copytree(home / "kv", store)
    largest = max(store.rglob("packs/c.*"), key=lambda path: path.stat().st_size)
    data = bytearray(largest.read_bytes())
    data[len(data) // 2] ^= 1
    largest.write_bytes(data)
    code, out, _ = here("verify", store, "--json")
    assert code == 1
    (damage,) = json.loads(out)["damages"]
    assert here("verify", store, "--dry-run")[0] == 1  # without --repair it has nothing to say
    code, out, _ = here("verify", store, "--repair", "--dry-run")
    assert code == 1 and "handbook" in out and f"its first {damage['chunk']} of" in out
    assert len(json.loads(here("verify", store, "--json")[1])["damages"]) == 1  # nothing was done
    assert here("verify", store, "--repair")[0] == 0

    def ask(of: Path) -> tuple[int, int, str]:
        code, out, err = here(
            "ask", home / "checkpoint", "why?", "--store", of, "--prefix", "handbook",
            "--budget", 1, "--no-warm-up", "--json",
        )  # fmt: skip
        assert code == 0
        found = json.loads(out)
        return found["token_id"], found["recomputed_chunks"], err

    whole = ask(home / "kv")
    assert whole[1] == 0 and "computed again" not in whole[2]
    token, again, err = ask(store)  # what is damaged is computed again, and said
    assert (token, again) == (whole[0], 1)
    assert "1 chunk is damaged on disk and was computed again" in err


@pytest.fixture(scope="module")
def broken(home: Path) -> None:
    """Folders and files that are not what they should be."""
    checkpoint = home / "checkpoint"
    (home / "empty").mkdir()
    shutil.copytree(checkpoint, home / "no-tokenizer")
    for file in (home / "no-tokenizer").glob("tokenizer*"):
        file.unlink()
    shutil.copytree(checkpoint, home / "misfit")
    config = json.loads((checkpoint / "config.json").read_text())
    (home / "misfit" / "config.json").write_text(json.dumps(config | {"intermediate_size": 128}))
    torch.manual_seed(1)
    other = transformers.Qwen2ForCausalLM(transformers.Qwen2Config.from_pretrained(checkpoint))
    other.save_pretrained(home / "other")
    for file in checkpoint.glob("tokenizer*"):
        shutil.copy(file, home / "other")
    (home / "empty.txt").write_text(" \n")
    (home / "binary.txt").write_bytes(b"\xff\xfe\x00")
    (home / "long.txt").write_text(TEXT * 16)


def test_what_prompts_begin_with_alike_is_stored_once(home: Path, here: Here) -> None:
    manual = TEXT + "\nThis is the manual of the lamps."
    lines = [
        {"id": "one", "prompt": f"{manual} Which lamp is in room 3?", "max_tokens": 3},
        {"id": "apart", "prompt": "Which lamp is in room 4?"},
        {"id": "two", "prompt": f"{manual} Which lamp is in room 5?", "max_tokens": 3},
        {"id": "both", "prompt": "Which?", "question": "Which?"},
        {"id": "long", "prompt": list(range(1, 60)) * 100},
    ]
    requests, out, kv = home / "prompts.jsonl", home / "prompted.jsonl", home / "prompted"
    requests.write_text("".join(json.dumps(line) + "\n" for line in lines))
    command = ("batch", home / "checkpoint", requests, "--store", kv, "--out", out)
    code, said, complaint = here(*command, "--json")
    assert code == 3 and "got a prompt and a question" in complaint, complaint
    assert "line 5" in complaint and "4096" in complaint
    told = json.loads(said)
    assert (told["answered"], told["failed"]) == (3, 2)
    [(stored, count)] = told["beginnings"].items()
    found = {row["id"]: row for row in map(json.loads, out.read_text().splitlines())}
    assert count > 256 and stored in {prefix.id for prefix in ChunkStore.open(kv).prefixes()}
    assert found["one"]["prefix_tokens"] == found["two"]["prefix_tokens"] == count
    assert found["one"]["bytes"]["ssd"] > 0 and found["apart"]["prefix_tokens"] == 0
    # Stored by its id and asked in the usual way, the answer is the same.
    rest = home / "rest.jsonl"
    tokens = found["one"]["suffix_tokens"]
    whole = load_tokenizer(home / "checkpoint").encode(lines[0]["prompt"]).tolist()
    assert len(whole) == count + tokens
    asked = {"prefix": stored, "question": whole[count:], "max_tokens": 3}
    rest.write_text(json.dumps(asked) + "\n")
    assert here("batch", home / "checkpoint", rest, "--store", kv, "--out", home / "r")[0] == 0
    assert json.loads((home / "r").read_text())["text"] == found["one"]["text"]
    # A second run has nothing left to do but the two that failed.
    code, said, _ = here(*command, "--json")
    assert code == 3 and json.loads(said)["kept"] == 3 and json.loads(said)["answered"] == 0


def test_a_batch_goes_on_after_a_kill(home: Path, prefix: dict, here: Here) -> None:
    stored = prefix["prefix"]
    lines = [
        {"id": "a", "prefix": stored, "question": "What is the lamp of room 1?"},
        {"id": "b", "question": "What is the lamp of room 2?", "budget": 0.5, "max_tokens": 3},
        {"id": "b", "question": "twice"},
        {"id": "c", "question": "why?", "budget": -1},
        {"id": "d", "prefix": "0" * 64, "question": "why?"},
        {"id": "e", "question": "why?", "colour": "red"},
    ]
    requests, out = home / "requests.jsonl", home / "results.jsonl"
    requests.write_text("".join(json.dumps(line) + "\n" for line in lines) + "{not json\n\n")
    command = (
        "batch", home / "checkpoint", requests, "--store", home / "kv", "--out", out,
        "--prefix", stored, "--json",
    )  # fmt: skip
    code, said, complaint = here(*command)
    assert code == 3
    assert json.loads(said) | {"seconds": 0} == {
        "answered": 2, "kept": 0, "failed": 5, "seconds": 0
    }  # fmt: skip
    assert complaint.count("requests.jsonl, line ") == 5
    results = [json.loads(line) for line in out.read_text().splitlines()]
    assert {result["id"] for result in results if "error" not in result} == {"a", "b"}

    torn = out.read_bytes().splitlines(keepends=True)[0]
    out.write_bytes(torn + torn[: len(torn) // 2])  # killed in the middle of its second line
    code, said, _ = here(*command)
    second = json.loads(said)
    assert (code, second["kept"], second["answered"]) == (3, 1, 1)
    again = [json.loads(line) for line in out.read_text().splitlines()]
    assert sorted(result["token_id"] for result in again if "error" not in result) == sorted(
        result["token_id"] for result in results if "error" not in result
    )
