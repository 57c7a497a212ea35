import json
import re
import shutil
import subprocess
from dataclasses import replace
from datetime import datetime
from html.parser import HTMLParser
from pathlib import Path

import pytest
from planted_runs import plant, plant_grid

from pgra.artifacts import write_json
from pgra.core import Example, Prediction
from pgra.errors import ArtifactError
from pgra.report import page as html
from pgra.report.compare import compare_runs, verdict
from pgra.report.figures import draw_reliability, read_calibration
from pgra.report.page import (
    browser_data,
    count_confusion,
    policy_hash,
    read_consistency,
    render_page,
)
from pgra.report.results import (
    METRICS_FILE,
    PREDICTIONS_FILE,
    EvidenceLine,
    Group,
    Missing,
    load_collection,
    load_run,
    read_object,
    write_metrics,
    write_results,
)

PAGE = Path(html.__file__).parent / "assets"
HOSTILE = '</script><img src=x onerror="alert(1)">{{ script }}&lt;b&gt;<!--<script>'
LABELS = ("negative", "positive")
GOLD = ("positive", "negative", "positive", "negative")
TEXTS = ("a fine film", "a dull film", "no plot (at all)", "so so")
SHARED = EvidenceLine(7, "Films are long.", 3, 0.25, 1831.06836)
NODE = shutil.which("node")
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


@pytest.mark.parametrize("points", [{}, {HOSTILE: {"k": 1}}])
def test_hostile_names_stay_text_too(tmp_path, points):
    labels = (HOSTILE, "b")
    example = Example(HOSTILE, {"text": "a"}, HOSTILE)
    said = Prediction(HOSTILE, HOSTILE, dict.fromkeys(labels, 0.5))
    run = written(tmp_path / "a-0", [example], [said], labels, notes=[HOSTILE])
    run = replace(run, method=HOSTILE, name=HOSTILE, task=HOSTILE)
    text = render_page(HOSTILE, [compare_runs(Group(HOSTILE, [run], points=points))])
    reader = Reader(text)
    assert (reader.named("img"), len(reader.named("script"))) == ([], 2)
    regions = [div["aria-label"] for div in reader.named("div") if "aria-label" in div]
    assert regions[0] == f"{HOSTILE}, in hundredths"  # quotes are escaped too
    assert '<th scope="row">&lt;/script&gt;' in text
    (task,) = json.loads(reader.inside["data"])["tasks"]
    assert (task["name"], task["ids"], task["labels"]) == (HOSTILE, [HOSTILE], [*labels])


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


def test_long_evidence_is_cut_attention_is_kept_where_it_is_known(tmp_path):
    with_it = replace(SHARED, attention=0.123456789)
    runs = [
        make_run(tmp_path, "pgra", GOLD, evidence=[with_it]),
        make_run(tmp_path, "fid", GOLD, evidence=[SHARED] * 5),
    ]
    (task,) = browser_data([Group("A", runs)], most_evidence=2)["tasks"]
    assert [run["attention"] for run in task["runs"]] == [[[0.12346]] * 4, None]
    assert [len(numbers) for numbers in task["lists"]] == [1 * 4, 2 * 4]
    assert [run["read"] for run in task["runs"]] == [1, 5]


def test_odd_evidence_does_not_stop_the_page_and_damaged_is_named(tmp_path):
    run = make_run(tmp_path, "fid", GOLD, evidence=[SHARED])
    path, told = run.folder / PREDICTIONS_FILE, r"predictions\.jsonl is damaged \(KeyError: 'text'"
    whole = path.read_text()

    def page(old, new):
        path.write_text(whole.replace(old, new))
        write_metrics(run.folder, read_object(run.folder / METRICS_FILE), [PREDICTIONS_FILE])
        return render_page("\ud83d", [compare_runs(Group("A", [load_run(run.folder)]))])

    text = page("Films are", "Films \\ud83d are")
    assert "<h1>?</h1>" in text  # for half of a surrogate pair, which UTF-8 cannot hold
    assert any("are long" in t for t in json.loads(Reader(text).inside["data"])["texts"])
    with pytest.raises(ArtifactError, match=told):
        page('"text": "Films', '"words": "Films')


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


SELECT = """
const {select, firstRuns, evidenceColumns, showNumber} = require(process.argv[1]);
const {data, states} = JSON.parse(require("fs").readFileSync(0, "utf8"));
const plain = {task: 0, show: "all", label: -1, order: "file", text: "",
  runs: ["any", "no", "any", "any"]};
console.log(JSON.stringify({
  found: states.map((words) => select(data, {...plain, ...words})),
  first: firstRuns(data.tasks[0]),
  columns: evidenceColumns(data.tasks[0].runs, 0).map((column) => column.names),
  numbers: [null, 0, 0.1234, -12.345, 1831.068].map(showNumber),
}));
"""
# Shown are pgra seed 0 (++--), fid (+-+-) and t5 (++++).
STATES = [
    ({}, [0, 1, 2, 3]),
    ({"show": "right"}, [0]),
    ({"show": "wrong"}, []),
    ({"show": "mixed"}, [1, 2, 3]),
    ({"show": "differ"}, [1, 2, 3]),
    ({"show": "wrong", "runs": ["any", "any", "any", "no"]}, [3]),
    ({"show": "wrong", "runs": ["no"] * 4}, []),
    ({"label": 1}, [0, 2]),
    ({"runs": ["wrong", "no", "right", "any"]}, [2]),
    ({"text": "A FINE"}, [0]),
    ({"text": "(at"}, [2]),
    ({"text": "test-3"}, [3]),
    ({"text": "are long"}, [0, 1, 2, 3]),  # in the evidence
    ({"text": "are long", "runs": ["no", "no", "no", "any"]}, []),
    ({"order": "sure"}, [1, 3, 2, 0]),  # fid's mistakes at 0.9, then pgra's at 0.75
]


@pytest.mark.skipif(NODE is None, reason="no node")
def test_filters_give_the_examples_worked_out_by_hand(group):
    given = {"data": browser_data([group]), "states": [words for words, _ in STATES]}
    words, how = [NODE, "-e", SELECT, str(PAGE / "page.js")], {"text": True, "check": True}
    told = subprocess.run(words, input=json.dumps(given), capture_output=True, **how)
    answer = json.loads(told.stdout)
    for (words, wanted), found in zip(STATES, answer["found"], strict=True):
        assert found == wanted, words
    assert answer["first"] == ["any", "no", "any", "any"]  # one run a method
    assert answer["columns"] == [["pgra (seed 0)", "pgra (seed 1)"], ["fid"], ["t5"]]
    assert answer["numbers"] == ["none", "0.000", "0.123", "-12.35", "1831.1"]


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


def test_many_labels_have_their_most_frequent_mistakes_instead(tmp_path):
    labels = tuple("abcdefghi")
    gold, said = "abcdefghiaab", "abcdefghibbc"
    examples = [Example(f"{i}", {"text": f"{i}"}, x) for i, x in enumerate(gold)]
    flat = dict.fromkeys(labels, 1 / 9)
    answers = [Prediction(e.id, x, flat) for e, x in zip(examples, said, strict=True)]
    run = written(tmp_path / "pgra-0", examples, answers, labels)
    assert count_confusion([run]).pairs == [("a", "b", 2), ("b", "c", 1)]
    page = render_page("", [compare_runs(Group("A", [run]))])
    assert '<td>a</td><td>b</td><td class="number">2</td>' in page
    assert 'class="confusion"' not in page


def test_the_reliability_diagram_has_the_calibration_error_of_its_answers(group):
    # fid is 0.9 sure of each answer and right in half: 0.4. t5 0.75 and always: 0.25.
    runs = {run.method: run for run in group.runs}
    found = {name: read_calibration([runs[name]]) for name in ("fid", "t5")}
    assert found["fid"].ece == pytest.approx(0.4)
    assert found["t5"].ece == pytest.approx(0.25)
    assert draw_reliability(found["fid"]).label == "4 answers at 90 %: 50 % right"
    both = read_calibration([runs["fid"], runs["t5"]])
    assert both.ece == pytest.approx(0.325)


def test_probabilities_that_lack_a_label_make_no_diagram(tmp_path):
    example = Example("a", {"text": "a"}, "b")
    run = written(tmp_path / "icl-0", [example], [Prediction("a", "b", {"b": 1.0})], ("a", "b"))
    assert read_calibration([run]) is None


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
    with pytest.raises(ArtifactError, match="not there: give the --output_dir of pgra consist"):
        read_consistency(tmp_path / "none")
    del told["runs"][0]["by_rank"]
    write_json(path, told)
    with pytest.raises(ArtifactError, match="lacks 'by_rank': run pgra consistency again"):
        read_consistency(tmp_path)


@pytest.fixture(scope="module")
def long_page(tmp_path_factory):
    """A page as wide as they come: long names of rows, tasks and labels, long words, two grids."""
    root = tmp_path_factory.mktemp("wide")
    names = ("a label of many words", "Donaudampfschifffahrtsgesellschaft" * 2)
    for task in ("sst2", "a-task-with-a-long-name"):
        for method in ("plain", "fid", "pgra", "icl"):
            for seed in (0, 1) if method in ("fid", "pgra") else (0,):
                wrong = range(seed + len(method), 30)
                words = {
                    "task": task,
                    "method": method,
                    "seed": seed,
                    "wrong": wrong,
                    "names": names,
                }
                folder = plant(root / task / f"{method}-{seed}", text="word" * 60, **words)
                losses = ({"step": step, "loss": 1 / step} for step in (1, 2, 3))
                text = "".join(json.dumps(line) + "\n" for line in losses)
                (folder / "losses.jsonl").write_text(text)
    plant_grid(root / "grid", {f"k={k}": {"value": k, "seeds": {0: [1], 1: [2]}} for k in (4, 8)})
    groups = load_collection([root]).groups
    path = root / "page.html"
    path.write_text(render_page("All that there is", [compare_runs(group) for group in groups]))
    return path


# What stands out of the window, or is cut by a box that does not scroll.
CUT = """() => [...document.querySelectorAll("main *, header *")].filter((node) => {
  if (!node.checkVisibility() || node.closest("svg, option, .skip")) return false;
  const box = node.closest(".wide, fieldset"), own = node.getBoundingClientRect();
  if (box && box !== node) return false;
  return own.left < -1 && own.right > 0 || own.right > innerWidth + 1;
}).map((node) => node.outerHTML.slice(0, 120))"""


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="no browser")
def test_nothing_is_cut_on_a_phone_or_a_screen_in_light_or_dark(long_page, screenshots):
    from playwright.sync_api import sync_playwright

    asked, said = [], []
    with (
        sync_playwright() as tools,
        tools.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"]) as browser,
    ):
        for width, theme in ((w, t) for w in (390, 1280) for t in ("light", "dark")):
            tab = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=theme)
            tab.on("request", lambda request: asked.append(request.url))
            tab.on("console", lambda message: said.append(message.text))
            tab.goto(long_page.as_uri())
            tab.screenshot(path=screenshots / f"report-{width}-{theme}.png", full_page=True)
            tab.evaluate("document.querySelectorAll('details').forEach((box) => box.open = true)")
            assert tab.evaluate("document.documentElement.scrollWidth") <= width
            assert tab.evaluate(CUT) == []
            tab.evaluate("document.querySelector('main p').style.minWidth = '2000px'")
            assert tab.evaluate(CUT) != []  # the control
            tab.close()
    assert (said, {url.split("#")[0] for url in asked}) == ([], {long_page.as_uri()})


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="no browser")
def test_by_keyboard_a_person_opens_tables_and_turns_pages(long_page):
    from playwright.sync_api import sync_playwright

    with (
        sync_playwright() as tools,
        tools.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"]) as browser,
    ):
        tab = browser.new_page(viewport={"width": 390, "height": 800})
        tab.goto(long_page.as_uri())
        tab.keyboard.press("Tab")
        assert tab.evaluate("document.activeElement.innerText") == "To the examples"
        tab.get_by_text("Notes: what the numbers are").press("Enter")
        assert tab.get_by_text("± is the standard deviation over seeds.").is_visible()
        tab.locator("[name=show]").select_option("all")
        assert "40 of 40 queries, 1 to 10" in tab.get_by_role("status").inner_text()
        tab.get_by_role("button", name="Next").last.press("Enter")  # below the examples
        assert "11 to 20" in tab.get_by_role("status").inner_text()
        tab.keyboard.press("ArrowLeft")
        assert "1 to 10" in tab.get_by_role("status").inner_text()
        table = tab.get_by_role("region", name="By task").first  # wider than the phone
        table.press("ArrowRight")
        assert tab.evaluate("document.activeElement.className") == "wide"
