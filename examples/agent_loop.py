"""An agent with a long system prompt: each step computes only its own tokens.

    ckv serve ~/models/NAME --store /tmp/agent --name qwen
    python examples/agent_loop.py "How many seconds are there in a leap year?" --model qwen

Needs `pip install openai`, and a second terminal for the second command. The system prompt asks the
model to write `CALCULATE 1 + 2` when it needs a calculation. The next message gives it the result.
The loop ends when the model answers in other words. The server stores each step after its answer,
so the next step reads the KV of all earlier ones from the store.
"""

from __future__ import annotations

import argparse
import ast
import operator
import re
from pathlib import Path

from openai import OpenAI

RULES = """You solve problems step by step. You are bad at arithmetic, and you know it.
When something has to be worked out, write one line, CALCULATE and an expression of numbers, + - * /
and brackets, and nothing else. You will be given the result. When you know the answer, write it."""
OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.USub: operator.neg,
}


def main() -> None:
    parser = argparse.ArgumentParser(description="Let a model solve a problem with calculations.")
    parser.add_argument("task")
    parser.add_argument("--rules", type=Path, help="a long system prompt to put before the rules")
    parser.add_argument("--base-url", default="http://localhost:8000/v1")
    parser.add_argument("--api-key", default="any")
    parser.add_argument("--model", required=True)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--steps", type=int, default=8)
    args = parser.parse_args()

    client = OpenAI(base_url=args.base_url, api_key=args.api_key)
    before = args.rules.read_text(encoding="utf-8") + "\n\n" if args.rules else ""
    messages = [
        {"role": "system", "content": before + RULES},
        {"role": "user", "content": args.task},
    ]
    for step in range(args.steps):
        answer = client.chat.completions.create(
            model=args.model, messages=messages, temperature=0, max_tokens=args.max_tokens
        )
        said = answer.choices[0].message.content
        usage = answer.usage
        read = usage.prompt_tokens_details.cached_tokens
        print(f"{said}\n[step {step + 1}: {read} of {usage.prompt_tokens} tokens read back]")
        wanted = re.search(r"^CALCULATE (.+)$", said, re.M)
        if wanted is None:
            return
        messages.append({"role": "assistant", "content": said})
        messages.append({"role": "user", "content": calculate(wanted[1])})


def calculate(expression: str) -> str:
    """The value of an expression of numbers, or an error message for the model."""
    try:
        return f"{expression} = {value(ast.parse(expression, mode='eval').body)}"
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError) as error:
        return f"{expression} cannot be worked out: {error}"


def value(node: ast.expr) -> float:
    """The value of a parsed expression; `ValueError` for anything but numbers and operators."""
    match node:
        case ast.Constant(value=int() | float() as number):
            return number
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
            return OPERATORS[type(op)](value(left), value(right))
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -value(operand)
    raise ValueError("only numbers, + - * / and brackets")


if __name__ == "__main__":
    main()
