// The tab of curves: metrics that differ by task, actor or policy alone share a chart; a filter, an x axis, smoothing.

const FIRST = ["validation", "success", "success_selected", "reward", "step_reward", "loss", "grad_norm", "entropy", "kl", "tokens_per_second",
  "completion_tokens"];

// "reward/solver" is of the family "reward"; "learner/solver/entropy" of "entropy".
function familyOf(name, known) {
  const parts = name.split("/");
  const rest = parts.filter((part) => !known.has(part));
  return rest.length ? rest.join("/") : name;
}

function families(run) {
  const known = new Set([...run.tasks, ...run.actors, ...run.policies]);
  const found = new Map();
  for (const name of Object.keys(run.curves.series)) {
    const family = familyOf(name, known);
    if (!found.has(family)) found.set(family, []);
    found.get(family).push(name);
  }
  const rank = (family) => (FIRST.includes(family) ? FIRST.indexOf(family) : FIRST.length);
  return [...found].sort(([a], [b]) => rank(a) - rank(b) || a.localeCompare(b));
}

function labelOf(name, family, known) {
  return name.split("/").filter((part) => known.has(part)).join("/") || (name === family ? "all" : name);
}

function linesOf(run, family, members) {
  const known = new Set([...run.tasks, ...run.actors, ...run.policies]);
  const order = [...known];
  return members.map((name) => {
    const label = labelOf(name, family, known);
    const place = order.indexOf(label.split("/").pop());
    const color = place < 0 ? "var(--line)" : PALETTE[place % PALETTE.length];
    return { label, color, values: run.curves.series[name] };
  }).sort((a, b) => order.indexOf(a.label) - order.indexOf(b.label));
}

function axisOf(run, name) {
  const xs = name === "step" ? [...run.curves.step] : [...run.curves.series[name]];
  xs.name = name.replaceAll("_", " ");
  return xs;
}

// Shares of what an actor was handed: [column, share, count of which it is one]; then success of other subTeams.
const SHARES = [["changed", "changed", "handed"], ["fixed", "fixed", "wrong"], ["broken", "broken", "right"]];
const SUB_TEAMS = [["without it", "without"], ["alone", "alone"]];

function percent(value) {
  return value === undefined ? "–" : (100 * value).toFixed(1) + "%";
}

function contributionTable(run) {
  if (!run.contributions) return null;
  const measured = Object.entries(run.contributions.actors);
  const has = (name) => measured.some(([, found]) => found[name] !== undefined);
  const shares = SHARES.filter(([, share]) => has(share));
  const subTeams = SUB_TEAMS.filter(([, name]) => has(name));
  return el("figure", { class: "adds" },
    el("figcaption", {}, el("b", {}, "What each actor adds"), ` at the validation of step ${run.contributions.step}`),
    el("table", {},
      el("thead", {}, el("tr", {}, ["actor", ...shares.map(([title]) => title), ...subTeams.map(([title]) => title)]
        .map((title) => el("th", {}, title)))),
      el("tbody", {}, measured.map(([actor, found]) => el("tr", {}, el("th", {}, actor),
        shares.map(([, share, whole]) => el("td", {}, found[share] === undefined ? "–" : `${percent(found[share])} of ${number(found[whole])}`)),
        subTeams.map(([, name]) => el("td", {}, percent(found[name]))))))));
}

function curvesTab(run) {
  const all = families(run);
  if (!all.length) return el("p", { class: "empty" }, "No step has been logged yet.");
  const main = new Set(all.map(([family]) => family).filter((family) => FIRST.includes(family)));
  const state = { chosen: main.size ? main : new Set(all.map(([family]) => family)), x: "step", smoothing: 0, filter: "" };
  const place = el("div", { class: "charts" });
  const chips = el("div", { class: "chips" });
  const matches = ([family]) => family.toLowerCase().includes(state.filter.toLowerCase());
  const draw = () => {
    const xs = axisOf(run, state.x);
    place.replaceChildren(...all.filter((one) => state.chosen.has(one[0]) && matches(one))
      .map(([family, members]) => [family, linesOf(run, family, members)])
      .filter(([, lines]) => lines.some((line) => pointsOf(line, xs).length))
      .map(([family, lines]) => chart(family, lines, xs, state.smoothing)));
    chips.replaceChildren(...all.filter(matches).map(([family]) => el("button", {
      type: "button", class: "chip", "aria-pressed": String(state.chosen.has(family)),
      onclick: () => { state.chosen.has(family) ? state.chosen.delete(family) : state.chosen.add(family); draw(); },
    }, family)));
  };
  const choose = (wanted) => () => { state.chosen = new Set(wanted); draw(); };
  const axes = ["step", ...["total_sampled_tokens", "seconds"].filter((name) => name in run.curves.series)];
  const bar = el("div", { class: "toolbar" },
    el("input", { type: "search", placeholder: "Filter metrics", "aria-label": "Filter metrics",
      oninput: (event) => { state.filter = event.target.value; draw(); } }),
    el("span", { class: "joined" },
      el("button", { type: "button", onclick: choose(main) }, "main"),
      el("button", { type: "button", onclick: choose(all.map(([family]) => family)) }, "all"),
      el("button", { type: "button", onclick: choose([]) }, "none")),
    el("label", {}, "x ", el("select", { onchange: (event) => { state.x = event.target.value; draw(); } },
      axes.map((name) => el("option", { value: name }, name.replaceAll("_", " "))))),
    el("label", {}, "smoothing ", el("input", { type: "range", min: 0, max: 0.95, step: 0.05, value: 0,
      oninput: (event) => { state.smoothing = Number(event.target.value); draw(); } })));
  draw();
  const shown = run.curves.step.length;
  const thinned = shown < run.curves.rows
    ? el("p", { class: "note" }, `Curves show ${shown} of ${run.curves.rows} steps, evenly spaced; metrics.jsonl has all.`) : null;
  return el("section", {}, contributionTable(run), bar, chips, thinned, place);
}
