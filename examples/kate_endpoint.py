"""KATE with any LM: the nearest labelled examples go into the prompt, the LM answers.

    python kate_endpoint.py                                # a small LM that comes along answers
    python kate_endpoint.py "The screen is black" --lm openai:gpt-4o-mini        # OPENAI_API_KEY
    python kate_endpoint.py --lm openai:MODEL --base_url http://localhost:8080/v1

The endpoint may be any that `pip install openai` can ask: OpenAI's, vLLM, llama.cpp, Ollama. Which
team a message is for is found by its neighbours in POOL. Guide: docs/icl.md.
"""

import argparse
from collections.abc import Sequence

import pgra
from pgra.cli import run
from pgra.context import Context
from pgra.lm import open_lm
from pgra.lm.base import CompleterArguments

POOL = [
    ("How do I change my card?", "billing"),
    ("I was charged twice this month.", "billing"),
    ("Can I get an invoice?", "billing"),
    ("My refund has not arrived.", "billing"),
    ("The app closes when I open a photo.", "bug"),
    ("It freezes at start.", "bug"),
    ("The map stays white on my phone.", "bug"),
    ("Sync stops at 99 percent.", "bug"),
    ("Please add a dark theme.", "wish"),
    ("A widget would be nice.", "wish"),
    ("Could you support French?", "wish"),
    ("I would love to export to PDF.", "wish"),
]
MESSAGES = ["You took the money two times!", "The screen goes black.", "Can you add Spanish?"]


def main(argv: Sequence[str] | None = None) -> int:
    """Print the first prompt, and a label for each message."""
    parser = argparse.ArgumentParser(description="KATE with any LM.")
    parser.add_argument("messages", nargs="*", default=MESSAGES)
    parser.add_argument("--lm", default="bundled:smollm2-135m", help="or openai:MODEL")
    parser.add_argument("--base_url", help="the endpoint, up to /v1; default: OpenAI's")
    args = parser.parse_args(argv)
    lm = open_lm(CompleterArguments(lm=args.lm, base_url=args.base_url), Context())
    selector = pgra.ExemplarSelector(
        POOL, encoder="bundled:minilm-l6", order="nearest-last", leak_guard=False
    )
    prompts = [selector.prompt(message, k=4) for message in args.messages]
    print(prompts[0])
    answers = lm.complete(prompts, max_new_tokens=5, stop="\n")
    for message, answer in zip(args.messages, answers, strict=True):
        print(f"{answer.text.strip():8} {message}")
    return 0


if __name__ == "__main__":
    raise SystemExit(run(main))
