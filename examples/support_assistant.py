"""A support assistant that remembers what it was corrected to: ask, correct, ask again.

    python support_assistant.py                            # a small LM that comes along answers
    python support_assistant.py --model gpt-4o-mini                              # OPENAI_API_KEY
    OPENAI_API_KEY=none python support_assistant.py --model MODEL --base_url http://localhost:8080/v1

The LM is not trained: a correction goes into a memory on disk, and into the prompt of the next like
question (MemPrompt). Run it twice: it remembers. Guide: docs/memory.md.
"""

import argparse
from collections.abc import Callable, Sequence

import pgra

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
AGAIN, OTHER = "What time does your hotline close today?", "Do you sell chairs?"


def open_lm(model: str | None, base_url: str | None) -> Callable[[str], str]:
    """Return what goes on with a prompt: an endpoint's model, or a bundled LM."""
    if model is None:
        lm = pgra.CausalLM("bundled:smollm2-135m", with_head=True)
        return lambda prompt: lm.complete([prompt], max_new_tokens=30, stop="\n")[0].text.strip()
    from openai import OpenAI

    client = OpenAI(base_url=base_url)  # the key is read from OPENAI_API_KEY

    def ask(prompt: str) -> str:
        told = f"Write only the last answer.\n\n{prompt}"
        reply = client.chat.completions.create(
            model=model, messages=[{"role": "user", "content": told}]
        )
        return (reply.choices[0].message.content or "").strip()

    return ask


def main(argv: Sequence[str] | None = None) -> dict[str, str]:
    """Play a conversation, print it, and return the last answer to each question."""
    parser = argparse.ArgumentParser(description="A support assistant with a memory.")
    parser.add_argument("--memory", default="memory.sqlite", help="its file")
    parser.add_argument("--model", help="of the endpoint; default: no endpoint, a bundled LM")
    parser.add_argument("--base_url", help="the endpoint, up to /v1; default: OpenAI's")
    args = parser.parse_args(argv)
    complete, answers = open_lm(args.model, args.base_url), {}

    with pgra.Memory(args.memory, encoder="bundled:minilm-l6", threshold=0.6) as memory:

        def ask(question: str) -> None:
            shown = memory.prompt(question, template="{question}\nClarification: {feedback}")
            answers[question] = complete(f"{EXAMPLES}Question: {shown}\nAnswer:")
            print(f"\n> {question}\n{answers[question]}")
            for entry in memory.lookup(question):
                print(f"  (recalled, likeness {entry.score:.2f}: {entry.feedback})")

        ask(ASKED)
        memory.add(ASKED, CORRECTION)
        print(f"\ncorrected: {CORRECTION}")
        ask(AGAIN)  # other words, the same question: the correction is used
        ask(OTHER)  # nothing like it was ever corrected
    return answers


if __name__ == "__main__":
    main()
