"""GGUF: reads files tensor by tensor, and models under Hugging Face's names. No JAX.

The format (docs/gguf.md of ggml) is a magic and a version, pairs of key and value, an entry for
every tensor, and the tensors' bytes, each at a multiple of the alignment; all of it little-endian.
Reading tensor by tensor with plain file reads keeps host memory at one tensor in float32.
"""

from __future__ import annotations

import math
import mmap
import re
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from ckv_jax.errors import CheckpointError, UnsupportedModel
from ckv_jax.model.families import FAMILIES, Family, family_of
from ckv_jax.model.rope import Llama3Scaling

MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_ALIGNMENT = 32
MOST_TENSORS = 200_000  # a model of 1,000 layers and 100 experts has half of that
_MOST_DIMENSIONS = 4
_STRING, _ARRAY = 8, 9
_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q",
            11: "<q", 12: "<d"}  # fmt: skip
DTYPES: dict[str, np.dtype[Any]] = {
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F16": np.dtype(np.float16),
    "F32": np.dtype(np.float32),
}
"""Element types that are not quantised, by the names that GGUF and safetensors share."""
_QUANTISED = frozenset(
    "Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 Q2_K Q3_K Q4_K Q5_K Q6_K IQ1_S IQ1_M IQ2_XXS IQ2_XS IQ2_S IQ3_XXS "
    "IQ3_S IQ4_NL IQ4_XS".split()
)
"""Tensor types that the `gguf` package dequantises."""
_NAMES: Mapping[str, str] = {
    "token_embd": "embedding",
    "output_norm": "final_norm",
    "output": "head",
    "attn_norm": "input_norm",
    "attn_q": "query",
    "attn_k": "key",
    "attn_v": "value",
    "attn_output": "output",
    "attn_q_norm": "query_norm",
    "attn_k_norm": "key_norm",
    "ffn_norm": "post_norm",
    "ffn_gate": "gate",
    "ffn_up": "up",
    "ffn_down": "down",
}
"""llama.cpp's names of our parts of a model, within a layer and outside of the layers."""

_LAYER = re.compile(r"blk\.(\d+)\.([a-z_]+)\.(weight|bias)")
_OUTSIDE = re.compile(r"([a-z_]+)\.(weight|bias)")
_SPLIT = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")
_ROPE_FACTORS = "rope_freqs.weight"
_HF_TYPES: Mapping[str, str] = {
    "qwen2moe": "qwen2_moe", "qwen3moe": "qwen3_moe", "qwen3next": "qwen3_next",
    "qwen35": "qwen3_5", "qwen35moe": "qwen3_5_moe", "deepseek2": "deepseek_v2",
    "gpt-oss": "gpt_oss", "falcon-h1": "falcon_h1", "glm4moe": "glm4_moe",
    "granitehybrid": "granitemoehybrid", "ernie4_5-moe": "ernie4_5_moe",
    "minimax-m2": "minimax_m2", "lfm2moe": "lfm2_moe", "rwkv6": "rwkv", "rwkv7": "rwkv",
    "kimi-linear": "kimi_linear",
}  # fmt: skip
"""Refused architectures of llama.cpp that Hugging Face spells otherwise."""

_POINTER = b"version https://git-lfs.github.com/spec/"


def check_pointer(path: Path) -> None:
    """Raises `CheckpointError` for a git-lfs pointer in the place of a file."""
    try:
        with path.open("rb") as file:
            if file.read(len(_POINTER)) != _POINTER:
                return
    except OSError:
        return  # the one that reads the file reports it
    raise CheckpointError(
        f"{path} is a git-lfs pointer, not the file itself; `git lfs pull` fetches it"
    )


class GgufFile:
    """The metadata and the tensors of one file, by llama.cpp's names. Holds no open file.

    Shapes are `[out, in]` as in PyTorch: the reverse of the file's order. Raises `CheckpointError`
    for a file that is missing, cut short, or whose header does not describe its bytes.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metadata: dict[str, Any] = {}
        self._entries: dict[str, tuple[str, tuple[int, ...], int, int]] = {}
        check_pointer(path)
        try:
            with path.open("rb") as file:
                if file.read(len(MAGIC)) != MAGIC:
                    raise CheckpointError(f"{path} is not a GGUF file")
                with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                    self._parse(_Cursor(data))
        except OSError as error:
            raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
        except (struct.error, IndexError) as error:
            raise CheckpointError(f"{path} is cut short within its header") from error
        except (UnicodeDecodeError, KeyError, RecursionError) as error:
            raise CheckpointError(f"{path} has a damaged GGUF header: {error!r}") from error
        self.shapes = {name: shape for name, (_, shape, _, _) in self._entries.items()}
        self.types = {name: kind for name, (kind, _, _, _) in self._entries.items()}
        """The element type of every tensor by ggml's name, such as Q4_K or F32."""

    def read(self, name: str) -> np.ndarray:
        """One tensor in fresh memory: F16 and BF16 as stored, anything else in float32."""
        kind, shape, start, size = self._entries[name]
        data = np.fromfile(self.path, dtype=np.uint8, count=size, offset=start)
        if data.size != size:
            raise CheckpointError(f"{self.path} was cut short while tensor {name!r} was read")
        if kind in DTYPES:
            return data.view(DTYPES[kind]).reshape(shape)
        from gguf import GGMLQuantizationType, dequantize

        rows = data.reshape(*shape[:-1], -1)  # dequantised 16 rows at a time
        values: np.ndarray = dequantize(rows, GGMLQuantizationType[kind])
        return values

    def _parse(self, cursor: _Cursor) -> None:
        cursor.at = len(MAGIC)
        (version,) = cursor.take("<I")
        if version not in _VERSIONS:
            order = " (big-endian)" if version & 0xFFFF == 0 else ""
            raise CheckpointError(
                f"{self.path} is a GGUF file of version {version}{order}, expected "
                f"{' or '.join(map(str, _VERSIONS))}"
            )
        tensors, pairs = cursor.take("<QQ")
        if tensors > MOST_TENSORS:
            raise CheckpointError(
                f"{self.path}: got {tensors} tensors, expected at most {MOST_TENSORS}"
            )
        for _ in range(pairs):
            key = cursor.string()
            self.metadata[key] = cursor.value(*cursor.take("<I"))
        found = [_tensor_entry(cursor) for _ in range(tensors)]
        alignment = self.metadata.get("general.alignment", _ALIGNMENT)
        if type(alignment) is not int or alignment < 1:
            raise CheckpointError(f"{self.path}: got alignment {alignment!r}, expected 1 or more")
        data_start = -(-cursor.at // alignment) * alignment
        for name, shape, kind, offset in found:
            if name in self._entries:
                raise CheckpointError(f"duplicate tensor {name!r} in {self.path}")
            self._entries[name] = self._checked(
                name, shape, kind, data_start + offset, file_bytes=len(cursor.data)
            )

    def _checked(
        self, name: str, shape: tuple[int, ...], kind: int, start: int, *, file_bytes: int
    ) -> tuple[str, tuple[int, ...], int, int]:
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

        one = next((one for one in GGMLQuantizationType if one == kind), None)
        if one is None or (one.name not in DTYPES and one.name not in _QUANTISED):
            called = f"of type {kind}" if one is None else one.name
            raise CheckpointError(
                f"tensor {name!r} in {self.path} is {called}, which cannot be dequantised"
            )
        block, block_bytes = GGML_QUANT_SIZES[one]
        if not shape or min(shape) < 1 or shape[-1] % block:
            raise CheckpointError(
                f"tensor {name!r} in {self.path} has shape {shape}, expected rows of whole blocks "
                f"of {block}"
            )
        size = math.prod(shape) // block * block_bytes
        if start + size > file_bytes:
            raise CheckpointError(
                f"{self.path} is cut short: tensor {name!r} ends at byte {start + size}, "
                f"the file at {file_bytes}"
            )
        return one.name, shape, start, size


class _Cursor:
    """Reads the header's values one after the other."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data = data
        self.at = 0

    def take(self, layout: str) -> tuple[Any, ...]:
        values = struct.unpack_from(layout, self.data, self.at)
        self.at += struct.calcsize(layout)
        return values

    def string(self) -> str:
        (size,) = self.take("<Q")
        end = self.at + size
        if end > len(self.data):
            raise IndexError(end)
        text = self.data[self.at : end].decode()
        self.at = end
        return text

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            return self.take(_SCALARS[kind])[0]
        inner, count = self.take("<IQ")
        if count > len(self.data) - self.at:  # an item has one byte at least
            raise IndexError(count)
        if inner in _SCALARS:
            return list(self.take(f"<{count}{_SCALARS[inner][1]}"))
        return [self.value(inner) for _ in range(count)]


def _tensor_entry(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    """Name, shape outermost first, ggml's number of the type, offset within the data."""
    name = cursor.string()
    (dimensions,) = cursor.take("<I")
    if dimensions > _MOST_DIMENSIONS:
        raise CheckpointError(f"tensor {name!r} has {dimensions} dimensions, expected at most 4")
    shape = cursor.take(f"<{dimensions}Q")[::-1]
    kind, offset = cursor.take("<IQ")
    return name, shape, kind, offset


def is_gguf(path: str | Path) -> bool:
    """Whether this is a file that calls itself GGUF, by its name or its first bytes."""
    path = Path(path)
    if not path.is_file():
        return False
    if path.suffix == ".gguf":
        return True
    with path.open("rb") as file:
        return file.read(len(MAGIC)) == MAGIC


def gguf_paths(path: str | Path) -> list[Path]:
    """All files of the model that `path` is, or is a part of, in their order.

    Raises `CheckpointError` for a part whose others are not there.
    """
    path = Path(path)
    named = _SPLIT.fullmatch(path.name)
    if named is None:
        return [path]
    stem, count = named[1], int(named[3])
    paths = [path.with_name(f"{stem}-{i:05d}-of-{count:05d}.gguf") for i in range(1, count + 1)]
    missing = [part.name for part in paths if not part.is_file()]
    if missing:
        raise CheckpointError(f"{path} is one of {count} files; missing: {', '.join(missing)}")
    return paths or [path]


class GgufModel:
    """The tensors of one model, by Hugging Face's names, over one file or several."""

    def __init__(self, path: str | Path) -> None:
        """Raises `CheckpointError` and `UnsupportedModel` with the reason."""
        self.files = [GgufFile(part) for part in gguf_paths(path)]
        self.path = Path(path)
        self.metadata = self.files[0].metadata
        self._check_split()
        kind = self.metadata.get("general.type", "model")
        if kind != "model":
            what = "a LoRA adapter" if kind == "adapter" else f"of type {kind!r}"
            raise CheckpointError(f"{path} is {what}, expected a complete model")
        self.family = self._family()
        self._places: dict[str, tuple[GgufFile, str]] = {}
        for file in self.files:
            for name in file.shapes:
                ours = self._hf_name(name)
                if ours in self._places:
                    raise CheckpointError(f"duplicate tensor {name!r} in {file.path}")
                self._places[ours] = file, name
        self._rope_factors = self._places.pop(_ROPE_FACTORS, None)
        self.shapes = {name: file.shapes[at] for name, (file, at) in self._places.items()}
        """The shape of every tensor, by Hugging Face's name."""
        self.types = {name: file.types[at] for name, (file, at) in self._places.items()}
        """The element type of every tensor, by Hugging Face's name: ggml's, such as Q4_K."""

    def read(self, name: str) -> np.ndarray:
        """One tensor, by Hugging Face's name, its rows in Hugging Face's order.

        Where llama.cpp rotates neighbouring dimensions and Hugging Face the first half against
        the second, the rows of queries and keys are stored in another order.
        """
        file, theirs = self._places[name]
        values = file.read(theirs)
        part = theirs.split(".")[-2]
        if not self.family.gguf_pairs or part not in ("attn_q", "attn_k"):
            return values
        heads = self._number("attention.head_count")
        if part == "attn_k":
            heads = self._number("attention.head_count_kv", heads)
        pairs = values.reshape(heads, -1, 2, *values.shape[1:])
        return np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(values.shape))

    def config(self) -> dict[str, Any]:
        """Builds HF's `config.json`. Raises `CheckpointError` for missing metadata."""
        heads = self._number("attention.head_count")
        hidden = self._number("embedding_length")
        dim = self._number("attention.key_length", 0) or self._number("rope.dimension_count", 0)
        dim = dim or hidden // heads
        vocabulary = self.shapes.get(f"{self.family.names['embedding']}.weight")
        if vocabulary is None:
            raise CheckpointError(f"{self.path} lacks the tensor 'token_embd.weight'")
        if self._number("attention.value_length", dim) != dim:
            raise UnsupportedModel("got values of another size than keys, expected one size")
        context = self._number("context_length")
        values: dict[str, Any] = {
            "model_type": self.family.model_type,
            "vocab_size": vocabulary[0],
            "hidden_size": hidden,
            "intermediate_size": self._number("feed_forward_length"),
            "num_hidden_layers": self._number("block_count"),
            "num_attention_heads": heads,
            "num_key_value_heads": self._number("attention.head_count_kv", heads),
            "head_dim": dim,
            "rms_norm_eps": self._real("attention.layer_norm_rms_epsilon"),
            "max_position_embeddings": context,
            "partial_rotary_factor": self._number("rope.dimension_count", dim) / dim,
            "rope_parameters": self._rope(dim),
            "tie_word_embeddings": f"{self.family.names['head']}.weight" not in self._places,
            "attention_bias": self._has_layer_bias("query"),
            "mlp_bias": self._has_layer_bias("gate"),
            "num_experts": self._number("expert_count", 0),
            "eos_token_id": self._end_ids(),
        }
        window = self._number("attention.sliding_window", 0)
        if 0 < window < context:
            values |= {"layer_types": ["sliding_attention"], "sliding_window": window}
        return values

    def _rope(self, dim: int) -> dict[str, Any]:
        rope: dict[str, Any] = {"rope_theta": self._real("rope.freq_base", 10_000.0)}
        if self._real("rope.scale_linear", 1.0) != 1.0:
            return rope | {"rope_type": "linear"}
        kind = self._of_arch("rope.scaling.type", "none")
        if self._rope_factors is not None:
            file, name = self._rope_factors
            return rope | self._llama3(file.read(name), rope["rope_theta"], dim)
        if kind == "none":
            return rope
        if kind != "yarn":
            return rope | {"rope_type": kind}
        for name in ("rope.scaling.attn_factor", "rope.scaling.yarn_attn_factor"):
            if self._real(name, 1.0) != 1.0:
                raise UnsupportedModel(f"got {name} {self._real(name, 1.0)}, expected 1")
        given = {
            "factor": self._real("rope.scaling.factor"),
            "original_max_position_embeddings": self._number(
                "rope.scaling.original_context_length", self._number("context_length")
            ),
            "beta_fast": self._real("rope.scaling.yarn_beta_fast", 32.0),
            "beta_slow": self._real("rope.scaling.yarn_beta_slow", 1.0),
        }
        return rope | {"rope_type": "yarn"} | given

    def _llama3(self, factors: np.ndarray, theta: float, dim: int) -> dict[str, Any]:
        """Llama 3's scaling, of which the file holds the divisor of each pair's speed [D/2].

        Every published model has the same two bounds and trained length, so that the factor is
        the largest divisor; what that does not explain is refused.
        """
        scaling = Llama3Scaling(
            factor=max(1.0, _shortest(float(factors.max()))), low_freq_factor=1.0,
            high_freq_factor=4.0, original_max_position_embeddings=8192,
        )  # fmt: skip
        fast = np.float32(1) / np.float32(theta) ** (np.arange(0, dim, 2, dtype=np.float32) / dim)
        kept = scaling.share_kept(fast)
        expected = 1 / (kept + (1 - kept) / scaling.factor)
        if factors.shape != expected.shape or not np.allclose(factors, expected, rtol=1e-3):
            raise UnsupportedModel(
                f"got {_ROPE_FACTORS} that is not Llama 3's scaling of 8,192 positions"
            )
        return {
            "rope_type": "llama3",
            **{name: getattr(scaling, name) for name in scaling.__slots__},
        }

    def _end_ids(self) -> list[int]:
        names = ("eos_token_id", "eot_token_id", "eom_token_id")
        found = [self.metadata.get(f"tokenizer.ggml.{name}") for name in names]
        return list(dict.fromkeys(one for one in found if one is not None))

    def _has_layer_bias(self, part: str) -> bool:
        names = self.family.names
        return f"{names['layer'].format(0)}.{names[part]}.bias" in self._places

    def _family(self) -> Family:
        arch = self.metadata.get("general.architecture")
        if not isinstance(arch, str):
            raise CheckpointError(f"{self.path} lacks 'general.architecture'")
        self._arch = arch
        known = {family.gguf: family for family in FAMILIES.values() if family.gguf is not None}
        if arch in known:
            return known[arch]
        kind = _HF_TYPES.get(arch, arch)
        if kind not in FAMILIES:
            family_of({"model_type": kind})  # raises, with the reason where there is one
        raise UnsupportedModel(
            f"got a GGUF file of architecture {arch!r}, expected one of {', '.join(known)}"
        )

    def _check_split(self) -> None:
        count = self.metadata.get("split.count", 1)
        numbers = [file.metadata.get("split.no", 0) for file in self.files]
        if count > 1 and numbers != list(range(count)):
            raise CheckpointError(
                f"{self.path} is part {numbers[0] + 1} of a model of {count} files, expected names "
                f"that end in -00001-of-{count:05d}.gguf and so on"
            )
        total = self.metadata.get("split.tensors.count")
        found = sum(len(file.shapes) for file in self.files)
        if total is not None and found != total:
            raise CheckpointError(f"{self.path}: got {found} tensors, expected {total}")

    def _hf_name(self, name: str) -> str:
        """Hugging Face's name of a tensor; the same where there is none."""
        names = self.family.names
        inside, outside = _LAYER.fullmatch(name), _OUTSIDE.fullmatch(name)
        if inside is not None and (part := _NAMES.get(inside[2])) in names:
            return f"{names['layer'].format(inside[1])}.{names[str(part)]}.{inside[3]}"
        if outside is not None and (part := _NAMES.get(outside[1])) in names:
            return f"{names[str(part)]}.{outside[2]}"
        return name

    def _of_arch(self, key: str, default: Any = None) -> Any:
        value = self.metadata.get(f"{self._arch}.{key}", default)
        if value is None:
            raise CheckpointError(f"{self.path} lacks '{self._arch}.{key}'")
        return value

    def _number(self, key: str, default: int | None = None) -> int:
        value = self._of_arch(key, default)
        if isinstance(value, list):
            if len(set(value)) != 1:
                raise UnsupportedModel(f"got {key} that differs by layer, expected one for all")
            value = value[0]
        if type(value) is not int or value < 0:
            raise CheckpointError(f"{self.path}: got {key} {value!r}, expected a number")
        return value

    def _real(self, key: str, default: float | None = None) -> float:
        value = self._of_arch(key, default)
        if type(value) not in (int, float):
            raise CheckpointError(f"{self.path}: got {key} {value!r}, expected a number")
        return _shortest(float(value))


def _shortest(value: float) -> float:
    """A float32 by its shortest decimal: 1e-5, not 9.999999747378752e-06."""
    return float(str(np.float32(value)))
