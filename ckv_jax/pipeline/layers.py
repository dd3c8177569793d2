"""The jitted calls of a request: embed, select, run layers over pages, extend, head.

One `Layers` belongs to one model and serves every engine over it. A model's layers are split once
into a graph definition, which all share, and their arrays, which are arguments: one program serves
every subperiod. Callers round shapes up (`buckets.py`); `Programs` bounds how many are kept.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Array, Float, Float32, Int32

from ckv_jax.kernels_pallas.attend import attend, attend_rows, merge
from ckv_jax.kernels_pallas.score.probe import Probe
from ckv_jax.kernels_pallas.target import Target
from ckv_jax.model.decoder import Layer, Transformer
from ckv_jax.model.shardings import BY_NAME, HEADS, PAGES, ROWS, WHOLE, Shardings, Spec
from ckv_jax.pipeline.programs import Programs
from ckv_jax.prefix.pools import as_bits, as_rows, layer_pages, positions, storage_dtype
from ckv_jax.selection.base import (
    Rule,
    Selection,
    Share,
    last_queries,
    rows_of,
    scored,
    select_units,
)

T = TypeVar("T")
_MOST_COMMON = 1024
"""Arrays that `Layers.put_common` keeps on the device, of a few numbers each."""
LayerState = Any  # a pure pytree of one layer's arrays
PoolPages = Array  # [slots, pl, 2, C, K*D] (heads apart: [..., D]), elements or their bit patterns
LayerKv = tuple[tuple[Array, Array], ...]
"""(K, V) [B, R, K*D] of each of some layers."""


class Scorer(NamedTuple):
    """The layers whose queries select, with what they score."""

    states: tuple[LayerState, ...]
    probes: tuple[Probe, ...]


class Functions(NamedTuple):
    """Functions of `Layers` that other jitted calls trace."""

    embed: Callable[..., Array]
    extend: Callable[..., tuple[Array, LayerKv]]
    head: Callable[..., tuple[Array, Array]]
    run: Callable[..., tuple[Array, LayerKv]]
    select: Callable[..., Selection]


class Layers:
    """Jitted calls over one model's layers."""

    def __init__(self, model: Transformer) -> None:
        self.config = model.config
        self.dtype = jnp.dtype(model.dtype)
        self.int8 = model.int8
        self.target = model.target
        self._places = not model.target.in_host_memory
        self.shardings = model.shardings
        self._out_first = model.out_first
        self.kv_dtype = storage_dtype(self.dtype, self.target)
        put = model.shardings.put
        self._common = lru_cache(_MOST_COMMON)(
            lambda dtype, shape, data: put(np.frombuffer(data, dtype).reshape(shape), WHOLE)
        )
        self.programs = Programs()
        graph, _ = nnx.split(model.layers[0])
        self._layers: list[LayerState] = [
            nnx.to_pure_dict(nnx.state(layer)) for layer in model.layers
        ]
        ends = copy.copy(model)  # embedding and head alone
        ends.layers = nnx.List([])
        rest_graph, rest_state = nnx.split(ends)
        self._rest: LayerState = nnx.to_pure_dict(rest_state)

        def layer_of(state: LayerState) -> Layer:
            return nnx.merge(graph, state)

        def embed(rest: LayerState, tokens: Array) -> Array:
            return nnx.merge(rest_graph, rest).embed(tokens.reshape(len(tokens), -1))

        def logits(rest: LayerState, row: Array) -> Array:
            return nnx.merge(rest_graph, rest).logits(row)[:, 0]

        def head(rest: LayerState, hidden: Array, last: Array) -> tuple[Array, Array]:
            row = jnp.take_along_axis(hidden, last[:, None, None], axis=1)  # [B, 1, E]
            found = logits_of(rest, row)
            return found, jnp.argmax(found, axis=-1).astype(jnp.int32)

        self.layer_of = layer_of
        self._made: dict[tuple[Any, ...], Any] = {}
        jit, split = self.programs.jit, self.split
        self._embed = jit(split(embed, (BY_NAME, WHOLE), WHOLE))
        logits_of = split(logits, (BY_NAME, WHOLE), self._logits_spec())
        self._head = jit(head)
        self._select = jit(
            split(
                _select_of(layer_of, self.target, self.shardings),
                (BY_NAME, WHOLE, WHOLE, WHOLE, BY_NAME),
                WHOLE,
            ),
            static=("rule",),
        )
        self._run = jit(
            split(
                _run_of(layer_of, self.target),
                (BY_NAME, WHOLE, WHOLE, PAGES, WHOLE),
                (WHOLE, HEADS),
            ),
            static=("selections",),
        )
        self._extend = jit(
            split(
                extend_of(layer_of, self.target),
                (BY_NAME, WHOLE, WHOLE, HEADS, WHOLE, PAGES, WHOLE),
                (WHOLE, HEADS),
            ),
            static=("context", "selections"),
            donate=("buffers",),
        )

        programs = self._embed, self._extend, self._head, self._run, self._select
        self.functions = Functions(*(program.function for program in programs))

    @property
    def num_layers(self) -> int:
        """Layers of the model."""
        return len(self._layers)

    @property
    def weights(self) -> tuple[list[LayerState], LayerState]:
        """Every layer's arrays, and those of embedding and head."""
        return self._layers, self._rest

    def once(self, make: Callable[..., T], *of: Any) -> T:
        """`make(*of)`, made once: all engines over these layers share what it compiles to."""
        made: T = self._made.setdefault((make, *of), make(*of))
        return made

    def split(
        self, function: Callable[..., Any], takes: Sequence[Spec], gives: Any
    ) -> Callable[..., Any]:
        """`Shardings.split` of this model; the same function gives the same again."""
        made = self.shardings.split(function, takes, gives, out_first=self._out_first)
        kept: Callable[..., Any] = self._made.setdefault(("split", function), made)
        return kept

    def state(self, layer: int) -> LayerState:
        """The arrays of one layer, as `layer_of` takes them inside a jitted call."""
        return self._layers[layer]

    def embed(
        self, tokens: Int32[ArrayLike, "B S"] | Int32[ArrayLike, " B"]
    ) -> Float[Array, "B S E"]:
        """Hidden states before the first layer; [B]: of one token a row."""
        out: Array = self._embed(self._rest, tokens)
        return out

    def head(
        self, hidden: Float[Array, "B S E"], last: Int32[ArrayLike, " B"]
    ) -> tuple[Float32[Array, "B V"], Int32[Array, " B"]]:
        """Logits of token `last` of each row, and their argmax."""
        logits, token = self._head(self._rest, hidden, last)
        return logits, token

    def put(self, arrays: T) -> T:
        """Small host arrays, in any tree, where calls take them: an accelerator uploads what is not
        on it yet with every call that takes it. A CPU takes them as they are."""
        return self.shardings.put(arrays, WHOLE) if self._places else arrays

    def put_common(self, arrays: T) -> T:
        """`put` of counts, limits and positions that many requests have in common: equal ones are
        uploaded once, as an upload takes a GPU's host as long as a call."""
        if not self._places:
            return arrays
        found: T = jax.tree.map(
            lambda one: self._common(one.dtype, one.shape, one.tobytes()), arrays
        )
        return found

    def scorer(self, layers: Sequence[int], probes: Sequence[Probe]) -> Scorer:
        """What `select` takes of the layers that score, of which each has a probe."""
        return Scorer(tuple([self._layers[layer] for layer in layers]), tuple(probes))

    def select(
        self,
        scorer: Scorer,
        hidden: Float[Array | np.ndarray, "B S E"],
        start: Int32[ArrayLike, " B"],
        q_lengths: Int32[ArrayLike, " B"],
        num_tokens: Int32[ArrayLike, ""],
        num_chunks: Int32[ArrayLike, ""],
        limits: Int32[ArrayLike, " B"],
        rule: Rule,
        share: Share,
    ) -> Selection:
        """The `limits[b]` best chunks of one prefix for each row, by the sum of what the layers of
        `scorer` say, or as many of them as hold a `share` of the attention mass.

        `start`: position of each row's first token in `hidden`.
        """
        states, probes = scorer
        found: Selection = self._select(
            states, hidden, start, q_lengths, probes, num_tokens, num_chunks, limits, share,
            rule=rule,
        )  # fmt: skip
        return found

    def run(
        self,
        layers: range,
        hidden: Float[Array, "B S E"],
        start: Int32[ArrayLike, " B"],
        pages: PoolPages,
        tables: Int32[ArrayLike, "Q B N"],
        *,
        selections: int = 1,
    ) -> tuple[Float[Array, "B S E"], LayerKv]:
        """`layers` over the selected pages and the suffix itself (causal).

        `tables` has a row for each of the call's layer groups, where its packs sit, and behind them
        one with the valid tokens of each chunk, or `selections` of them where heads select apart:
        one array, as each costs an upload. Also returns each layer's suffix (K, V) [B, S, K*D].
        """
        states = tuple(self._layers[layers.start : layers.stop])
        out, kv = self._run(states, hidden, start, pages, tables, selections=selections)
        return out, kv

    def extend(
        self,
        layers: range,
        hidden: Float[Array, "B S E"],
        start: Int32[ArrayLike, " B"],
        buffers: LayerKv,
        at: Int32[ArrayLike, " B"],
        pages: PoolPages,
        tables: Int32[ArrayLike, "Q B N"],
        *,
        context: int,
        selections: int = 1,
    ) -> tuple[Float[Array, "B S E"], LayerKv]:
        """`layers` over pages and over `buffers`, each layer's (K, V) [B, R, K*D] so far.

        `tables` and `selections` as for `run`. New tokens' keys and values go into the (donated)
        buffers at row `at`; only the first `context` rows are attended, so at + S <= context <= R.
        Dense prefill and decode are this call: `start` is the position of the first new token.
        """
        states = tuple(self._layers[layers.start : layers.stop])
        given = states, hidden, start, buffers, at, pages, tables
        out, buffers = self._extend(*given, context=context, selections=selections)
        return out, buffers

    def _logits_spec(self) -> Any:
        untied = self._rest.get("head")
        if untied is None:
            return WHOLE
        split = self.shardings.of_name("head", untied.shape, self._out_first)
        return WHOLE if split == WHOLE else ROWS


def probe_key(probe: Probe | None) -> tuple[object, ...]:
    """Returns the static properties of a probe, or of none, for which a program is compiled."""
    leaves, kind = jax.tree.flatten(probe)
    return kind, *[(leaf.shape, leaf.dtype) for leaf in leaves]


def _select_of(
    layer_of: Callable[[LayerState], Layer], target: Target, shardings: Shardings
) -> Callable[..., Selection]:
    def select(
        states: tuple[LayerState, ...], hidden: Array, start: Array, q_lengths: Array,
        probes: tuple[Probe, ...], num_tokens: Array, num_chunks: Array, limits: Array,
        share: Share, *, rule: Rule,
    ) -> Selection:  # fmt: skip
        hidden, at, q_lengths = last_queries(
            hidden, positions(start, hidden.shape[1]), q_lengths, rule.window
        )

        tokens, chunks = num_tokens[None], num_chunks[None]  # of one prefix
        found = scored(
            [layer_of(state).query(hidden, at) for state in states], [probes], rule,
            num_tokens=tokens, num_chunks=chunks, q_lengths=q_lengths, limits=limits,
            target=target, whole=shardings.sum,
        )  # fmt: skip
        limits, share = jax.tree.map(lambda x: rows_of(x, found.scores), (limits, share))
        return select_units(
            found.scores, rule.n, limits, count=num_chunks, among=found.left, share=share,
            always=rule.always_kept(found.scores, [probes], tokens, chunks, limits),
            mass=found.mass, target=target,
        )  # fmt: skip

    return select


def _run_of(
    layer_of: Callable[[LayerState], Layer], target: Target
) -> Callable[..., tuple[Array, LayerKv]]:
    def run(
        states: tuple[LayerState, ...], hidden: Array, start: Array, pages: Array, tables: Array,
        *, selections: int,
    ) -> tuple[Array, LayerKv]:  # fmt: skip
        slots = tables[:-selections]
        lengths = tables[-selections:] if selections > 1 else tables[-1]
        at = positions(start, hidden.shape[1])
        zero = jnp.zeros(start.shape, jnp.int32)
        kv: list[tuple[Array, Array]] = []

        for index, state in enumerate(states):

            def over_pages(q: Array, k: Array, v: Array, index: int = index) -> Array:
                k, v = as_rows(k), as_rows(v)
                kv.append((k, v))
                return over_pages_and_rows(
                    q, pages, slots, lengths, index, k, v, zero, target=target
                )

            hidden = layer_of(state)(hidden, at, over_pages)
        return hidden, tuple(kv)

    return run


class Seen(NamedTuple):
    """What one layer attends to, see `over_pages_and_rows`."""

    pages: Array
    slots: Int32[Array, "P B N"]
    lengths: Int32[Array, "J B N"]
    beside: Sequence[tuple[Array, Array]] = ()


def extend_of(
    layer_of: Callable[[LayerState], Layer],
    target: Target,
    see: Callable[[Seen, Any, DTypeLike], Seen] = lambda seen, *_: seen,
) -> Callable[..., tuple[Array, LayerKv]]:
    """The function of `Layers.extend`. `see`: what layers attend to with what a system `added`."""

    def extend(
        states: tuple[LayerState, ...], hidden: Array, start: Array, buffers: LayerKv, at: Array,
        pages: Array, tables: Array, added: Any = None, *, context: int, selections: int,
    ) -> tuple[Array, LayerKv]:  # fmt: skip
        after: list[tuple[Array, Array]] = []

        for index, state in enumerate(states):

            def over_both(q: Array, k: Array, v: Array, index: int = index) -> Array:
                keys, values = insert(buffers[index], (as_rows(k), as_rows(v)), at)
                after.append((keys, values))
                seen = see(Seen(pages, tables[:-selections], tables[-selections:]), added, k.dtype)
                return over_pages_and_rows(
                    q, seen.pages, seen.slots, seen.lengths if selections > 1 else seen.lengths[0],
                    index, as_bits(keys[:, :context], k.dtype),
                    as_bits(values[:, :context], v.dtype), at, target=target,
                    beside=[(out.astype(q.dtype), lse) for out, lse in seen.beside],
                )  # fmt: skip

            hidden = layer_of(state)(hidden, positions(start, hidden.shape[1]), over_both)
        return hidden, tuple(after)

    return extend


def insert(
    buffers: tuple[Array, Array], new: tuple[Array, Array], at: Array
) -> tuple[Array, Array]:
    """(K, V) buffers [B, R, K*D] with new rows [B, S, K*D] from row `at[b]` on."""

    return insert_rows(buffers[0], new[0], at), insert_rows(buffers[1], new[1], at)


def insert_rows(buffer: Array, rows: Array, at: Array) -> Array:
    """A buffer [B, R, K*D] with rows [B, S, K*D], elements or bits, from row `at[b]` on."""

    def one(buffer: Array, rows: Array, row: Array) -> Array:
        return jax.lax.dynamic_update_slice_in_dim(buffer, rows, row, axis=0)

    rows = as_bits(rows, buffer.dtype)
    if len(at) == 1:  # of several, XLA makes a scatter, which checks each row's place
        return one(buffer[0], rows[0], at[0])[None]
    out: Array = jax.vmap(one)(buffer, rows, at)
    return out


def over_pages_and_rows(
    q: Array, pages: Array, slots: Array, lengths: Array, index: int, keys: Array, values: Array,
    at: Array, *, target: Target, beside: Sequence[tuple[Array, Array]] = (),
) -> Array:  # fmt: skip
    """What queries [B, S, H, D] of layer number `index` of a call attend to.

    `pages` [slots, pl, 2, C, K*D], or [..., D] with heads apart; `slots` [P, B, N] of the call's
    layer groups; `lengths` [B, N], or [K, B, N] where each head has selected for itself: valid
    tokens of each chunk; `keys`, `values` [B, R, K*D], of which query i sees the first `at[b] + i +
    1`. `beside`: attention to other tokens, [B, S, H, D], and its log-sum-exp each.
    """
    pack, dim = pages.shape[1], q.shape[3]
    group, place = divmod(index, pack)
    apart = keys.shape[2] // pages.shape[4]  # K with heads apart, else 1
    if apart == 1:
        pool, tables = layer_pages(pages, slots[group], place)
        found = attend(q, pool, *tables, lengths, keys, values, at, target=target)
        return _merged([found, *beside]) if beside else found[0]
    batch, length, heads, _ = q.shape
    by_head = slots[group * apart : (group + 1) * apart]  # [K, B, N]
    lengths = jnp.broadcast_to(lengths, by_head.shape)
    folded = q.reshape(batch, length, apart, heads // apart, dim).transpose(2, 0, 1, 3, 4)
    out, lse = over_one_head(
        folded.reshape(apart * batch, length, heads // apart, dim), pages,
        by_head.reshape(apart * batch, -1), lengths.reshape(apart * batch, -1), place,
        dtype=keys.dtype, target=target,
    )  # fmt: skip
    out = out.reshape(apart, batch, length, heads // apart, dim).transpose(1, 2, 0, 3, 4)
    lse = lse.reshape(apart, batch, length, heads // apart).transpose(1, 2, 0, 3)
    own = attend_rows(q, keys, values, at, target=target)
    return _merged([(out.reshape(q.shape), lse.reshape(q.shape[:3])), own, *beside])


def _merged(parts: Sequence[tuple[Array, Array]]) -> Array:
    outs, lses = zip(*parts, strict=True)
    return merge(outs, lses)[0]


def over_one_head(
    q: Array, pages: Array, slots: Array, lengths: Array, index: Array | int, *,
    dtype: jnp.dtype, target: Target,
) -> tuple[Array, Array]:  # fmt: skip
    """Attention of q [R, S, G, D] to chunks of one KV head in packs [slots, pl, 2, C, D], and its
    log-sum-exp. `slots`, `lengths` [R, N]; `dtype`: of the elements in the packs."""
    pool, tables = layer_pages(pages, slots, index)
    none = jnp.zeros((q.shape[0], 0, pages.shape[4]), dtype)
    zero = jnp.zeros(q.shape[:1], jnp.int32)
    out: Array
    lse: Array
    out, lse = attend(q, pool, *tables, lengths, none, none, zero, target=target)
    return out, lse
