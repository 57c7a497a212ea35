"""A support assistant that remembers what it was corrected to: ask, correct, ask again.

    python support_assistant.py                            # a small LM that comes along answers
    python support_assistant.py --lm openai:gpt-4o-mini                          # OPENAI_API_KEY
    python support_assistant.py --lm openai:MODEL --base_url http://localhost:8080/v1

The LM is not trained: a correction goes into a memory on disk, and into the prompt of the next
question like it (MemPrompt). Run it twice: it remembers. Guide: docs/memory.md.
"""

import argparse
from collections.abc import Sequence

import pgra
from pgra.cli import run
from pgra.context import Context
from pgra.lm import open_lm
from pgra.lm.base import CompleterArguments

EXAMPLES = """Answer the customer's question in one short sentence.

Question: When do you open?
Clarification: we open at 9 on weekdays
Answer: We open at 9 on weekdays.

Question: Do you ship to Norway?
Answer: Yes, we ship to Norway.

Question: Who repairs my lamp?
Clarification: lamps are repaired in the shop in Leeds
Answer: Your lamp is repaired in the shop in Leeds.

"""
ASKED = "When does the hotline close?"
CORRECTION = "the hotline closes at 6 in the evening"
AGAIN = "What time does your hotline close today?"
OTHER = "Do you sell chairs?"


def main(argv: Sequence[str] | None = None) -> int:
    """Play a conversation, and print it."""
    parser = argparse.ArgumentParser(description="A support assistant with a memory.")
    parser.add_argument("--memory", default="memory.sqlite", help="its file")
    parser.add_argument("--lm", default="bundled:smollm2-135m", help="or openai:MODEL")
    parser.add_argument("--base_url", help="the endpoint, up to /v1; default: OpenAI's")
    args = parser.parse_args(argv)
    lm = open_lm(CompleterArguments(lm=args.lm, base_url=args.base_url), Context())

    with pgra.Memory(args.memory, encoder="bundled:minilm-l6") as memory:

        def ask(question: str) -> None:
            text = memory.prompt(question, template="{question}\nClarification: {feedback}")
            prompt = f"{EXAMPLES}Question: {text}\nAnswer:"
            (answer,) = lm.complete([prompt], max_new_tokens=30, stop="\n")
            print(f"\n> {question}\n{answer.text.strip()}")
            for entry in memory.search(question):
                print(f"  (recalled, similarity {entry.score:.2f}: {entry.feedback})")

        ask(ASKED)
        memory.add(ASKED, CORRECTION)
        print(f"\ncorrected: {CORRECTION}")
        ask(AGAIN)  # other words, the same question: the correction is used
        ask(OTHER)  # nothing like it was ever corrected
    return 0


if __name__ == "__main__":
    raise SystemExit(run(main))
