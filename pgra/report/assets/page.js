"use strict";
// The browser of examples. All text of the runs enters as text nodes, never as markup.
//
// The data, as pgra/report/page.py makes it:
//   texts: every query and passage once
//   tasks: [{name, labels, ids, queries (numbers of texts), gold (of labels, -1 unknown),
//            lists: [[text, stage-1 rank, stage-1 score, stage-2 score, text, ...], ...],
//            runs: [{name, method, answers (of labels), chances ([label, probability], ...),
//                    evidence (of lists), attention (shares, or null), read (most evidence)}]}]

const STRIDE = 4; // numbers of one evidence in a list
const MOST_AT_FIRST = 6; // runs shown before anybody chose
const SIZE = 10; // examples of a page
const TYPING_MS = 150; // a search waits until nobody typed for so long
const MUSTS = { no: "not shown", any: "shown", right: "shown, and right", wrong: "shown, and wrong" };
const VERDICTS = { right: "✓ right", wrong: "✗ wrong", "": "no label" };
const verdictOf = (task, run, i) => (task.gold[i] < 0 ? "" : run.answers[i] === task.gold[i] ? "right" : "wrong");
const chanceOf = (run, i) => run.chances[i].find(([label]) => label === run.answers[i])?.[1] ?? null;
const SHOWS = { // of the shown runs' verdicts and answers
  all: () => true,
  wrong: (verdicts) => verdicts.length > 0 && verdicts.every((verdict) => verdict === "wrong"),
  right: (verdicts) => verdicts.length > 0 && verdicts.every((verdict) => verdict === "right"),
  mixed: (verdicts) => verdicts.includes("right") && verdicts.includes("wrong"),
  differ: (_, answers) => answers.some((answer) => answer !== answers[0]),
};
const ORDERS = { // smaller keys come first; ties stay in the test set's order
  file: () => 0,
  sure: (verdicts, chances) => -Math.max(-1, ...chances.filter((_, r) => verdicts[r] === "wrong").map((p) => p ?? 0)),
  unsure: (_, chances) => Math.min(1, ...chances.map((p) => p ?? 1)),
};
const pattern = (text, flags) => new RegExp(text.replace(/[\\^$.*+?()[\]{}|/]/g, "\\$&"), flags);
const shownRuns = (task, form) => task.runs.filter((_, r) => form.runs[r] !== "no");
const textsOf = (list) => list.filter((_, k) => k % STRIDE === 0);

// The examples that the form asks for, in its order: {task, show, label, order, text, runs},
// where runs has for each run a key of MUSTS.
function select(data, form) {
  const task = data.tasks[form.task], runs = shownRuns(task, form), wanted = pattern(form.text, "iu");
  const known = []; // by text, which several runs share
  const holds = (text) => (known[text] ??= wanted.test(data.texts[text]));
  const hasText = (i) => form.text === "" || holds(task.queries[i]) || wanted.test(task.ids[i]) ||
    runs.some((run) => textsOf(task.lists[run.evidence[i]]).some(holds));
  const found = [];
  for (const i of task.ids.keys()) {
    const verdicts = runs.map((run) => verdictOf(task, run, i));
    if ((form.label < 0 || task.gold[i] === form.label) && SHOWS[form.show](verdicts, runs.map((run) => run.answers[i])) &&
        task.runs.every((run, r) => ["no", "any", verdictOf(task, run, i)].includes(form.runs[r])) && hasText(i)) {
      found.push([ORDERS[form.order](verdicts, runs.map((run) => chanceOf(run, i))), i]);
    }
  }
  return found.sort(([a], [b]) => a - b).map(([, i]) => i);
}

// Without a choice, one run a method, so that seeds do not fill the screen.
function firstRuns(task) {
  const methods = [...new Set(task.runs.map((run) => run.method))].slice(0, MOST_AT_FIRST);
  const first = methods.map((method) => task.runs.findIndex((run) => run.method === method));
  return task.runs.map((_, r) => (first.includes(r) ? "any" : "no"));
}

// Runs that read the same evidence of an example share a column, unless attention tells them apart.
function evidenceColumns(runs, i) {
  const columns = {};
  for (const run of runs) {
    const shares = run.attention?.[i], key = `list ${run.evidence[i]} ${JSON.stringify(shares)}`;
    (columns[key] ??= { names: [], list: run.evidence[i], read: run.read, shares }).names.push(run.name);
  }
  return Object.values(columns);
}

const showNumber = (value) => value?.toFixed(Math.abs(value) >= 1000 ? 1 : Math.abs(value) >= 10 ? 2 : 3) ?? "none";

function make(tag, attributes, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children); // strings become text nodes
  return node;
}

function marked(text, wanted) { // what is searched for stands between the parts, at odd places
  const parts = wanted ? text.split(new RegExp(`(${pattern(wanted, "").source})`, "iu")) : [text];
  return parts.map((part, k) => (k % 2 ? make("mark", {}, part) : part));
}

function answerLine(task, run, i) {
  const verdict = verdictOf(task, run, i);
  const others = run.chances[i].filter(([label, chance]) => label !== run.answers[i] && chance !== null)
    .sort((a, b) => b[1] - a[1]).map(([label, chance]) => `${task.labels[label]} ${showNumber(chance)}`);
  const cells = [[task.labels[run.answers[i]], ""], [VERDICTS[verdict], verdict], [showNumber(chanceOf(run, i)), "number"],
    [others.join(", "), "facts-line"]];
  // The roles are a table's own; a phone's layout, without columns, would lose them.
  return make("tr", { role: "row" }, make("th", { scope: "row", role: "rowheader" }, run.name),
    ...cells.map(([text, kind]) => make("td", { role: "cell", class: kind }, text)));
}

// What the reranker changed: how many of the first stage's best it kept, and from where it brought the others.
function changed(ranks) {
  const deep = ranks.filter((rank) => rank > ranks.length).sort((a, b) => a - b);
  if (deep.length) return `Reranked: ${ranks.length - deep.length} of the first stage's best ${ranks.length} kept; brought up from rank ${deep.join(", ")}.`;
  return ranks.every((rank, n) => rank === n + 1) ? "As the first stage ranked it." : "The first stage's best, reordered.";
}

function evidenceColumn(data, task, { names, list, read, shares }, wanted) {
  const numbers = task.lists[list], ranks = numbers.filter((_, k) => k % STRIDE === 1);
  const items = textsOf(numbers).map((text, n) => {
    const [rank, first, second] = numbers.slice(n * STRIDE + 1, (n + 1) * STRIDE);
    const facts = rank ? [`first stage: rank ${rank}, score ${showNumber(first)}`] : []; // without a rank it was not searched for
    // Where nothing was reranked the second score is the first's once more.
    if (second !== first) facts.push(`reranker: ${rank > n + 1 ? `up ${rank - n - 1}, ` : ""}score ${showNumber(second)}`);
    if (typeof shares?.[n] === "number") facts.push(`attention ${(100 * shares[n]).toFixed(1)} %`);
    return make("li", {}, make("span", { class: "passage", dir: "auto" }, ...marked(data.texts[text], wanted)),
      make("span", { class: "numbers" }, facts.join(" · ")));
  });
  const told = [ranks.every((rank) => rank) ? changed(ranks) : "", read > items.length ? `The best ${items.length} of up to ${read} are kept here.` : ""];
  return make("div", {}, make("h4", {}, names.join(", ")), make("p", { class: "facts-line" }, told.join(" ")), make("ol", {}, ...items));
}

function exampleItem(data, task, runs, i, wanted) {
  const heads = ["run", "answer", "", "probability", "other labels"].map((head) => make("th", { scope: "col" }, head));
  const columns = evidenceColumns(runs, i), reads = columns.filter(({ list }) => task.lists[list].length);
  const alone = columns.filter((column) => !reads.includes(column)).flatMap(({ names }) => names);
  return make("li", {},
    make("h3", {}, "label: ", make("b", {}, task.labels[task.gold[i]] ?? "unknown"), " · ", ...marked(task.ids[i], wanted)),
    make("p", { class: "query", dir: "auto" }, ...marked(data.texts[task.queries[i]], wanted)),
    make("table", { class: "answers" }, make("thead", {}, make("tr", {}, ...heads)),
      make("tbody", {}, ...runs.map((run) => answerLine(task, run, i)))),
    make("details", { open: "" }, make("summary", {}, "Evidence"),
      make("div", { class: "columns" }, ...reads.map((column) => evidenceColumn(data, task, column, wanted))),
      make("p", { class: "facts-line" }, alone.length ? `Without evidence: ${alone.join(", ")}.` : "")));
}

function start() {
  const at = (id) => document.getElementById(id);
  const data = JSON.parse(at("data").textContent), fields = at("filters").elements;
  const options = (pairs) => pairs.map(([value, text]) => make("option", { value }, text));
  let timer = 0;

  function layTask() { // what depends on the task: its labels and its runs
    const task = data.tasks[fields.task.value];
    fields.label.replaceChildren(...options([[-1, "any"], ...task.labels.entries()]));
    at("runs").replaceChildren(...firstRuns(task).map((must, r) => {
      const choice = make("select", { name: `run${r}` }, ...options(Object.entries(MUSTS)));
      choice.value = must;
      return make("label", { class: "run-line" }, choice, task.runs[r].name);
    }));
  }

  function readAddress() { // what a link asks for; unknown words are passed over
    const words = new URLSearchParams(location.hash.slice(1));
    fields.task.value = words.get("task") ?? fields.task.value;
    if (fields.task.selectedIndex < 0) fields.task.selectedIndex = 0;
    layTask();
    for (const field of words.has("show") ? fields : []) { // else no link of this form
      if (field.name !== "task" && words.has(field.name)) field.value = words.get(field.name);
      if (field.selectedIndex < 0) field.selectedIndex = 0;
    }
    refresh();
  }

  function refresh() {
    const words = new FormData(at("filters")), task = data.tasks[fields.task.value];
    const form = { ...Object.fromEntries(words), task: fields.task.value,
      label: Number(words.get("label")), runs: task.runs.map((_, r) => words.get(`run${r}`)) };
    const found = select(data, form), runs = shownRuns(task, form);
    const last = Math.max(Math.ceil(found.length / SIZE), 1);
    const page = Math.min(Math.max(Math.trunc(form.page) || 1, 1), last), from = (page - 1) * SIZE;
    const rows = found.slice(from, from + SIZE);
    fields.page.value = page;
    words.set("page", page);
    at("examples").start = from + 1;
    at("examples").replaceChildren(...rows.map((i) => exampleItem(data, task, runs, i, form.text)));
    at("pages").textContent = last;
    at("where").textContent = `Page ${page} of ${last}`;
    at("above").hidden = at("below").hidden = last === 1;
    for (const button of document.querySelectorAll("button[data-turn]")) {
      button.disabled = page === (button.dataset.turn < 0 ? 1 : last);
    }
    at("status").textContent = `${found.length} of ${task.ids.length} queries` +
      (rows.length ? `, ${from + 1} to ${from + rows.length} shown` : "");
    at("runs-count").textContent = `${runs.length} of ${task.runs.length} shown`;
    try { history.replaceState(null, "", `#${new URLSearchParams(words)}`); } catch {} // a preview has no address to keep it in
  }

  function turn(by) {
    fields.page.value = Math.min(Math.max(Number(fields.page.value) + by, 1), Number(at("pages").textContent));
    refresh();
    at("browser").scrollIntoView();
  }

  at("filters").addEventListener("submit", (event) => event.preventDefault());
  at("filters").addEventListener("input", ({ target }) => {
    if (target.name === "task") layTask();
    if (target.name !== "page") fields.page.value = 1;
    clearTimeout(timer);
    timer = setTimeout(refresh, target.name === "text" ? TYPING_MS : 0);
  });
  at("browser").addEventListener("click", ({ target }) => target.dataset.turn && turn(Number(target.dataset.turn)));
  addEventListener("keydown", (event) => {
    const isTyping = event.target.closest?.("input, select, textarea, .wide");
    const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (by && !isTyping && !(event.altKey || event.ctrlKey || event.metaKey || event.shiftKey)) turn(by);
  });
  addEventListener("hashchange", () => location.hash === "#browser" || readAddress()); // that is the link to the examples
  // Open on what tells runs apart, or on mistakes, where there are any.
  const { tasks: [first] } = data, runs = firstRuns(first);
  const has = (show) => select(data, { task: 0, show, label: -1, order: "file", text: "", runs }).length;
  fields.show.value = ["mixed", "differ", "wrong", "all"].find(has) ?? "all";
  readAddress();
  at("filters").hidden = false;
}

if (typeof document === "undefined") module.exports = { select, firstRuns, evidenceColumns, showNumber }; // tests
else start();
