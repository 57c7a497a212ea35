// The page itself: forms, pages, keys. It stands behind choose.js in one script.
// All text of the runs enters as text nodes, never as markup.

const TYPING_MS = 150; // a search waits until nobody typed for so long

function make(tag, attributes, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children); // strings become text nodes
  return node;
}

function marked(text, wanted) {
  if (wanted === "") return [text];
  const parts = [];
  let end = 0;
  for (const match of text.matchAll(pattern(wanted, "giu"))) {
    parts.push(text.slice(end, match.index), make("mark", {}, match[0]));
    end = match.index + match[0].length;
  }
  return [...parts, text.slice(end)];
}

function answerLine(task, run, i) {
  const verdict = isRight(task, run, i) ? "right" : isWrong(task, run, i) ? "wrong" : "";
  const sign = { right: "\u2713 right", wrong: "\u2717 wrong", "": "no label" }[verdict];
  const others = run.chances[i]
    .filter(([label, chance]) => label !== run.answers[i] && chance !== null)
    .sort((a, b) => b[1] - a[1])
    .map(([label, chance]) => `${task.labels[label]} ${showNumber(chance)}`);
  // The roles are a table's own; a phone's layout, without columns, would lose them.
  return make("tr", { role: "row" },
    make("th", { scope: "row", role: "rowheader" }, run.name),
    make("td", { role: "cell" }, task.labels[run.answers[i]]),
    make("td", { role: "cell", class: verdict }, sign),
    make("td", { role: "cell" }, showNumber(chanceOf(run, i))),
    make("td", { role: "cell", class: "facts" }, others.join(", ")));
}

function answerTable(task, runs, i) {
  const heads = ["run", "answer", "", "probability", "other labels"];
  return make("div", { class: "scroll" }, make("table", { class: "answers" },
    make("thead", {}, make("tr", {}, ...heads.map((head) => make("th", { scope: "col" }, head)))),
    make("tbody", {}, ...runs.map((run) => answerLine(task, run, i)))));
}

function evidenceItem(data, entry, share, state) {
  const [text, rank, first, second] = entry;
  const told = [`stage 1: rank ${rank ?? "none"}, score ${showNumber(first)}`];
  // Where nothing was reranked the second score is the first's once more.
  if (second !== first) told.push(`stage 2: score ${showNumber(second)}`);
  if (typeof share === "number") told.push(`attention ${(100 * share).toFixed(1)} %`);
  return make("li", {},
    make("span", { class: "passage", dir: "auto" },
      ...marked(data.texts[text], state.deep ? state.text : "")),
    make("span", { class: "numbers" }, told.join(" \u00b7 ")));
}

function evidenceColumn(data, task, column, state) {
  const list = task.lists[column.list];
  const items = [];
  for (let k = 0; k < list.length; k += STRIDE) {
    const share = column.shares ? column.shares[k / STRIDE] : null;
    items.push(evidenceItem(data, list.slice(k, k + STRIDE), share, state));
  }
  const body = items.length ? make("ol", {}, ...items) : make("p", { class: "facts" }, "It reads none.");
  const more = column.read > items.length && items.length > 0
    ? [make("p", { class: "facts" }, `The best ${items.length} of up to ${column.read} are kept here.`)] : [];
  return make("div", {}, make("h4", {}, column.names.join(", ")), body, ...more);
}

function exampleItem(data, task, runs, i, state) {
  const gold = task.gold[i] >= 0 ? task.labels[task.gold[i]] : "unknown";
  const columns = evidenceColumns(runs, i);
  const box = make("details", {}, make("summary", {}, "Evidence"),
    make("div", { class: "columns" },
      ...columns.map((column) => evidenceColumn(data, task, column, state))));
  box.open = state.open;
  return make("li", {},
    make("h3", {}, `label: ${gold} `,
      make("span", { class: "facts" }, ...marked(task.ids[i], state.text))),
    make("p", { class: "query", dir: "auto" },
      ...marked(data.texts[task.queries[i]], state.text)),
    answerTable(task, runs, i), box);
}

function start() {
  const at = (id) => document.getElementById(id);
  const data = JSON.parse(at("data").textContent);
  if (data.tasks.length === 0) {
    at("status").textContent = "No predictions to look through.";
    return;
  }
  let state = fromHash(data, location.hash);
  let found = [];

  function fill(select_, names) {
    select_.replaceChildren(...names.map(([value, name]) => make("option", { value }, name)));
  }

  function runLine(run, r) {
    const tick = make("input", { type: "checkbox" });
    tick.checked = state.shown[r];
    tick.addEventListener("change", () => change(() => { state.shown[r] = tick.checked; }));
    const must = make("select", { "aria-label": `${run.name} must be` });
    fill(must, [["any", "right or wrong"], ["right", "right"], ["wrong", "wrong"]]);
    must.value = state.must[r];
    must.addEventListener("change", () => change(() => { state.must[r] = must.value; }));
    return make("div", { class: "run-line" }, make("label", {}, tick, make("span", {}, run.name)), must);
  }

  // Lay what depends on the task or the link: the form's values.
  function layForm() {
    const task = data.tasks[state.task];
    fill(at("task"), data.tasks.map((each, t) => [t, each.name]));
    fill(at("label"), [[-1, "any"], ...task.labels.map((label, place) => [place, label])]);
    for (const id of ["task", "show", "label", "order", "size", "text"]) at(id).value = state[id];
    for (const id of ["deep", "open"]) at(id).checked = state[id];
    at("runs").replaceChildren(at("runs").querySelector("legend"), ...task.runs.map(runLine));
    if (state.must.some((must) => must !== "any")) at("runs-box").open = true;
  }

  function showPage() {
    const task = data.tasks[state.task];
    const runs = task.runs.filter((_, r) => state.shown[r]);
    const pages = Math.max(Math.ceil(found.length / state.size), 1);
    state.page = Math.min(state.page, pages - 1);
    const from = state.page * state.size;
    const places = found.slice(from, from + state.size);
    at("examples").start = from + 1;
    at("examples").replaceChildren(...places.map((i) => exampleItem(data, task, runs, i, state)));
    at("page").value = state.page + 1;
    at("page").max = pages;
    at("pages").textContent = pages;
    for (const id of ["first", "previous"]) at(id).disabled = state.page === 0;
    for (const id of ["next", "last"]) at(id).disabled = state.page === pages - 1;
    const shown = places.length ? `, ${from + 1} to ${from + places.length} shown` : "";
    at("status").textContent = `${found.length} of ${task.ids.length} queries${shown}`;
    at("runs-count").textContent = `${runs.length} of ${task.runs.length} shown`;
    try {
      history.replaceState(null, "", `#${toHash(data, state)}`);
    } catch {
      // A page without an address (a preview, say) has no link to keep.
    }
  }

  function refresh() {
    found = select(data, state);
    showPage();
  }

  function change(edit) {
    edit();
    state.page = 0;
    refresh();
  }

  function turn(page) {
    const last = Math.max(Math.ceil(found.length / state.size) - 1, 0);
    state.page = Math.min(Math.max(Math.trunc(page) || 0, 0), last);
    showPage();
    at("browser").scrollIntoView();
  }

  at("filters").addEventListener("submit", (event) => event.preventDefault());
  at("task").addEventListener("change", () => {
    state = { ...freshState(data, Number(at("task").value)), open: state.open, size: state.size };
    layForm();
    refresh();
  });
  for (const id of ["show", "order"]) {
    at(id).addEventListener("change", () => change(() => { state[id] = at(id).value; }));
  }
  for (const id of ["label", "size"]) {
    at(id).addEventListener("change", () => change(() => { state[id] = Number(at(id).value); }));
  }
  at("deep").addEventListener("change", () => change(() => { state.deep = at("deep").checked; }));
  at("open").addEventListener("change", () => {
    state.open = at("open").checked;
    showPage();
  });
  let timer = 0;
  at("text").addEventListener("input", () => {
    clearTimeout(timer);
    timer = setTimeout(() => change(() => { state.text = at("text").value; }), TYPING_MS);
  });
  at("first").addEventListener("click", () => turn(0));
  at("previous").addEventListener("click", () => turn(state.page - 1));
  at("next").addEventListener("click", () => turn(state.page + 1));
  at("last").addEventListener("click", () => turn(Infinity));
  at("page").addEventListener("change", () => turn(Number(at("page").value) - 1));
  document.addEventListener("keydown", (event) => {
    if (event.target.closest("input, select, textarea, .wide") || event.altKey) return;
    if (event.ctrlKey || event.metaKey || event.shiftKey) return;
    if (event.key === "ArrowRight") turn(state.page + 1);
    if (event.key === "ArrowLeft") turn(state.page - 1);
  });
  addEventListener("hashchange", () => {
    if (location.hash === "#browser") return; // the link to the examples
    state = fromHash(data, location.hash);
    layForm();
    refresh();
  });

  layForm();
  at("filters").hidden = false;
  document.querySelector(".pager").hidden = false;
  refresh();
}

start();
