"""Second stage: sentences a second, as released, with the prefix shared, and with no prefix at all.

    python benchmarks/rerank.py --quick
    python benchmarks/rerank.py --lm facebook/opt-1.3b --json figures.json

All variants read the same real sentences behind the same 8-exemplar prefix, with the same LM, in
one run, in turn and repeatedly; the best of the repetitions counts. Loading is not counted.

    released  the whole prompt for each text, batches of 4 in the corpus's order, right padding
    expanded  the prefix run once, a copy of its cache for each text
    packed    the prefix run once, texts side by side behind it: what pgra does
    floor     the texts' own tokens, packed, with no prefix: the least that can be asked for
"""

import argparse
import logging
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from pgra.commands.common import quiet_libraries
from pgra.config import CorpusArguments, DataArguments
from pgra.data.corpus import open_corpus
from pgra.data.splits import load_splits
from pgra.data.tasks import load_task
from pgra.io import package_versions, write_json
from pgra.models.batching import token_budget_batches
from pgra.models.causal_lm import CausalLM
from pgra.models.loading import batch_budget
from pgra.models.packing import RowLayout, pack_rows
from pgra.models.prefix import PromptedEncoder
from pgra.pipelines.pgra import prompt_template
from pgra.prompts.fewshot import FewShotPrompt, build_prompt

RELEASED_BATCH = 4
ROW_TOKENS = 512


def main(argv: list[str] | None = None) -> int:
    """Measure and print one table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--lm", default="bundled:smollm2-135m", help="hub id, folder or bundled:NAME"
    )
    parser.add_argument("--corpus", default="bundled:wikipedia-19k")
    parser.add_argument("--num_texts", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--quick", action="store_true", help="128 texts, 1 repetition")
    parser.add_argument("--json", type=Path, help="where to write the figures")
    args = parser.parse_args(argv)
    if args.quick:
        args.num_texts, args.repeats = 128, 1
    logging.basicConfig(level=logging.WARNING)
    quiet_libraries()
    figures = measure(args)
    if args.json is not None:
        write_json(args.json, {"figures": figures, "versions": package_versions()})
    return 0


def measure(args: argparse.Namespace) -> dict[str, float]:
    """Time all variants and print them."""
    lm = CausalLM.from_name(args.lm, device=args.device)
    prompt = _prompt()
    texts = _texts(args)
    # The released way is slow and steady: a part of the texts is enough to time it.
    part = texts[: max(RELEASED_BATCH, len(texts) // 8)]
    expanded = PromptedEncoder(lm, prompt, sharing="expanded")
    packed = PromptedEncoder(lm, prompt, sharing="packed")
    whole = lm.tokenize([prompt.prefix + _suffix(prompt, text) for text in texts])
    own = [ids[len(packed.shared_ids) - len(lm.lead_ids) :] for ids in whole]
    variants: dict[str, tuple[int, Callable[[], object]]] = {
        "released": (len(part), lambda: run_released(lm, whole[: len(part)])),
        "expanded": (len(texts), lambda: expanded.encode(texts)),
        "packed": (len(texts), lambda: packed.encode(texts)),
        "floor": (len(texts), lambda: run_floor(lm, own)),
    }
    for encoder in (expanded, packed):
        encoder.encode(texts[:8])  # the prefix, the self-check and the first kernels
    rates = {name: 0.0 for name in variants}
    for _ in range(args.repeats):
        for name, (count, run) in variants.items():
            rates[name] = max(rates[name], count / _seconds(run, lm.device))
    figures = {f"{name}_texts_per_second": rate for name, rate in rates.items()}
    figures["speedup_vs_released"] = rates["packed"] / rates["released"]
    figures["share_of_floor"] = rates["packed"] / rates["floor"]
    figures["floor_vs_released"] = rates["floor"] / rates["released"]
    figures["prefix_tokens"] = float(len(packed.shared_ids))
    figures["own_tokens_per_text"] = sum(map(len, own)) / len(own)
    figures["packed_tokens_per_second"] = rates["packed"] * figures["own_tokens_per_text"]
    _show(figures, rates, args, lm)
    return figures


def _prompt() -> FewShotPrompt:
    task = load_task("rotten-tomatoes")
    data = DataArguments(task=task.name, dataset_name="bundled:rotten-tomatoes")
    train = load_splits(task, data).train
    return build_prompt(prompt_template(task), train, task.prompt_words, num_exemplars=8)


def _suffix(prompt: FewShotPrompt, text: str) -> str:
    return prompt.suffix(prompt.template.passage_fields(text))


def _texts(args: argparse.Namespace) -> list[str]:
    artifacts = Path("artifacts")
    corpus = open_corpus(CorpusArguments(corpus=args.corpus), artifacts)
    step = max(1, len(corpus) // args.num_texts)
    return corpus.texts(range(0, step * args.num_texts, step))


def run_released(lm: CausalLM, whole: list[list[int]]) -> None:
    """Read whole prompts in batches of 4, in the order given."""
    lead = lm.lead_ids
    for start in range(0, len(whole), RELEASED_BATCH):
        lm.states_of([lead + ids for ids in whole[start : start + RELEASED_BATCH]]).cpu()


@torch.inference_mode()
def run_floor(lm: CausalLM, own: list[list[int]]) -> None:
    """Read the texts' own tokens in packed rows, with nothing before them."""
    budget = batch_budget(ROW_TOKENS, lm.device)
    for batch in token_budget_batches([len(ids) for ids in own], budget):
        lengths = [len(own[i]) for i in batch]
        rows = pack_rows(lengths, ROW_TOKENS)
        layout = RowLayout.of(lengths, rows)
        ids = torch.zeros(layout.segments.shape, dtype=torch.long)
        for row, members in enumerate(rows):
            line = [token for i in members for token in own[batch[i]]]
            ids[row, : len(line)] = torch.tensor(line)
        hidden = lm.model(
            input_ids=ids.to(lm.device),
            position_ids=layout.positions.to(lm.device),
            attention_mask=layout.mask(0, lm.dtype).to(lm.device),
            use_cache=False,
        ).last_hidden_state
        hidden[layout.rows.to(lm.device), layout.ends.to(lm.device)].cpu()


def _seconds(run: Callable[[], object], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def _show(
    figures: dict[str, float], rates: dict[str, float], args: argparse.Namespace, lm: CausalLM
) -> None:
    name = torch.cuda.get_device_name(lm.device) if lm.device.type == "cuda" else "CPU"
    lines = [
        f"{args.lm} on {name} ({torch.get_num_threads()} threads), {lm.dtype}: {args.num_texts} "
        f"sentences, {figures['prefix_tokens']:.0f} shared tokens, "
        f"{figures['own_tokens_per_text']:.1f} own tokens a sentence",
        f"{'variant':<10}{'texts/s':>10}{'x released':>12}{'of floor':>10}",
    ]
    for variant, rate in rates.items():
        ratio, share = rate / rates["released"], rate / rates["floor"]
        lines.append(f"{variant:<10}{rate:>10.2f}{ratio:>12.2f}{share:>10.0%}")
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    sys.exit(main())
