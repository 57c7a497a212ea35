"use strict";
// Which examples the browser shows, in which order, and the link that says so. No page needed.
//
// The data, as pgra/report/page.py gives it:
//   texts: every query and passage once
//   tasks: [{name, labels, ids, queries (places in texts), gold (places in labels, -1 unknown),
//            lists: [[text, stage-1 rank, stage-1 score, stage-2 score, text, ...], ...],
//            runs: [{name, system, answers (places in labels), chances ([place in labels, probability],
//                    ...), evidence (places in lists), attention (shares, or null),
//                    read (most evidence a query had; lists hold the best of it)}]}]

const STRIDE = 4; // numbers of one evidence in a list
const MOST_AT_FIRST = 6; // runs shown before anybody chose

function isRight(task, run, i) {
  return task.gold[i] >= 0 && run.answers[i] === task.gold[i];
}

function isWrong(task, run, i) {
  return task.gold[i] >= 0 && run.answers[i] !== task.gold[i];
}

const SHOWS = {
  all: () => true,
  wrong: (task, runs, i) => runs.length > 0 && runs.every((run) => isWrong(task, run, i)),
  right: (task, runs, i) => runs.length > 0 && runs.every((run) => isRight(task, run, i)),
  mixed: (task, runs, i) =>
    runs.some((run) => isRight(task, run, i)) && runs.some((run) => isWrong(task, run, i)),
  differ: (task, runs, i) => runs.some((run) => run.answers[i] !== runs[0].answers[i]),
};

const MUSTS = { any: () => true, right: isRight, wrong: isWrong };

function chanceOf(run, i) {
  const pair = run.chances[i].find(([label]) => label === run.answers[i]);
  return pair ? pair[1] : null;
}

// Smaller keys come first; ties stay in the test set's order.
const ORDERS = {
  file: () => 0,
  sure: (task, runs, i) => {
    const wrong = runs.filter((run) => isWrong(task, run, i)).map((run) => chanceOf(run, i) ?? 0);
    return wrong.length ? -Math.max(...wrong) : 1;
  },
  unsure: (task, runs, i) => Math.min(...runs.map((run) => chanceOf(run, i) ?? 1), 1),
};

function pattern(text, flags) {
  return new RegExp(text.replace(/[\\^$.*+?()[\]{}|/]/g, "\\$&"), flags);
}

// A test of one example: whether its id, its query or (if deep) a shown run's evidence holds `text`.
function textTest(data, task, runs, text, deep) {
  if (text === "") return () => true;
  const wanted = pattern(text, "iu");
  const known = new Int8Array(data.texts.length); // 0 not looked at, 1 holds it, -1 does not
  const holds = (place) => {
    if (known[place] === 0) known[place] = wanted.test(data.texts[place]) ? 1 : -1;
    return known[place] === 1;
  };
  const listHolds = (list) => {
    for (let k = 0; k < list.length; k += STRIDE) if (holds(list[k])) return true;
    return false;
  };
  return (i) =>
    holds(task.queries[i]) ||
    wanted.test(task.ids[i]) ||
    (deep && runs.some((run) => listHolds(task.lists[run.evidence[i]])));
}

// The places of the examples that a state asks for, in its order.
function select(data, state) {
  const task = data.tasks[state.task];
  const runs = task.runs.filter((_, r) => state.shown[r]);
  const musts = task.runs.flatMap((run, r) =>
    state.shown[r] && state.must[r] !== "any" ? [[MUSTS[state.must[r]], run]] : []
  );
  const hasText = textTest(data, task, runs, state.text, state.deep);
  const found = [];
  for (let i = 0; i < task.ids.length; i += 1) {
    if (state.label >= 0 && task.gold[i] !== state.label) continue;
    if (!SHOWS[state.show](task, runs, i)) continue;
    if (!musts.every(([test, run]) => test(task, run, i))) continue;
    if (hasText(i)) found.push(i);
  }
  if (state.order === "file") return found;
  const keys = new Map(found.map((i) => [i, ORDERS[state.order](task, runs, i)]));
  return found.sort((a, b) => keys.get(a) - keys.get(b));
}

// Without a choice, one run a system, so that seeds do not fill the screen.
function firstShown(task) {
  const seen = new Set();
  return task.runs.map((run) => {
    const isNew = !seen.has(run.system) && seen.size < MOST_AT_FIRST;
    if (isNew) seen.add(run.system);
    return isNew;
  });
}

function freshState(data, task = 0) {
  return {
    task, show: "all", label: -1, order: "file", size: 10, text: "", deep: false, open: true,
    page: 0, shown: firstShown(data.tasks[task]), must: data.tasks[task].runs.map(() => "any"),
  };
}

// The state as the part of the address behind #, so that a view can be kept as a link.
function toHash(data, state) {
  const task = data.tasks[state.task];
  const plain = freshState(data, state.task);
  const words = new URLSearchParams();
  if (state.task > 0) words.set("task", task.name);
  for (const name of ["show", "order", "size", "text"]) {
    if (state[name] !== plain[name]) words.set(name, state[name]);
  }
  if (state.label >= 0) words.set("label", task.labels[state.label]);
  if (state.deep) words.set("deep", "1");
  if (!state.open) words.set("open", "0");
  if (state.page > 0) words.set("page", state.page + 1);
  if (state.shown.some((is, r) => is !== plain.shown[r])) {
    words.set("runs", "");
    task.runs.forEach((run, r) => state.shown[r] && words.append("run", run.name));
  }
  task.runs.forEach((run, r) => {
    if (state.must[r] !== "any") words.append(state.must[r], run.name);
  });
  return words.toString();
}

// What a link asks for; unknown words are passed over.
function fromHash(data, hash) {
  const words = new URLSearchParams(hash.replace(/^#/, ""));
  const place = data.tasks.findIndex((task) => task.name === words.get("task"));
  const state = freshState(data, Math.max(place, 0));
  const task = data.tasks[state.task];
  if (Object.hasOwn(SHOWS, words.get("show") ?? "")) state.show = words.get("show");
  if (Object.hasOwn(ORDERS, words.get("order") ?? "")) state.order = words.get("order");
  if (["10", "25", "50", "100"].includes(words.get("size"))) state.size = Number(words.get("size"));
  state.text = words.get("text") ?? "";
  state.label = task.labels.indexOf(words.get("label"));
  state.deep = words.get("deep") === "1";
  state.open = words.get("open") !== "0";
  state.page = Math.max(Math.trunc(Number(words.get("page") ?? 1)) - 1 || 0, 0);
  if (words.has("runs")) {
    const names = words.getAll("run");
    state.shown = task.runs.map((run) => names.includes(run.name));
  }
  for (const must of ["right", "wrong"]) {
    const names = words.getAll(must);
    task.runs.forEach((run, r) => names.includes(run.name) && (state.must[r] = must));
  }
  return state;
}

// Runs that read the same evidence of an example share a column, unless attention tells them apart.
function evidenceColumns(runs, i) {
  const columns = new Map();
  for (const run of runs) {
    const shares = run.attention ? run.attention[i] : null;
    const key = `${run.evidence[i]} ${JSON.stringify(shares)}`;
    if (!columns.has(key)) {
      columns.set(key, { names: [], list: run.evidence[i], read: run.read, shares });
    }
    columns.get(key).names.push(run.name);
  }
  return [...columns.values()];
}

function showNumber(value) {
  if (value === null || value === undefined) return "none";
  const size = Math.abs(value);
  return size >= 1000 ? value.toFixed(1) : size >= 10 ? value.toFixed(2) : value.toFixed(3);
}

if (typeof module !== "undefined") {
  module.exports = { select, freshState, toHash, fromHash, evidenceColumns, showNumber }; // tests
}
