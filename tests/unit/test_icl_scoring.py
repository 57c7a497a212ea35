"""Label words scored behind a shared prefix, against the whole prompt through the whole LM."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from conftest import with_rerank
from pgra.methods.icl import read_queries, run, score_words
from safetensors.torch import load_file, save_file
from tiny_models import build_lm
from transformers import AutoModelForCausalLM, AutoTokenizer

from pgra.config import ReaderArguments, RerankArguments
from pgra.core import Context, Example
from pgra.data.tasks import load_task
from pgra.errors import ArtifactError, ConfigError, ModelError
from pgra.lm.causal_lm import CausalLM
from pgra.lm.kernels import packed_for
from pgra.lm.score import AnswerWords, LMHead
from pgra.methods.pgra import find_evidence, prompt_template, read_task
from pgra.prompts.fewshot import FewShotPrompt
from pgra.prompts.template import PromptTemplate
from pgra.reader.arguments import ReaderTrainingArguments
from pgra.report.results import read_object
from pgra.rerank.states import open_prompted_encoder, open_query_bank
from pgra.runs import run_system

CPU = Context(device="cpu")
# "positive" is several tokens to most of these tokenizers, and shares its first with others.
WORDS = {"bad": "negative", "good": "positive", "so": "possibly so", "sea": "sea"}
PROMPT = FewShotPrompt(
    PromptTemplate("Does the following sentence have a sentiment?\n{text}"),
    "Follow the demonstrations:\nDoes the following sentence have a sentiment?\n"
    "A dull, lifeless story.\nThe answer is negative",
)
EXAMPLES = [
    Example(f"test-{i}", {"text": text})
    for i, text in enumerate(
        ["The film is warm and funny.", "A dull plot", "He was born in 1925.", "Red apples"]
    )
]


def encoder_of(folder, **changes):
    args = RerankArguments(lm=str(folder), **changes)
    return open_prompted_encoder(args, PROMPT, CPU, with_head=True)


def score(folder, tmp_path, *, prompt=PROMPT, words=WORDS, **changes):
    encoder = encoder_of(folder)
    encoder.prompt = prompt
    told = AnswerWords.of(encoder, words)
    bank = open_query_bank(encoder, Context(artifacts=tmp_path), "lm")
    read_queries(encoder, bank, EXAMPLES, told, shard_rows=3)
    return score_words(encoder, bank, EXAMPLES, told, **changes)


def by_hand(folder, prompt=PROMPT, *, mean=False):
    """Run each prompt with each word whole, and add up its tokens' log-probabilities."""
    lm = AutoModelForCausalLM.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    found = np.zeros((len(EXAMPLES), len(WORDS)))
    for row, example in enumerate(EXAMPLES):
        asked = prompt.prefix + prompt.suffix(example.fields)
        start = len(tokenizer(asked).input_ids)
        for column, word in enumerate(WORDS.values()):
            ids = tokenizer(f"{asked} {word}", return_tensors="pt").input_ids
            with torch.no_grad():
                chances = lm(ids).logits[0, start - 1 : -1].log_softmax(-1)
            told = chances.gather(1, ids[0, start:, None])
            found[row, column] = float(told.mean() if mean else told.sum())
    return found


def test_scores_are_those_of_the_whole_lm(lm_dir, tmp_path):
    expected = by_hand(lm_dir)
    np.testing.assert_allclose(score(lm_dir, tmp_path), expected, rtol=2e-4, atol=2e-4)
    bare = FewShotPrompt(PROMPT.template)  # the control: without exemplars they are others
    assert np.abs(score(lm_dir, tmp_path, prompt=bare) - expected).max() > 0.05


def test_words_of_several_tokens_are_scored_by_all_of_them(lm_dirs, tmp_path):
    encoder = encoder_of(lm_dirs["gpt2"])
    words = AnswerWords.of(encoder, WORDS)
    lengths = [len(ids) for ids in words.tokens.values()]
    assert max(lengths) > 1
    assert words.beginnings[0] == ()
    assert len(words.beginnings) == len({ids[:i] for ids in words.tokens.values() for i in
                                         range(len(ids))})  # fmt: skip
    found = score(lm_dirs["gpt2"], tmp_path)
    mean = score(lm_dirs["gpt2"], tmp_path, length_normalize=True)
    np.testing.assert_allclose(mean * lengths, found, rtol=1e-5)
    np.testing.assert_allclose(mean, by_hand(lm_dirs["gpt2"], mean=True), rtol=2e-4, atol=2e-4)


def test_beginnings_and_what_follows_them():
    words = AnswerWords({"a": (1,), "b": (2, 3, 4), "c": (2, 3, 5), "d": (2, 6)})
    assert words.beginnings == [(), (2,), (2, 3)]
    assert words.nexts(()) == {"a": 1, "b": 2, "c": 2, "d": 2}
    assert words.nexts((2,)) == {"b": 3, "c": 3, "d": 6}
    assert words.nexts((2, 3)) == {"b": 4, "c": 5}


def linear(weight, bias=None):
    layer = torch.nn.Linear(*weight.shape[::-1], bias=bias is not None)
    layer.weight.data = weight
    if bias is not None:
        layer.bias.data = bias
    return layer


def test_log_chances_are_those_of_a_softmax_over_the_vocabulary(monkeypatch):
    generator = torch.Generator().manual_seed(0)
    weight, states = (torch.randn(n, 8, generator=generator) for n in (50, 7))
    expected = (states @ weight.T).log_softmax(1)[:, [4, 44]]
    head = LMHead(linear(weight))
    torch.testing.assert_close(head.log_chances(states, [4, 44]), expected)
    monkeypatch.setattr("pgra.lm.score._VOCABULARY_ROWS", 16)
    monkeypatch.setattr("pgra.lm.score._STATE_ROWS", 3)
    torch.testing.assert_close(head.log_chances(states, [4, 44]), expected)  # in pieces
    shifted = LMHead(linear(weight, torch.arange(50.0)))
    assert not torch.allclose(shifted.log_chances(states, [4, 44]), expected)  # the control
    assert head.log_chances(states[:0], [4, 44]).shape == (0, 2)


def test_all_logits_come_from_a_packed_copy_where_there_is_one():
    torch.manual_seed(0)
    head, states = LMHead(torch.nn.Linear(8, 50)), torch.randn(7, 8)
    plain = head.logits(states)
    with packed_for(head.layer):
        with torch.no_grad():
            head.layer.weight.zero_()
        torch.testing.assert_close(head.logits(states), plain)
        assert (head.logits(states, slice(0, 50)) == head.layer.bias).all()  # the control
    assert (head.logits(states) == head.layer.bias).all()


def test_a_word_that_begins_another_is_refused(lm_dirs):
    encoder = encoder_of(lm_dirs["gpt2"])
    with pytest.raises(ConfigError, match=r"prompt word 'great' \(x\) begins 'great success' \(y"):
        AnswerWords.of(encoder, {"x": "great", "y": "great success"})


def test_a_prompt_that_leaves_no_room_for_its_answer_is_refused(lm_dirs, tmp_path):
    encoder = encoder_of(lm_dirs["gpt2"])
    words = AnswerWords({"x": (5, 6), "y": (7,)})
    bank = open_query_bank(encoder, Context(artifacts=tmp_path), "lm")
    long = [Example("test-0", {"text": "sea " * 600})]  # cut to the window of 512
    with pytest.raises(ConfigError, match="has 513 tokens .* reads 512: use --max_prompt_tokens 5"):
        read_queries(encoder, bank, long, words, shard_rows=3)


def test_an_lm_without_its_head_or_with_more_than_one_is_refused(lm_dirs, tmp_path):
    with pytest.raises(ModelError, match=r"has no plain head \(NoneType\)"):
        LMHead.of(CausalLM.from_name(str(lm_dirs["llama"]), device="cpu"))
    headless = build_lm(tmp_path / "headless", "llama")
    weights = load_file(headless / "model.safetensors")
    kept = {name: value for name, value in weights.items() if name != "lm_head.weight"}
    assert len(kept) == len(weights) - 1
    save_file(kept, headless / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=r"lacks 1 weights, such as lm_head.weight: it cannot"):
        LMHead.of(CausalLM.from_name(str(headless), device="cpu", with_head=True))


def training(folder, **changes):
    return ReaderTrainingArguments(output_dir=str(folder), use_cpu=True, **changes)


def as_icl(args):
    return replace(args, runtime=replace(args.runtime, system="icl"))


def test_a_run_leaves_what_any_run_leaves_and_is_taken_up(args, tmp_path, caplog):
    caplog.set_level("INFO")
    args, folder = as_icl(args), tmp_path / "icl"
    outcome = run_system(args, training(folder))
    assert {path.name for path in folder.iterdir()} == {
        *("run.json", "arguments.json", "predictions.jsonl", "metrics.json")
    }
    metrics = outcome.metrics
    assert (metrics["system"], metrics["task"], metrics["n"]) == ("icl", "sst2", 12)
    lines = [json.loads(line) for line in (folder / "predictions.jsonl").read_text().splitlines()]
    right = [line["prediction"] == line["label"] for line in lines]
    assert metrics["value"] == sum(right) / 12
    assert all(line["prediction"] == max(line["scores"], key=line["scores"].get) for line in lines)
    assert all(sum(line["scores"].values()) == pytest.approx(1) for line in lines)
    assert read_object(folder / "run.json")["method"] == "icl"
    assert not outcome.reused
    again = run_system(args, training(folder))
    assert again.reused
    assert again.metrics == metrics
    other = replace(args, reader=ReaderArguments(length_normalize=True))
    with pytest.raises(ArtifactError, match="length_normalize false, this run asks for true"):
        run(other, training(folder))
    assert run(other, training(tmp_path / "other")).metrics["system"] == "icl"


def test_after_a_rerank_only_the_words_beginnings_are_left_to_read(args, tmp_path, caplog):
    """The state behind a query's prompt is the one the reranker has put into the bank."""
    find_evidence(read_task(args), args)
    caplog.set_level("INFO")
    run(as_icl(args), training(tmp_path / "after"))
    encoder = open_prompted_encoder(args.rerank, read_task(args).prompt, CPU, with_head=True)
    beginnings = AnswerWords.of(encoder, read_task(args).task.prompt_words).beginnings
    told = [r.getMessage() for r in caplog.records if r.getMessage().startswith("icl: ")]
    assert told == [f"icl: {12 * (len(beginnings) - 1)} LM forwards for 12 queries"]
    caplog.clear()
    fresh = with_rerank(as_icl(args), exemplar_seed=3)  # the control: another prompt, other states
    run(fresh, training(tmp_path / "fresh"))
    told = [r.getMessage() for r in caplog.records if r.getMessage().startswith("icl: ")]
    assert told == [f"icl: {12 * len(beginnings)} LM forwards for 12 queries"]


def test_neighbors_that_do_not_fit_are_told_of(args, tmp_path, caplog):
    args = with_rerank(as_icl(args), exemplars="knn", max_prompt_tokens=200)
    run(args, training(tmp_path / "kate"))
    assert "12 queries got fewer than 4 exemplars, so that they fit" in caplog.text


def test_each_query_may_stand_behind_its_own_neighbors(args, tmp_path, caplog):
    """KATE: every query's whole prompt, with each word, through the whole LM."""
    args = with_rerank(as_icl(args), exemplars="knn")
    assert run_system(args, training(tmp_path / "kate")).metrics["n"] == 12
    lines = (tmp_path / "kate" / "predictions.jsonl").read_text().splitlines()
    told = [json.loads(line)["scores"] for line in lines]
    found = read_task(args)
    found.exemplars.look_up(found.splits.test)
    lm = AutoModelForCausalLM.from_pretrained(args.rerank.lm).eval()
    tokenizer = AutoTokenizer.from_pretrained(args.rerank.lm)

    def chances(prompt, query):
        logs = []
        for word in found.task.prompt_words.values():
            asked = prompt.prefix + prompt.suffix(query.fields)
            start = len(tokenizer(asked).input_ids)
            ids = tokenizer(f"{asked} {word}", return_tensors="pt").input_ids
            with torch.no_grad():
                logits = lm(ids).logits[0, start - 1 : -1].log_softmax(-1)
            logs.append(logits.gather(1, ids[0, start:, None]).sum())
        return torch.stack(logs).log_softmax(0).numpy()

    prefixes = set()
    for query, scores in list(zip(found.splits.test, told, strict=True))[:4]:
        prompt = found.exemplars.prompt(found.exemplars.of(query))
        prefixes.add(prompt.prefix)
        ours = np.log(list(scores.values()))
        np.testing.assert_allclose(ours, chances(prompt, query), rtol=1e-3, atol=1e-3)
    fixed = read_task(with_rerank(args, exemplars="balanced")).prompt  # the control
    query = found.splits.test[0]
    assert np.abs(np.log(list(told[0].values())) - chances(fixed, query)).max() > 0.1
    assert len(prefixes) > 1
    assert "got fewer" not in caplog.text  # the control of the test above


@pytest.mark.slow
def test_a_real_lm_scores_words_of_one_and_of_several_tokens_as_it_does_whole(tmp_path):
    task = load_task("trec")
    template = prompt_template(task)
    asked = Example("test-0", {"text": "Who wrote the book of the river?"})
    args = RerankArguments(lm="bundled:smollm2-135m", lm_dtype="float32")
    encoder = open_prompted_encoder(args, FewShotPrompt(template), CPU, with_head=True)
    words = AnswerWords.of(encoder, task.prompt_words)
    bank = open_query_bank(encoder, Context(artifacts=tmp_path), "lm")
    read_queries(encoder, bank, [asked], words, shard_rows=8)
    found = score_words(encoder, bank, [asked], words)[0]
    whole, tokenizer = encoder.lm.whole, encoder.lm.tokenizer
    text = FewShotPrompt(template).suffix(asked.fields)
    start = len(tokenizer(text).input_ids)
    for score, word in zip(found, task.prompt_words.values(), strict=True):
        ids = tokenizer(f"{text} {word}", return_tensors="pt").input_ids
        with torch.no_grad():
            chances = whole(ids).logits[0, start - 1 : -1].log_softmax(-1)
        assert score == pytest.approx(
            float(chances.gather(1, ids[0, start:, None]).sum()), abs=2e-3
        )
    assert len({len(ids) for ids in words.tokens.values()}) > 1
