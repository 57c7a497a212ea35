"""KATE with a chat endpoint: the nearest labelled examples go into the prompt, the LM answers.

    python kate_endpoint.py                                # a small LM that comes along answers
    python kate_endpoint.py "The screen is black" --model gpt-4o-mini            # OPENAI_API_KEY
    OPENAI_API_KEY=none python kate_endpoint.py --model MODEL --base_url http://localhost:8080/v1

The endpoint may be any that `pip install openai` can ask: OpenAI's, vLLM, llama.cpp, Ollama. Which
team a message is for is told by its neighbours in POOL. Guide: docs/icl.md.
"""

import argparse
from collections.abc import Callable, Sequence

import pgra

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


def open_lm(model: str | None, base_url: str | None) -> Callable[[str], str]:
    """Return what goes on with a prompt: an endpoint's model, or a bundled LM."""
    if model is None:
        lm = pgra.CausalLM("bundled:smollm2-135m", with_head=True)
        return lambda prompt: lm.complete([prompt], max_new_tokens=5, stop="\n")[0].text.strip()
    from openai import OpenAI

    client = OpenAI(base_url=base_url)  # the key is read from OPENAI_API_KEY

    def ask(prompt: str) -> str:
        told = f"Write only the last label, one word.\n\n{prompt}"
        reply = client.chat.completions.create(
            model=model, messages=[{"role": "user", "content": told}]
        )
        return (reply.choices[0].message.content or "").strip()

    return ask


def main(argv: Sequence[str] | None = None) -> dict[str, str]:
    """Print a label for each message, and return them."""
    parser = argparse.ArgumentParser(description="KATE with a chat endpoint.")
    parser.add_argument("messages", nargs="*", default=MESSAGES)
    parser.add_argument("--model", help="of the endpoint; default: no endpoint, a bundled LM")
    parser.add_argument("--base_url", help="the endpoint, up to /v1; default: OpenAI's")
    args = parser.parse_args(argv)
    selector = pgra.ExemplarSelector(
        POOL, encoder="bundled:minilm-l6", order="nearest-last", leak_guard=False
    )
    ask = open_lm(args.model, args.base_url)
    prompts = {message: selector.prompt(message, k=4) for message in args.messages}
    print(next(iter(prompts.values())))
    answers = {message: ask(prompt) for message, prompt in prompts.items()}
    for message, label in answers.items():
        print(f"{label:8} {message}")
    return answers


if __name__ == "__main__":
    main()
