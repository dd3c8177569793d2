"""Reference pages, written from the code: commands, configuration, HTTP, metrics, errors, API."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import itertools
import re
import textwrap
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import typer
from pydantic import BaseModel

import ckv_jax
from ckv_jax import Blend, EngineConfig, Request, SamplingParams, StoreConfig, SystemConfig
from ckv_jax.cli.app import app
from ckv_jax.config import OwnParts
from ckv_jax.errors import CkvError
from ckv_jax.selection.select import Coarse, Ends, Select
from ckv_jax.server import adapters, messages, observability, schema
from ckv_jax.server.app import model_routes, status_routes
from ckv_jax.server.config import ServerConfig, Settings
from ckv_jax.server.prefixes import NewPrefix, PrefixChange, prefix_routes
from ckv_jax.server.service import Service
from ckv_jax.storage import Layout, PrefixRecord

CONFIGS = (
    EngineConfig, SamplingParams, Request, Blend, StoreConfig, PrefixRecord, ServerConfig, Settings,
    SystemConfig, Select, Coarse, Ends, OwnParts, Layout,
)  # fmt: skip
BODIES = {
    "POST /v1/chat/completions": schema.ChatRequest,
    "POST /v1/completions": schema.CompletionRequest,
    "POST /v1/responses": adapters.ResponsesRequest,
    "POST /v1/messages": adapters.MessagesRequest,
    "POST /v1/prefixes": NewPrefix,
    "PATCH /v1/prefixes/{id}": PrefixChange,
}
NESTED = (
    schema.CkvOptions, schema.StreamOptions, messages.Message, messages.Part, messages.ToolCall,
    messages.FunctionCall, messages.Tool, messages.Function, messages.NamedTool,
    messages.NamedFunction, messages.AnswerFormat, messages.JsonSchema, messages.StructuredOutputs,
    adapters.AnthropicMessage, adapters.TextBlock, adapters.TextOptions,
)  # fmt: skip
"""Objects in bodies."""


def commands() -> str:
    """Every command with its arguments and options, from the help texts."""
    parts = [
        "# Commands",
        "`ckv COMMAND --help` prints the same text. `ckv --version` prints the version; with `-v` "
        "it also prints the version of JAX and the native kernels that there are. Exit codes: "
        "0 done, 1 failed with one line on stderr, 2 wrong usage, 3 done in part, 130 interrupted.",
    ]
    group: Any = typer.main.get_command(app)
    for name, command in group.commands.items():
        needed = [
            one for one in command.params if one.required or one.param_type_name == "argument"
        ]
        words = [f"ckv {name}", *(_spelled(one).replace("`", "") for one in needed), "[OPTIONS]"]
        usage = " ".join(words)
        parts += [f"## ckv {name}", command.help, f"```text\n{usage}\n```"]
        rows = [(_spelled(one), _default(one), one.help or "") for one in command.params]
        parts.append(_table(("", "default", "meaning"), rows))
    return "\n\n".join(parts)


def configuration() -> str:
    """Every field of every configuration, from the docstrings."""
    parts = [
        "# Configuration",
        "Each class is a frozen dataclass. It refuses a wrong value with an error that says what "
        "it got and what it expected. Most fields of `ServerConfig` are options of `ckv serve`.",
    ]
    for cls in CONFIGS:
        rows = [
            (f"`{field.name}`", _type(field.type), _value(field), lines.get(field.name, ""))
            for lines in [_lines(cls)]
            for field in dataclasses.fields(cls)
            if not field.name.startswith("_")
        ]
        home = "ckv_jax" if cls.__name__ in ckv_jax.__all__ else cls.__module__
        parts += [f"## {cls.__name__}", f"`from {home} import {cls.__name__}`"]
        parts.append(_plain(inspect.getdoc(cls)))
        parts.append(_table(("field", "type", "default", "meaning"), rows))
    return "\n\n".join(parts)


def http() -> str:
    """Every route, and the fields of every body, from the schema that checks them."""
    service: Any = SimpleNamespace(**vars(Service) | {"engine": None, "ingests": None})
    routes = [*model_routes(service), *prefix_routes(service), *status_routes(service)]
    rows = [
        (
            f"`{' '.join(sorted(set(route.methods or ()) - {'HEAD'}))}`",
            "`" + route.path.replace(":path", "") + "`",
            _plain(inspect.getdoc(route.endpoint)),
        )
        for route in routes
    ]
    parts = [
        "# HTTP API",
        "These are the APIs of OpenAI and Anthropic, with fields of our own under `ckv`. [The "
        "server](../server.md) shows how to use them, and lists the fields that it ignores or "
        "refuses. A field without a meaning here has the meaning that it has in their APIs.",
        _table(("method", "path", "what it does"), rows),
    ]
    for title, model in BODIES.items():
        about = _plain(inspect.getdoc(model)).removeprefix(f"`{title}`").strip(" .:")
        parts += [f"## {title}", f"{about[:1].upper()}{about[1:]}." * bool(about), _fields(model)]
    parts.append("## Nested objects")
    for model in NESTED:
        parts += [f"### {model.__name__}", _plain(inspect.getdoc(model)), _fields(model)]
    return "\n\n".join(parts)


def metrics() -> str:
    """Every metric, from the calls that define it."""
    parts = [
        "# Metrics",
        "`GET /metrics` returns these metrics in Prometheus's text format. "
        "[What to watch](../server.md#what-to-watch) lists the ones to alert on.",
        _table(("name", "type", "labels", "meaning"), list(_defined_metrics())),
    ]
    return "\n\n".join(parts)


def errors() -> str:
    """Every error that is raised on purpose, and what the server makes of it."""
    parts = [
        "# Errors",
        "All errors but `ValueError` and `TypeError` derive from `CkvError`. "
        "[Troubleshooting](../troubleshooting.md) says what to do about each line that `ckv` "
        "prints. [The server](../server.md) lists the codes of its answers.",
        _table(("error", "subclass of", "cause"), list(_raised(CkvError))),
    ]
    return "\n\n".join(parts)


def python() -> str:
    """The public classes, by mkdocstrings."""
    names = sorted(set(ckv_jax.__all__) - {cls.__name__ for cls in CONFIGS})
    order = ["Engine", "Answer", *(name for name in names if name not in ("Engine", "Answer"))]
    known = [name for name in order if not _is_error(name)]
    parts = [
        "# Python API",
        "Import all of these from `ckv_jax`. [Configuration](configuration.md) lists the "
        "configurations, and [errors](errors.md) the errors. "
        "[Requests](../requests.md) has examples.",
        *(f"::: ckv_jax.{ckv_jax._HOME[name]}.{name}" for name in known),
    ]
    return "\n\n".join(parts)


MEANINGS = {
    "model": "the name that `GET /v1/models` lists, or `NAME:sparse`",
    "messages": "the conversation so far",
    "stream": "whether the server sends tokens as server-sent events",
    "temperature": "0: the likeliest token; higher values flatten the distribution",
    "top_p": "samples from the likeliest tokens that together have this probability",
    "top_k": "samples from this many of the likeliest tokens; -1 or 0: all",
    "max_tokens": "upper limit on the tokens of the answer",
    "max_completion_tokens": "the same, by OpenAI's newer name",
    "min_tokens": "lower limit on the tokens of the answer",
    "ignore_eos": "whether the answer continues after an end-of-text token",
    "n": "number of answers to each prompt",
    "best_of": "must equal `n`, if given",
    "seed": "a request with the same seed draws the same random numbers",
    "stop": "strings that end the answer",
    "stop_token_ids": "token ids that end the answer",
    "ckv": "our own options",
    "logprobs": "log probabilities of the tokens",
    "top_logprobs": "number of likeliest tokens to report for each token",
    "echo": "whether the prompt comes before the answer",
    "chat_template_kwargs": "variables for the chat template",
    "reasoning_effort": "a variable for the chat template, if it has one",
    "tools": "functions that the answer may call",
    "tool_choice": "whether the answer may or must call a tool, or which one",
    "parallel_tool_calls": "whether the answer may call several tools",
    "input": "a text, or items: messages, reasoning, calls of functions and their outputs",
    "instructions": "text of the system's turn",
    "system": "text of the system's turn",
    "previous_response_id": "the response that this one continues",
    "store": "whether the response is kept for `previous_response_id`",
    "max_output_tokens": "upper limit on the tokens of the answer",
    "stop_sequences": "strings that end the answer",
}
"""Of fields that the APIs of OpenAI, Anthropic or vLLM have as well."""

PAGES: dict[str, Callable[[], str]] = {
    f"docs/reference/{page.__name__}.md": page
    for page in (commands, configuration, http, metrics, errors, python)
}


def _spelled(parameter: Any) -> str:
    if parameter.param_type_name == "argument":
        return f"`{parameter.metavar or parameter.name.upper()}`"
    names = [*parameter.opts, *parameter.secondary_opts]
    value = "" if parameter.is_flag else f" {parameter.metavar or parameter.name.upper()}"
    return ", ".join(f"`{name}{value}`" for name in names)


def _default(parameter: Any) -> str:
    if parameter.required:
        return "required"
    value = parameter.default
    return "" if value in (None, False, "") or callable(value) else f"`{value}`"


def _type(annotation: Any) -> str:
    return f"`{annotation}`"


def _value(field: dataclasses.Field[Any]) -> str:
    if field.default is dataclasses.MISSING:
        return "" if field.default_factory is not dataclasses.MISSING else "required"
    if type(field.default) is int:
        return f"`{field.default:_}`"
    return f"`{getattr(field.default, '__name__', repr(field.default))}`"


def _lines(cls: type) -> dict[str, str]:
    """What is written under each field of a class and of those it derives from."""
    found: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if not base.__module__.startswith("ckv_jax"):
            continue
        tree = ast.parse(textwrap.dedent(inspect.getsource(base)))
        for before, after in itertools.pairwise(tree.body[0].body):  # type: ignore[attr-defined]
            if isinstance(before, ast.AnnAssign) and isinstance(after, ast.Expr):
                found[ast.unparse(before.target)] = _plain(ast.literal_eval(after.value))
        for _, name, line in re.findall(
            r"^( +)([a-z_]+(?:, [a-z_]+)*): (.*(?:\n\1 +.*)*)", inspect.getdoc(base) or "", re.M
        ):
            found |= dict.fromkeys(name.split(", "), _plain(line))
    return found


def _fields(model: type[BaseModel]) -> str:
    properties = model.model_json_schema()
    needed = properties.get("required", ())
    lines = _lines(model)
    rows = [
        (f"`{name}`", _json_type(of), "required" if name in needed else _json_default(of),
         lines.get(name, "") or MEANINGS.get(name, ""))
        for name, of in properties["properties"].items()
    ]  # fmt: skip
    return _table(("field", "type", "default", "meaning"), rows)


def _json_type(of: dict[str, Any]) -> str:
    """A type of a JSON schema in a few words, with its bounds."""
    if "$ref" in of:
        name = of["$ref"].rsplit("/", 1)[-1]
        return f"[{name}](#{name.lower()})"
    if "anyOf" in of:
        return " or ".join(_json_type(one) for one in of["anyOf"] if one.get("type") != "null")
    if "enum" in of:
        return ", ".join(f"`{value}`" for value in of["enum"])
    if "const" in of:
        return f"`{of['const']}`"
    if of.get("type") == "array":
        return f"list of {_json_type(of['items'])}"
    bounds = {
        "exclusiveMinimum": "above",
        "minimum": "from",
        "maximum": "to",
        "maxLength": "length to",
    }
    limits = [
        f"{word} {of[key]:g}" for key, word in bounds.items() if abs(of.get(key, 2**53)) < 2**53
    ]
    return " ".join([of.get("type", "any"), *limits])


def _json_default(of: dict[str, Any]) -> str:
    value = of.get("default")
    return "" if value in (None, "") or isinstance(value, dict) else f"`{value}`"


def _defined_metrics() -> Iterator[tuple[str, ...]]:
    """Name, type, labels and meaning of each call that defines a metric."""
    kinds = {
        "_gauge": "gauge", "_count": "counter", "GaugeMetricFamily": "gauge",
        "CounterMetricFamily": "counter", "_counts": "counter", "_counter": "counter",
        "_histogram": "histogram",
    }  # fmt: skip
    tree = ast.parse(inspect.getsource(observability))
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        made = getattr(call.func, "attr", getattr(call.func, "id", ""))
        texts = [arg.value for arg in call.args if isinstance(arg, ast.Constant)]
        if made not in kinds or len(texts) < 2 or not isinstance(texts[1], str):
            continue
        name = texts[0] if ":" in texts[0] or texts[0].startswith("ckv_") else f"ckv_{texts[0]}"
        kind = kinds[made]
        labels = texts[2].split() if made in ("_counter", "_counts") and len(texts) > 2 else []
        for keyword in call.keywords:
            labels += ast.literal_eval(keyword.value) if keyword.arg == "labels" else []
        end = {"counter": "_total", "histogram": "_seconds"}.get(kind, "")
        yield f"`{name}{end}`", kind, ", ".join(f"`{label}`" for label in labels), texts[1]


def _raised(cls: type) -> Iterator[tuple[str, ...]]:
    parents = ", ".join(f"`{base.__name__}`" for base in cls.__bases__)
    summary = _plain((inspect.getdoc(cls) or "").split("\nAttributes:")[0])
    if cls.__module__ in ("ckv_jax.errors", "ckv_jax.storage.errors"):
        yield f"`{cls.__name__}`", parents, summary
    for below in cls.__subclasses__():
        yield from _raised(below)


def _is_error(name: str) -> bool:
    return issubclass(getattr(ckv_jax, name), Exception)


def _plain(text: str | None) -> str:
    """A docstring as one line, without its lists of arguments."""
    whole = re.split(r"\n\s*(?:Args|Attributes|Returns|Raises):\n", text or "")[0]
    return " ".join(whole.split())


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join(f"| {' | '.join(_cell(cell) for cell in row)} |" for row in lines)


def _cell(text: str) -> str:
    return " ".join(text.split())
