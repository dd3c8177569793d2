"""How a person names a stored prefix, and what is said where a name fits several or none."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from engine_tiny import tiny_engine

from ckv_jax import Engine, Prefix
from ckv_jax.cli.options import find_prefix
from ckv_jax.storage import PrefixRecord
from ckv_jax.storage.errors import PrefixNotFound


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    with tiny_engine(tmp_path_factory.mktemp("finding")) as engine:
        yield engine


@pytest.fixture(scope="module")
def stored(engine: Engine) -> list[Prefix]:
    """Twenty texts, so that two ids begin alike; the first two are called the same."""
    rng = np.random.default_rng(0)
    texts = rng.integers(0, engine.model_config.vocab_size, (20, 16)).astype(np.int32)
    found = [engine.ingest(text) for text in texts]
    for prefix in found[:2]:
        engine.store.set_record(prefix.id, PrefixRecord(name="twins", begins="once upon a time"))
    engine.store.set_record(found[2].id, PrefixRecord(name="alone", source="alone.txt"))
    return found


def test_a_name_finds_its_prefix(engine: Engine, stored: list[Prefix]) -> None:
    assert find_prefix(engine.store, "alone", salt="") == stored[2]
    assert find_prefix(engine.store, stored[3].id[:16], salt="") == stored[3]


def test_a_whole_id_comes_before_a_name(engine: Engine, stored: list[Prefix]) -> None:
    digest = "0123456789abcdef" * 2  # of the length of an id, and none
    for prefix, name in ((stored[4], stored[5].id), (stored[6], digest)):
        engine.store.set_record(prefix.id, PrefixRecord(name=name))
    assert find_prefix(engine.store, stored[5].id, salt="") == stored[5]
    assert find_prefix(engine.store, digest, salt="") == stored[6]


def test_a_name_of_several_says_which(engine: Engine, stored: list[Prefix]) -> None:
    with pytest.raises(ValueError, match="2 prefixes have this name; say which by its id") as error:
        find_prefix(engine.store, "twins", salt="")
    assert all(prefix.id[:12] in str(error.value) for prefix in stored[:2])


def test_no_name_where_there_are_several(engine: Engine, stored: list[Prefix]) -> None:
    with pytest.raises(
        ValueError, match=r"20 prefixes are stored; say which with --prefix: .* and 15 more"
    ):
        find_prefix(engine.store, None, salt="")


def test_an_id_that_begins_several_says_so(engine: Engine, stored: list[Prefix]) -> None:
    letters = [prefix.id[0] for prefix in stored]
    letter = max(letters, key=letters.count)
    count = letters.count(letter)
    assert count > 1
    said = f"{count} stored prefixes begin with '{letter}': "
    with pytest.raises(PrefixNotFound, match=said) as error:
        find_prefix(engine.store, letter, salt="")
    assert set(error.value.close) <= {p.id for p in stored if p.id[0] == letter}


def test_another_tenants_name_is_no_name(engine: Engine, stored: list[Prefix]) -> None:
    with pytest.raises(PrefixNotFound, match=r"no stored prefix with id 'alone'$"):
        find_prefix(engine.store, "alone", salt="somebody else")


def test_a_name_of_nothing_lists_what_is_stored(engine: Engine, stored: list[Prefix]) -> None:
    said = r"no stored prefix has the name or id 'nobody'; stored: .* and 15 more$"
    with pytest.raises(PrefixNotFound, match=said):
        find_prefix(engine.store, "nobody", salt="")


def test_a_prefix_of_another_system_names_it(engine: Engine, stored: list[Prefix]) -> None:
    from engine_support import small_engine
    from engine_tiny import TINY

    with (
        small_engine(engine.store.files.root, system="as-lru", model=TINY) as other,  # type: ignore[attr-defined]
        pytest.raises(
            ValueError,
            match=r"asked with --system as-lru; these differ: chunk_tokens .* ingest the text with",
        ),
    ):
        other.check_prefix(stored[0])


def test_a_wish_of_before_names_is_read_as_it_was() -> None:
    old = b'{"pinned": false, "retain_s": 5.0, "priority": 2}'
    assert PrefixRecord.decode(old) == PrefixRecord(retain_s=5.0, priority=2)
    with pytest.raises(ValueError, match="name: got"):
        PrefixRecord(name="two\nlines")
