"""`pgra.ExemplarSelector`: KATE on anybody's list, without a run."""

import pytest
from conftest import review_rows, write_jsonl
from method_runs import having, kate_run, lines_of

import pgra
from pgra.data.examples import DataArguments
from pgra.errors import DataError
from pgra.runs import run

ROWS = review_rows(60)  # the queries' own texts among them
QUERIES = [row["text"] for row in review_rows(12, start=20)]
TALK = [("how do I pay?", "billing"), ("it crashed again", "bug"), ("where is my bill?", "billing")]


@pytest.fixture(scope="module")
def encoder(encoder_dir):
    return pgra.Encoder.load(str(encoder_dir), normalize=False, device="cpu")


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


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"vector_metric": "euclidean", "farthest": True},
        {"encoder": "bm25"},
        {"exemplars": "random", "redraw": True},
        {"exemplars": "balanced"},
    ],
    ids=lambda options: "-".join(map(str, options.values())) or "knn",
)
def test_it_chooses_what_pgra_icl_chooses(icl, encoder, options):
    lines = lines_of(icl(**options))
    names = {"exemplars": "selection", "vector_metric": "metric"}
    mine = {names.get(name, name): value for name, value in options.items()}
    found = select(**{"encoder": encoder, **mine})
    theirs = [[ROWS[int(e["id"].split("-")[1])] for e in line["exemplars"]] for line in lines]
    assert found == theirs
    if not options:
        assert all(line["near_duplicates"] for line in lines)  # the guard has something to do
    else:
        assert found != select(encoder)


def test_every_kind_of_pool_is_one_pool(encoder):
    from datasets import ClassLabel, Dataset, Features, Value

    rows = [{"text": text, "label": label} for text, label in TALK]
    numbered = Dataset.from_list(
        [{"text": t, "label": ["billing", "bug"].index(name)} for t, name in TALK],
        features=Features({"text": Value("string"), "label": ClassLabel(names=["billing", "bug"])}),
    )
    pools = [
        TALK,
        iter(TALK),
        rows,
        [pgra.Example(str(n), {"text": t}, name) for n, (t, name) in enumerate(TALK)],
        Dataset.from_list(rows),
        Dataset.from_list(rows).to_pandas(),
        numbered,
    ]
    prompts = {
        pgra.ExemplarSelector(pool, encoder=encoder).prompt("pay what?", 3) for pool in pools
    }
    (prompt,) = prompts
    assert prompt.endswith("\n\nText: pay what?\nLabel:")
    assert {f"Text: {text}\nLabel: {label}" for text, label in TALK} == {*prompt.split("\n\n")[:-1]}


@pytest.mark.parametrize("how", ["euclidean", "bm25"])
def test_what_is_added_is_chosen_as_if_it_had_always_been_there(encoder, how):
    options = {"encoder": "bm25"} if how == "bm25" else {"encoder": encoder, "metric": how}
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


def test_a_refused_addition_leaves_the_pool_as_it_was(encoder):
    selector = pgra.ExemplarSelector(TALK, encoder=encoder)
    with pytest.raises(DataError, match="pool, row 1 has no label"):
        selector.add([("new", "bug"), ("newer", None)])
    assert len(selector) == len(selector.select("pay", 9)) == len(TALK)
