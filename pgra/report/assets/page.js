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
const TYPING_MS = 150; // a search waits until nobody typed for so long
const isRight = (task, run, i) => task.gold[i] >= 0 && run.answers[i] === task.gold[i];
const isWrong = (task, run, i) => task.gold[i] >= 0 && run.answers[i] !== task.gold[i];
const MUSTS = { any: () => true, right: isRight, wrong: isWrong };
const SHOWS = {
  all: () => true,
  wrong: (task, runs, i) => runs.length > 0 && runs.every((run) => isWrong(task, run, i)),
  right: (task, runs, i) => runs.length > 0 && runs.every((run) => isRight(task, run, i)),
  mixed: (task, runs, i) =>
    runs.some((run) => isRight(task, run, i)) && runs.some((run) => isWrong(task, run, i)),
  differ: (task, runs, i) => runs.some((run) => run.answers[i] !== runs[0].answers[i]),
};
const chanceOf = (run, i) => run.chances[i].find(([label]) => label === run.answers[i])?.[1] ?? null;
const ORDERS = { // smaller keys come first; ties stay in the test set's order
  file: () => 0,
  sure: (task, runs, i) =>
    -Math.max(-1, ...runs.filter((run) => isWrong(task, run, i)).map((run) => chanceOf(run, i) ?? 0)),
  unsure: (task, runs, i) => Math.min(1, ...runs.map((run) => chanceOf(run, i) ?? 1)),
};
const pattern = (text, flags) => new RegExp(text.replace(/[\\^$.*+?()[\]{}|/]/g, "\\$&"), flags);

// The examples that the form asks for, in its order: {task, show, label, order, text, deep, runs},
// where runs has for each run "no" (not shown), "any", "right" or "wrong".
function select(data, form) {
  const task = data.tasks[form.task];
  const runs = task.runs.filter((_, r) => form.runs[r] !== "no");
  const musts = task.runs.map((run, r) => [MUSTS[form.runs[r]], run]).filter(([test]) => test);
  const wanted = pattern(form.text, "iu");
  const known = new Map(); // by text, which several runs share
  const holds = (text) => {
    if (!known.has(text)) known.set(text, wanted.test(data.texts[text]));
    return known.get(text);
  };
  const listHolds = (list) => list.some((text, k) => k % STRIDE === 0 && holds(text));
  const hasText = (i) => form.text === "" || holds(task.queries[i]) || wanted.test(task.ids[i]) ||
    (form.deep && runs.some((run) => listHolds(task.lists[run.evidence[i]])));
  const found = [...task.ids.keys()].filter((i) =>
    (form.label < 0 || task.gold[i] === form.label) && SHOWS[form.show](task, runs, i) &&
    musts.every(([test, run]) => test(task, run, i)) && hasText(i));
  const keys = new Map(found.map((i) => [i, ORDERS[form.order](task, runs, i)]));
  return found.sort((a, b) => keys.get(a) - keys.get(b));
}

// Without a choice, one run a method, so that seeds do not fill the screen.
function firstRuns(task) {
  const methods = [...new Set(task.runs.map((run) => run.method))].slice(0, MOST_AT_FIRST);
  const first = methods.map((method) => task.runs.findIndex((run) => run.method === method));
  return task.runs.map((_, r) => (first.includes(r) ? "any" : "no"));
}

// Runs that read the same evidence of an example share a column, unless attention tells them apart.
function evidenceColumns(runs, i) {
  const columns = new Map();
  for (const run of runs) {
    const shares = run.attention ? run.attention[i] : null;
    const key = `${run.evidence[i]} ${JSON.stringify(shares)}`;
    const column = columns.get(key) ?? { names: [], list: run.evidence[i], read: run.read, shares };
    columns.set(key, { ...column, names: [...column.names, run.name] });
  }
  return [...columns.values()];
}

const digits = (value) => (Math.abs(value) >= 1000 ? 1 : Math.abs(value) >= 10 ? 2 : 3);
const showNumber = (value) => value?.toFixed(digits(value)) ?? "none";

function make(tag, attributes, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children); // strings become text nodes
  return node;
}

function marked(text, wanted) {
  const parts = [];
  let end = 0;
  for (const match of wanted ? text.matchAll(pattern(wanted, "giu")) : []) {
    parts.push(text.slice(end, match.index), make("mark", {}, match[0]));
    end = match.index + match[0].length;
  }
  return [...parts, text.slice(end)];
}

function answerLine(task, run, i) {
  const verdict = isRight(task, run, i) ? "right" : isWrong(task, run, i) ? "wrong" : "";
  const others = run.chances[i].filter(([label, chance]) => label !== run.answers[i] && chance !== null)
    .sort((a, b) => b[1] - a[1]).map(([label, chance]) => `${task.labels[label]} ${showNumber(chance)}`);
  // The roles are a table's own; a phone's layout, without columns, would lose them.
  const cells = [
    [task.labels[run.answers[i]], ""], [{ right: "✓ right", wrong: "✗ wrong", "": "no label" }[verdict], verdict],
    [showNumber(chanceOf(run, i)), ""], [others.join(", "), "facts"]];
  return make("tr", { role: "row" }, make("th", { scope: "row", role: "rowheader" }, run.name),
    ...cells.map(([text, kind]) => make("td", { role: "cell", class: kind }, text)));
}

function evidenceColumn(data, task, column, form) {
  const list = task.lists[column.list];
  const items = list.filter((_, k) => k % STRIDE === 0).map((text, n) => {
    const [rank, first, second] = list.slice(n * STRIDE + 1, (n + 1) * STRIDE);
    const facts = [`stage 1: rank ${rank ?? "none"}, score ${showNumber(first)}`];
    // Where nothing was reranked the second score is the first's once more.
    if (second !== first) facts.push(`stage 2: score ${showNumber(second)}`);
    const share = column.shares?.[n] ?? null;
    if (share !== null) facts.push(`attention ${(100 * share).toFixed(1)} %`);
    const passage = marked(data.texts[text], form.deep ? form.text : "");
    return make("li", {}, make("span", { class: "passage", dir: "auto" }, ...passage),
      make("span", { class: "numbers" }, facts.join(" · ")));
  });
  const cut = column.read > items.length ? `The best ${items.length} of up to ${column.read} are kept here.` : "";
  const note = items.length ? cut : "It reads none.";
  return make("div", {}, make("h4", {}, column.names.join(", ")), make("ol", {}, ...items),
    make("p", { class: "facts" }, note));
}

function exampleItem(data, task, runs, i, form) {
  const gold = task.gold[i] >= 0 ? task.labels[task.gold[i]] : "unknown";
  const heads = ["run", "answer", "", "probability", "other labels"].map((head) => make("th", { scope: "col" }, head));
  const columns = evidenceColumns(runs, i).map((column) => evidenceColumn(data, task, column, form));
  const box = make("details", {}, make("summary", {}, "Evidence"), make("div", { class: "columns" }, ...columns));
  box.open = form.open;
  return make("li", {},
    make("h3", {}, `label: ${gold} `, make("span", { class: "facts" }, ...marked(task.ids[i], form.text))),
    make("p", { class: "query", dir: "auto" }, ...marked(data.texts[task.queries[i]], form.text)),
    make("table", { class: "answers" }, make("thead", {}, make("tr", {}, ...heads)),
      make("tbody", {}, ...runs.map((run) => answerLine(task, run, i)))), box);
}

function start() {
  const at = (id) => document.getElementById(id);
  const data = JSON.parse(at("data").textContent);
  const fields = at("filters").elements;
  const musts = { no: "not shown", any: "shown", right: "shown, and right", wrong: "shown, and wrong" };
  let timer = 0;
  const options = (pairs) => pairs.map(([value, text]) => make("option", { value }, text));

  function layTask() { // what depends on the task: its labels and its runs
    const task = data.tasks[fields.task.value];
    fields.label.replaceChildren(...options([[-1, "any"], ...task.labels.entries()]));
    at("runs").replaceChildren(...firstRuns(task).map((must, r) => {
      const choice = make("select", { name: `run${r}` }, ...options(Object.entries(musts)));
      choice.value = must;
      return make("label", { class: "run-line" }, choice, task.runs[r].name);
    }));
  }

  function readAddress() { // what a link asks for; unknown words are passed over
    const words = new URLSearchParams(location.hash.slice(1));
    if (words.has("task")) fields.task.value = words.get("task");
    if (fields.task.selectedIndex < 0) fields.task.selectedIndex = 0;
    layTask();
    for (const field of fields) {
      if (!words.has("size")) break; // no link of this form
      if (field.type === "checkbox") field.checked = words.has(field.name);
      else if (field.name !== "task" && words.has(field.name)) field.value = words.get(field.name);
      if (field.selectedIndex < 0) field.selectedIndex = 0;
    }
  }

  function refresh() {
    const task = data.tasks[fields.task.value];
    const words = new FormData(at("filters"));
    const form = { ...Object.fromEntries(words), task: Number(fields.task.value), deep: words.has("deep"),
      open: words.has("open"), label: Number(words.get("label")), runs: task.runs.map((_, r) => words.get(`run${r}`)) };
    const found = select(data, form);
    const size = Number(form.size);
    const last = Math.max(Math.ceil(found.length / size), 1);
    const page = Math.min(Math.max(Math.trunc(form.page) || 1, 1), last);
    fields.page.value = page;
    words.set("page", page);
    const from = (page - 1) * size;
    const places = found.slice(from, from + size);
    const runs = task.runs.filter((_, r) => form.runs[r] !== "no");
    at("examples").start = from + 1;
    at("examples").replaceChildren(...places.map((i) => exampleItem(data, task, runs, i, form)));
    at("pages").textContent = last;
    for (const button of document.querySelectorAll("button[data-turn]")) {
      button.disabled = page === (button.dataset.turn < 0 ? 1 : last);
    }
    const shown = places.length ? `, ${from + 1} to ${from + places.length} shown` : "";
    at("status").textContent = `${found.length} of ${task.ids.length} queries${shown}`;
    at("runs-count").textContent = `${runs.length} of ${task.runs.length} shown`;
    try {
      history.replaceState(null, "", `#${new URLSearchParams(words)}`);
    } catch {
      // A page without an address (a preview, say) has no link to keep.
    }
  }

  function turn(by) {
    fields.page.value = Math.min(Math.max(Number(fields.page.value) + by, 1), Number(at("pages").textContent));
    refresh();
    at("browser").scrollIntoView();
  }

  at("filters").addEventListener("submit", (event) => event.preventDefault());
  at("filters").addEventListener("input", ({ target }) => {
    if (target.name === "task") layTask();
    if (target.name !== "page" && target.name !== "open") fields.page.value = 1;
    clearTimeout(timer);
    timer = setTimeout(refresh, target.name === "text" ? TYPING_MS : 0);
  });
  at("filters").addEventListener("click", ({ target }) => target.dataset.turn && turn(Number(target.dataset.turn)));
  addEventListener("keydown", (event) => {
    const isTyping = event.target.closest?.("input, select, textarea, .wide");
    if (isTyping || event.altKey || event.ctrlKey || event.metaKey || event.shiftKey) return;
    if (event.key === "ArrowRight") turn(1);
    if (event.key === "ArrowLeft") turn(-1);
  });
  addEventListener("hashchange", () => {
    if (location.hash === "#browser") return; // the link to the examples
    readAddress();
    refresh();
  });
  readAddress();
  at("filters").hidden = false;
  refresh();
}

if (typeof document === "undefined") module.exports = { select, firstRuns, evidenceColumns, showNumber }; // tests
else start();
