import json
import re
import shutil
import subprocess
from dataclasses import replace
from datetime import datetime
from html.parser import HTMLParser

import pytest

from pgra.artifacts import write_json
from pgra.core import Example, Prediction
from pgra.report.compare import compare_runs, verdict
from pgra.report.figures import draw_reliability, read_calibration
from pgra.report.page import (
    browser_data,
    policy_hash,
    read_consistency,
    render_page,
)
from pgra.report.results import (
    EvidenceLine,
    Group,
    Missing,
    load_run,
    write_results,
)

HOSTILE = '</script><img src=x onerror="alert(1)">{{ script }}&lt;b&gt;<!--<script>'
LABELS = ("negative", "positive")
GOLD = ("positive", "negative", "positive", "negative")
TEXTS = ("a fine film", "a dull film", "no plot (at all)", "so so")
SHARED = EvidenceLine(7, "Films are long.", 3, 0.25, 1831.06836)
BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)


class Reader(HTMLParser):
    """What a browser makes of a page: elements, and the text inside of script and style."""

    def __init__(self, page):
        super().__init__()
        self.elements, self.inside, self.key = [], {}, None
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        self.key = dict(attrs).get("id", tag) if tag in ("script", "style") else None

    def handle_endtag(self, tag):
        self.key = None

    def handle_data(self, text):
        if self.key:
            self.inside[self.key] = self.inside.get(self.key, "") + text

    def named(self, tag):
        return [attrs for name, attrs in self.elements if name == tag]


def written(folder, examples, predictions, labels=LABELS, evidence=(), *, seed=0, notes=()):
    """Write a run, and read it back under the name of its method."""
    method = folder.name.rpartition("-")[0]
    about = {"method": method, "task": "sst2", "split": "test", "metric": "accuracy"}
    about |= {"seed": seed, "seconds": {}, "fingerprints": {}, "notes": list(notes)}
    write_results(folder, about, labels, examples, predictions, evidence)
    return load_run(folder)


def make_run(root, method, answers, *, seed=0, chance=0.75, evidence=(), texts=TEXTS):
    """Write a run of four examples, and read it back."""
    examples = [
        Example(f"test-{i}", {"text": text}, gold)
        for i, (text, gold) in enumerate(zip(texts, GOLD, strict=True))
    ]
    predictions = [
        Prediction(example.id, answer, {k: chance if k == answer else 1 - chance for k in LABELS})
        for example, answer in zip(examples, answers, strict=True)
    ]
    folder = root / f"{method}-{seed}"
    return written(folder, examples, predictions, LABELS, [evidence] * 4, seed=seed)


@pytest.fixture(scope="module")
def group(tmp_path_factory):
    """Answers right (+) and wrong (-): pgra ++-- in seed 0, +++- in seed 1; fid +-+-; t5 ++++."""
    root = tmp_path_factory.mktemp("runs")
    p, n = LABELS[1], LABELS[0]
    read = [SHARED, EvidenceLine(9, HOSTILE, 1, 0.5, 1830.5)]
    return Group(
        "Demo",
        [
            make_run(root, "pgra", [p, n, n, p], evidence=read),
            make_run(root, "pgra", [p, n, p, p], seed=1, evidence=read),
            make_run(root, "fid", [p, p, p, p], chance=0.9, evidence=[SHARED]),
            make_run(root, "t5", [p, n, p, n]),
        ],
    )


@pytest.fixture(scope="module")
def page(group):
    return render_page("A & B", [compare_runs(group)])


def test_hostile_text_stays_text(page):
    reader = Reader(page)
    assert len(reader.named("script")) == 2
    assert reader.named("img") == []
    assert HOSTILE in json.loads(reader.inside["data"])["texts"]
    assert not set("<>&") & set(reader.inside["data"])  # so no parser finds an end in it
    assert "<title>A &amp; B</title>" in page
    # The same page without the escapes is another one.
    bare = page.replace("\\u003c", "<").replace("\\u003e", ">")
    assert Reader(bare).named("img") != []


def test_the_page_asks_for_nothing_outside(page):
    reader = Reader(page)
    for tag, attributes in reader.elements:
        assert not {"src", "srcset", "action", "style", "data", "poster"} & set(attributes), tag
        assert not any(name.startswith("on") for name in attributes), tag
        assert all(attributes.get(n, "#").startswith("#") for n in ("href", "xlink:href")), tag
        urls = [value for value in attributes.values() if "url(" in (value or "")]
        assert all(value.startswith("url(#") for value in urls), tag
    assert reader.named("link") == reader.named("iframe") == reader.named("object") == []
    assert not re.search(r"url\(|@import", reader.inside["style"])
    script = reader.inside["script"]
    banned = r"fetch\(|XMLHttp|import\(|innerHTML|outerHTML|insertAdjacent|document\.write|eval\("
    assert not re.search(banned, script)
    assert "http" not in page.replace("http-equiv", "")


def test_the_policy_allows_this_script_and_style_only(page):
    reader = Reader(page)
    (policy,) = [m["content"] for m in reader.named("meta") if "http-equiv" in m]
    rules = dict(rule.split(" ", 1) for rule in policy.split("; "))
    assert rules["default-src"] == "'none'"
    for name in ("script", "style"):
        assert rules[f"{name}-src"] == policy_hash(reader.inside[name])
    # Of "abc", by FIPS 180-2, in base64.
    assert policy_hash("abc") == "'sha256-ungWv48Bz+pBQUDeXa4iI7ADYaOWF3qctBD/YfIAFa0='"


def test_runs_of_one_test_set_stand_side_by_side_and_share_what_they_share(group, tmp_path):
    data = browser_data([group])
    (task,) = data["tasks"]
    runs = {run["name"]: run for run in task["runs"]}
    assert list(runs) == ["pgra (seed 0)", "pgra (seed 1)", "fid", "t5"]
    assert [data["texts"][number] for number in task["queries"]] == list(TEXTS)
    assert data["texts"].count("Films are long.") == 1
    # All four queries of both seeds of pgra read one list, those of fid another, those of t5 none.
    assert [run["evidence"] for run in task["runs"]] == [[0] * 4, [0] * 4, [1] * 4, [2] * 4]
    first = task["lists"][0]
    assert [data["texts"][first[0]], *first[1:4]] == ["Films are long.", 3, 0.25, 1831.068]
    assert task["labels"] == ["negative", "positive"]
    assert task["gold"] == [1, 0, 1, 0]
    assert runs["fid"]["answers"] == [1, 1, 1, 1]
    assert runs["fid"]["chances"][0] == [[0, 0.1], [1, 0.9]]
    # A run in two groups is shown once; another test set is another task.
    other = Group("B", [make_run(tmp_path, "t5", GOLD, texts=("another", *TEXTS[1:]))])
    tasks = browser_data([group, group, other])["tasks"]
    assert [(t["name"], len(t["runs"])) for t in tasks] == [("sst2", 4), ("sst2 (2)", 1)]


@pytest.mark.parametrize("axes", [["r.k", "data.task"], ["r.name"]])
def test_a_grid_has_its_points_and_what_is_missing(tmp_path, axes):
    """Along a number in its order, else a row a point."""
    points = {f"k={k}": {"r.k": k, "r.name": f"<{k}>"} for k in (16, 8, 4)}
    runs = [replace(make_run(tmp_path, name, GOLD), name=name) for name in ("k=16", "k=4")]
    gone = Missing("k=8", "sst2", 0, tmp_path / "gone")
    words = {"axes": axes, "labels": {"r.k": "candidates"}}
    study = compare_runs(Group("k", runs, [gone], points=points, **words))
    page = render_page("", [study])
    assert "<dd>2; 1 more of the grid are missing</dd>" in page
    assert page.count('class="picture"') == 3  # a place for each row's interval, empty for k=8
    plots = [plot for plot in Reader(page).named("svg") if "k=16" in plot.get("aria-label", "")]
    told = "k=16: 100.0 (100.0 to 100.0); k=8: missing; k=4: 100.0 (100.0 to 100.0)"
    assert [plot["aria-label"] for plot in plots] == ([told] if len(axes) == 2 else [])
    drawing = page.partition('class="plots"')[2].partition("</svg>")[0]  # in the page's own colours
    assert ('stroke="currentColor"' in drawing, "#000000" in page) == (len(axes) == 2, False)
    names = re.findall(r">(k=\d+|4|8|16|candidates)</text>", drawing)
    assert names == (["4", "8", "16", "candidates"] if len(axes) == 2 else [])


def dom(path, words):
    """Give what a real browser makes of a page, after its script."""
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom"]
    told = subprocess.run(
        [*command, f"--user-data-dir={path.parent / 'browser'}", f"{path.as_uri()}#{words}"],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    return told.stdout


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="no browser")
def test_a_browser_shows_what_a_link_asks_for(page, tmp_path):
    path = tmp_path / "report.html"
    path.write_text(page, encoding="utf-8")
    shown = dom(path, "show=mixed&label=0")
    assert "2 of 4 queries, 1 to 2 shown" in shown
    assert "a dull film" in shown
    assert "a fine film" not in shown.split('id="data"')[0]
    reader = Reader(shown)
    assert reader.named("img") == []
    assert len(reader.named("script")) == 2
    assert "&lt;img src=x onerror=" in shown  # evidence, as text
    assert "3 of 4 queries" in dom(path, "show=nonsense&task=&page=-7")  # passed over
    assert "1 of 4 queries" in dom(path, "show=right")


def card_of(page, name):
    """Give the numbers of a row's confusion matrix, as the page shows them."""
    card = page.partition(f"<h4>{name}</h4>")[2].partition("</article>")[0]
    return [int(n) for n in re.findall(r'<td class="(?:hit|miss) s\d+">(\d+)</td>', card)]


def test_one_heading_what_was_run_the_verdict_then_the_table(page, group):
    assert page.count("<h1>") == 1
    facts = dict(re.findall(r"<dt>(.*?)</dt><dd>(.*?)</dd>", page))
    assert (facts["Task"], facts["Examples"]) == ("sst2 (accuracy)", "4 test")
    assert (facts["Seeds"], facts["Runs"]) == ("0, 1", "4")
    made = group.runs[0].metrics
    assert facts["Date"] == f"{datetime.fromisoformat(made['date']):%-d %B %Y}"
    assert made["versions"]["pgra"] in facts["Code"]
    told = re.search(r'<p class="verdict">(.*?)</p>', page)[1]
    assert told == verdict(compare_runs(group))
    order = [page.index(words) for words in ("<h1>", "<dl", 'class="verdict"', "<table", "Notes:")]
    assert order == sorted(order)
    (task,) = json.loads(Reader(page).inside["data"])["tasks"]
    rows = re.findall(r'<tr><th scope="row">(\w+)</th>', page.partition("</table>")[0])
    assert (
        list(dict.fromkeys(run["method"] for run in task["runs"])) == rows == ["fid", "pgra", "t5"]
    )


def test_labels_taken_for_others_are_counted_over_all_seeds(page):
    # Gold is + - + -. fid says + to all; pgra + - - + and + - + +; t5 what is right.
    assert card_of(page, "fid") == [0, 2, 0, 2]
    assert card_of(page, "pgra") == [2, 2, 1, 3]
    assert card_of(page, "t5") == [2, 0, 0, 2]


def test_the_reliability_diagram_has_the_calibration_error_of_its_answers(group):
    # fid is 0.9 sure of each answer and right in half: 0.4. t5 0.75 and always: 0.25.
    runs = {run.method: run for run in group.runs}
    found = {name: read_calibration([runs[name]]) for name in ("fid", "t5")}
    assert found["fid"].ece == pytest.approx(0.4)
    assert found["t5"].ece == pytest.approx(0.25)
    assert draw_reliability(found["fid"]).label == "4 answers at 90 %: 50 % right"
    both = read_calibration([runs["fid"], runs["t5"]])
    assert both.ece == pytest.approx(0.325)


@pytest.mark.slow
def test_losses_and_consistency_are_drawn_where_they_are_kept_and_not_else(tmp_path):
    run = make_run(tmp_path, "pgra", GOLD, evidence=[SHARED])
    study = compare_runs(Group("A", [run]))
    assert "training loss" not in render_page("", [study])
    lines = [{"step": i + 1, "loss": 1.0 - i / 4} for i in range(3)]
    (run.folder / "losses.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    told = {"runs": [{"name": "pgra", "task": "sst2", "majority": 0.5, "by_rank": [0.75, 0.5]}]}
    path = tmp_path / "consistency.json"
    write_json(path, told)
    page = render_page("", [study], read_consistency(tmp_path))
    labels = [plot.get("aria-label", "") for plot in Reader(page).named("svg")]
    assert "pgra: from 1.00 to 0.50 in 3 steps" in labels
    assert "pgra: 75, 50; majority rate: 50" in labels
