"""Questions about one document through LangChain. The server computes the document once.

    ckv serve ~/models/NAME --store /tmp/langchain --name qwen
    python examples/langchain_document.py handbook.txt "Who may use it?" "Who pays?" --model qwen

Needs `pip install langchain-openai`, and a second terminal for the second command. The program has
no code for ckv_jax: the server recognises the document by its tokens. LangChain's own `cache_read`
is the number of prompt tokens that the server read from the store.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from langchain_core.prompts import ChatPromptTemplate
from langchain_openai import ChatOpenAI


def main() -> None:
    parser = argparse.ArgumentParser(description="Ask about a document through LangChain.")
    parser.add_argument("document", type=Path)
    parser.add_argument("questions", nargs="+")
    parser.add_argument("--base-url", default="http://localhost:8000/v1")
    parser.add_argument("--api-key", default="any")
    parser.add_argument("--model", required=True)
    parser.add_argument("--max-tokens", type=int, default=128)
    args = parser.parse_args()

    model = ChatOpenAI(
        base_url=args.base_url,
        api_key=args.api_key,
        model=args.model,
        temperature=0,
        max_tokens=args.max_tokens,
    )
    prompt = ChatPromptTemplate.from_messages(
        [("system", "Answer from this document.\n\n{document}"), ("human", "{question}")]
    )
    chain = prompt | model
    document = args.document.read_text(encoding="utf-8")
    for question in args.questions:
        answer = chain.invoke({"document": document, "question": question})
        usage = answer.usage_metadata
        read = usage["input_token_details"].get("cache_read", 0)
        print(f"{question}\n{answer.content}\n[{read} of {usage['input_tokens']} tokens read back]")


if __name__ == "__main__":
    main()
