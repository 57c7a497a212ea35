"""`pgra.ExemplarSelector`: KATE on anybody's list, without a run."""

import numpy as np
import pytest
from conftest import review_rows, write_jsonl
from method_runs import having, kate_run, lines_of

import pgra
from pgra.data.examples import DataArguments
from pgra.runs import run

ROWS = review_rows(60)  # the queries' own texts among them
QUERIES = [row["text"] for row in review_rows(12, start=20)]
TALK = [("how do I pay?", "billing"), ("it crashed again", "bug"), ("where is my bill?", "billing")]


@pytest.fixture(scope="module")
def encoder(encoder_dir):
    return pgra.Encoder.from_name(str(encoder_dir), normalize=False, device="cpu")


@pytest.fixture(scope="module")
def icl(tmp_path_factory, encoder_dir, lm_dirs):
    """Runs of `pgra icl` on the same examples, which choose and decide nothing by an LM."""
    root = tmp_path_factory.mktemp("icl")
    train = write_jsonl(root / "train.jsonl", ROWS)
    test = write_jsonl(root / "test.jsonl", [{"text": t, "label": "negative"} for t in QUERIES])
    data = DataArguments(task="sst2", train_file=str(train), test_file=str(test))
    base = kate_run(data, root, lm=lm_dirs["gpt2"], encoder=str(encoder_dir), num_exemplars=3)

    def chosen(**changes):
        name = "-".join(map(str, changes.values())) or "run"
        return run(having(base, name=name, **changes)).folder

    return chosen


def select(encoder, queries=QUERIES, k=3, pool=ROWS, **options):
    return pgra.ExemplarSelector(pool, encoder=encoder, **options).select(list(queries), k)


def cosines(encoder, queries, texts, metric="cosine"):
    """By hand: (B, n) float64."""
    a, b = (encoder.encode(list(t)).astype(np.float64) for t in (queries, texts))
    if metric == "euclidean":
        return -np.linalg.norm(a[:, None] - b[None], axis=2)
    if metric == "cosine":
        a, b = (v / np.linalg.norm(v, axis=1, keepdims=True) for v in (a, b))
    return a @ b.T


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"likeness": "euclidean"},
        {"farthest": True},
        {"exemplars": "knn-mmr"},
        {"encoder": "bm25"},
        {"exemplars": "random", "redraw": True},
        {"exemplars": "balanced"},
    ],
    ids=lambda options: "-".join(map(str, options.values())) or "knn",
)
def test_it_chooses_what_pgra_icl_chooses(icl, encoder, options):
    lines = lines_of(icl(**options))
    mine = {"selection" if name == "exemplars" else name: v for name, v in options.items()}
    found = select(**{"encoder": encoder, **mine})
    theirs = [[ROWS[int(e["id"].split("-")[1])] for e in line["exemplars"]] for line in lines]
    assert found == theirs
    if not options:
        assert all(line["near_duplicates"] for line in lines)  # the guard has something to do
    else:
        assert found != select(encoder)


@pytest.mark.parametrize("style", ["task", "kate"])
def test_the_prompt_of_a_task_is_the_one_of_pgra_icl(icl, encoder, style):
    selector = pgra.ExemplarSelector(ROWS, encoder=encoder, task="sst2", prompt_format=style)
    theirs = (icl(prompt_format=style) / "prompt.txt").read_text()
    assert selector.prompt(QUERIES[0], k=3) + "\n" == theirs
    assert pgra.ExemplarSelector(ROWS, encoder=encoder).prompt(QUERIES[0], k=3) + "\n" != theirs


@pytest.mark.parametrize("likeness", ["cosine", "dot", "euclidean"])
def test_without_the_guard_it_is_brute_force(encoder, likeness):
    found = select(encoder, leak_guard=False, likeness=likeness, k=5)
    texts = [row["text"] for row in ROWS]
    order = np.argsort(-cosines(encoder, QUERIES, texts, likeness), axis=1, kind="stable")[:, :5]
    assert found == [[ROWS[row] for row in line] for line in order]
    if likeness != "dot":
        assert [line[0]["text"] for line in found] == QUERIES
    assert found != select(encoder, likeness=likeness, k=5)  # control: the guard


def test_the_callers_own_objects_come_back_nearest_first(encoder):
    selector = pgra.ExemplarSelector(ROWS, encoder=encoder)
    found = selector.select("a great film", k=4)
    assert [any(one is row for row in ROWS) for one in found] == [True] * 4
    assert selector.select(["a great film"], 4) == [found]  # alone as beside others
    hits = selector.search("a great film", k=4)
    (scores,) = cosines(encoder, ["a great film"], [one["text"] for one in found])
    assert [hit.score for hit in hits] == pytest.approx(scores) == sorted(scores, reverse=True)
    assert [(ROWS[hit.index], hit.text) for hit in hits] == [(one, one["text"]) for one in found]


def test_every_kind_of_pool_is_one_pool(encoder, tmp_path):
    from datasets import ClassLabel, Dataset, Features, Value

    rows = [{"text": text, "label": label} for text, label in TALK]
    numbered = Dataset.from_list(
        [{"text": t, "label": ["billing", "bug"].index(name)} for t, name in TALK],
        features=Features({"text": Value("string"), "label": ClassLabel(names=["billing", "bug"])}),
    )
    (tmp_path / "p.csv").write_text("text,label\n" + "\n".join(f"{t},{n}" for t, n in TALK))
    pools = [
        TALK,
        iter(TALK),
        rows,
        [pgra.Example(str(n), {"text": t}, name) for n, (t, name) in enumerate(TALK)],
        Dataset.from_list(rows),
        Dataset.from_list(rows).to_pandas(),
        numbered,
        str(write_jsonl(tmp_path / "p.jsonl", rows)),
        tmp_path / "p.csv",
    ]
    prompts = {
        pgra.ExemplarSelector(pool, encoder=encoder).prompt("pay what?", 3) for pool in pools
    }
    (prompt,) = prompts
    assert prompt.endswith("\n\nText: pay what?\nLabel:")
    assert {f"Text: {text}\nLabel: {label}" for text, label in TALK} == {*prompt.split("\n\n")[:-1]}
    texts = pgra.ExemplarSelector([text for text, _ in TALK], encoder=encoder)
    assert sorted(texts.prompt("pay what?", 3).split("\n\n")) == sorted(
        ["pay what?", *(text for text, _ in TALK)]
    )


def test_columns_are_named_and_a_template_writes_them(encoder):
    rows = [{"q": text, "from": "Ann", "a": [label, "other"], "id": 3} for text, label in TALK]
    options = {"encoder": encoder, "text": ["q", "from"], "label": "a"}
    template = "{from} asks: {q}\n{a}"
    selector = pgra.ExemplarSelector(rows, template=template, order="nearest-last", **options)
    query = {"q": "is it a bug?", "from": "Bo", "unused": 1}
    first, second = selector.select(query, 2)
    assert selector.prompt(query, 2) == (
        f"Ann asks: {second['q']}\n{second['a'][0]}\n\nAnn asks: {first['q']}\n{first['a'][0]}\n\n"
        "Bo asks: is it a bug?\n"
    )
    assert selector.prompt(query, 0) == "Bo asks: is it a bug?\n"


def test_a_task_reads_the_columns_of_its_hub(encoder):
    from datasets import Dataset

    hub = Dataset.from_list(
        [
            {"text": "so good", "label": 1, "label_text": "positive"},
            {"text": "so bad", "label": 0, "label_text": "negative"},
        ]
    )
    rows = [{"text": "so good", "label": "positive"}, {"text": "so bad", "label": "negative"}]
    named = [{"said": "so good", "is": "positive"}, {"said": "so bad", "is": "negative"}]
    prompts = {
        pgra.ExemplarSelector(hub, encoder=encoder, task="sst2").prompt("so nice"),
        pgra.ExemplarSelector(rows, encoder=encoder, task="sst2").prompt({"text": "so nice"}),
        pgra.ExemplarSelector(
            named, encoder=encoder, task="sst2", text="said", label="is"
        ).prompt({"said": "so nice"}),
    }  # fmt: skip
    assert len(prompts) == 1
    answers = [
        {"question": "who?", "answer": ["Ann", "Anna"]},
        {"question": "where?", "answer": ["Oslo"]},
    ]
    asked = pgra.ExemplarSelector(answers, encoder=encoder, task="nq_open").prompt("who is it?", 2)
    assert "Q: who?\nA: Ann\n" in asked
    assert asked.endswith("\n\nQ: who is it?\nA:")


@pytest.mark.parametrize("how", ["cosine", "euclidean", "bm25"])
def test_what_is_added_is_chosen_as_if_it_had_always_been_there(encoder, how):
    options = {"selection": "bm25"} if how == "bm25" else {"encoder": encoder, "likeness": how}
    grown, empty = pgra.ExemplarSelector(ROWS[:20], **options), pgra.ExemplarSelector([], **options)
    assert empty.select("a film", 3) == []
    before = grown.select(QUERIES, 3)
    grown.add(ROWS[20])
    grown.add(ROWS[21:])
    for row in ROWS:
        empty.add(row)
    whole = pgra.ExemplarSelector(ROWS, **options).select(QUERIES, 3)
    assert grown.select(QUERIES, 3) == empty.select(QUERIES, 3) == whole != before
    assert len(grown) == len(ROWS)


def test_only_what_is_new_is_encoded(encoder, monkeypatch):
    seen = []
    whole = type(encoder).encode_examples
    monkeypatch.setattr(
        type(encoder),
        "encode_examples",
        lambda self, examples: seen.append(len(examples)) or whole(self, examples),
    )
    selector = pgra.ExemplarSelector(ROWS, encoder=encoder)
    selector.select("one", 2)
    selector.select("two", 5)
    selector.add(("three", "positive"))
    selector.select("three", 2)
    assert sorted(seen) == [1, 1, 1, 1, len(ROWS)]  # pool, three queries, and what was added


def test_more_than_the_pool_has_is_lowered_and_copies_count_once(encoder):
    selector = pgra.ExemplarSelector([*TALK, TALK[0]], encoder=encoder)
    assert len(selector.select("pay", 99)) == 3
    assert selector.select("pay", 0) == []


def test_the_guard_keeps_a_querys_own_text_out_and_can_be_turned_off(encoder):
    pool = [("How do I pay?", "billing"), ("Please, how do I pay?", "billing"), ("pay", "bug")]
    asked = "how do i pay"
    assert select(encoder, [asked], 3, pool) == [[("pay", "bug")]]
    assert len(select(encoder, [asked], 3, pool, leak_guard=False)[0]) == 3


def test_nothing_is_written(encoder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    select(encoder)
    select("bm25")
    assert list(tmp_path.iterdir()) == []


BAD = [
    ([1, 2], {}, "pool[0] is a int: give a text"),
    ([{"txt": "a"}], {}, "pool[0]: no column 'text'. Did you mean 'txt'?"),
    ([{"text": 3}], {}, "pool[0]: 'text' is 3, not text"),
    ([{"text": "a", "label": "x"}, {"text": "b"}], {}, "pool[1]: no column 'label'"),
    ([{"text": "a", "label": None}], {}, "pool[0] has no label"),
    (["a", ("b", "c")], {}, "pool[1] has a label, and the items before it have none"),
    ([("a", "b", "c")], {}, "pool[0] has 3 parts"),
    ({"train": TALK}, {}, "pool is a dict of train: give a list of items, or one split"),
    (7, {}, "pool is a int: give a list"),
    ("no.jsonl", {}, "no.jsonl does not exist"),
    (TALK, {"task": "sst2"}, "pool[0]: unknown label 'billing'"),
    (TALK, {"task": "sst3"}, "unknown task 'sst3'. Did you mean 'sst5'?"),
    (TALK, {"task": "sst2", "template": "{text} {label}"}, "template and task both say"),
    (TALK, {"template": "{text} it was"}, "template does not show the answer: end it with {label}"),
    (TALK, {"template": "{text} {label}!"}, "template goes on with '!' after {label}"),
    (TALK, {"template": "{txt} {label}"}, "unknown field in template 'txt'. Did you mean 'text'?"),
    (TALK, {"selection": "nearest"}, "unknown selector 'nearest'"),
    (TALK, {"likeness": "l2"}, "unknown likeness 'l2'"),
    (TALK, {"ordr": "random"}, "unknown key 'ordr'. Did you mean 'order'?"),
    (TALK, {"leak_guard": 2.0}, "leak_jaccard is 2.0: it must be above 0 and at most 1"),
    (TALK, {"leak_guard": "no"}, "leak_guard is 'no'"),
    (TALK, {"encoder": 3}, "encoder"),
    (TALK, {"encoder": "prompted"}, "compares by an LM's states"),
    (TALK, {"encoder": "bundled:minilm"}, "Did you mean 'minilm-l6'?"),
    (TALK, {"farthest": "yes"}, "farthest"),
    (TALK, {"task": "mrpc", "text": "a"}, "text names a, and task 'mrpc' reads sentence1, "),
    (TALK, {"label": "text"}, "'text' is a text column and the label"),
]


@pytest.mark.parametrize(("pool", "options", "told"), BAD)
def test_what_cannot_be_is_refused_in_one_line(pool, options, told, encoder):
    with pytest.raises((pgra.PgraError, ValueError)) as caught:
        pgra.ExemplarSelector(pool, **{"encoder": encoder, **options}).select("a", 1)
    assert told in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("query", "k", "told"),
    [
        ("pay", "2", "k is '2': give a whole number"),
        ("pay", -1, "k is -1"),
        (" ", 2, "query is empty"),
        ({"txt": "pay"}, 2, "query: no column 'text'"),
        (None, 2, "query is a NoneType: give a text"),
        (("pay", "billing"), 2, "query is \\('pay', 'billing'\\): give a text"),
    ],
)
def test_a_wrong_query_is_refused(encoder, query, k, told):
    selector = pgra.ExemplarSelector(TALK, encoder=encoder)
    for ask in (selector.select, selector.prompt):
        with pytest.raises((pgra.PgraError, ValueError), match=told):
            ask(query, k)


def test_a_refused_addition_leaves_the_pool_as_it_was(encoder):
    selector = pgra.ExemplarSelector(TALK, encoder=encoder)
    with pytest.raises(pgra.DataError, match=r"pool\[4\] has no label"):
        selector.add([("new", "bug"), ("newer", None)])
    assert len(selector) == len(selector.select("pay", 9)) == len(TALK)


@pytest.mark.slow
def test_the_bundled_encoder_is_sentence_transformers(two_threads):
    from sentence_transformers import SentenceTransformer

    from pgra.data.bundled import bundled_model_dir

    del two_threads
    pool = "bundled:rotten-tomatoes"
    selector = pgra.ExemplarSelector(pool, encoder="bundled:minilm-l6", leak_guard=False)
    texts = [item["text"] for item in selector.items[:300]]
    selector = pgra.ExemplarSelector(texts, encoder="bundled:minilm-l6", leak_guard=False)
    queries = ["a warm and funny film", "the plot makes no sense"]
    model = SentenceTransformer(str(bundled_model_dir("minilm-l6")))
    theirs = pgra.ExemplarSelector(texts, encoder=model, leak_guard=False)
    scores = model.encode(queries) @ model.encode(texts).T
    order = np.argsort(-scores, axis=1)[:, :8]
    assert selector.select(queries, 8) == [[texts[row] for row in line] for line in order]
    assert theirs.select(queries, 8) == selector.select(queries, 8)
