// The head and the tabs.

function lastOf(series) {
  return series ? series.filter((value) => value !== null).pop() : undefined;
}

function headView(run) {
  const { step, series } = run.curves;
  const last = step.length ? step[step.length - 1] : 0;
  // What a tree selected is no success of the policy, so it goes by another name; a run may have had both.
  const latest = (name) => (series[name] || []).reduce((found, value, at) => (value === null ? found : at), -1);
  const success = latest("success_selected") > latest("success") ? "success_selected" : "success";
  const figures = [
    ["step", run.planned ? `${number(last)} of ${number(run.planned)}` : number(last)],
    ["validation", lastOf(series.validation)], [success.replace("_", ", "), lastOf(series[success])], ["reward", lastOf(series.reward)],
    ["sampled tokens", lastOf(series.total_sampled_tokens)], ["tokens/s", lastOf(series.tokens_per_second)],
  ].filter(([, value]) => value !== undefined);
  // What was learned, what it cost, and the two recorded episodes between which most was gained.
  const percent = (share) => (share === null || share === undefined ? "–" : (100 * share).toFixed(1) + "%");
  const { validations, held_out: held } = run.learned, end = validations[validations.length - 1];
  const told = [
    validations.length > 1 ? `Validation went from ${percent(validations[0][1])} at step ${validations[0][0]} to ${percent(end[1])} at step ${end[0]}.` : "",
    held ? `Held-out success is ${percent(held.success)}` + (held.low === null ? "" : ` (95% interval ${percent(held.low)} to ${percent(held.high)}`
      + `, ${number(held.episodes / held.samples)} questions)`) + "." : "",
    run.cost.tokens ? `It took ${number(run.cost.tokens)} sampled tokens and ${number(run.cost.seconds / 60, 2)} minutes of sampling and updates.` : "",
  ].filter((text) => text).join(" ");
  const visit = (index) => el("a", { href: `#episodes/${index}` }, `step ${run.episodes[index].step}`);
  const changed = run.changed && el("span", {}, " The episodes between which most was gained: ", visit(run.changed[0]), " and ", visit(run.changed[1]), ".");
  const learned = told || changed ? el("p", { class: "learned" }, told, changed || "") : "";
  return [el("div", { class: "name" }, el("h1", {}, run.name),
    el("p", {}, `turnwise ${run.version} · written ${run.written}`)),
  el("dl", { class: "figures" }, figures.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, number(value))))), learned,
  run.warnings.length ? el("ul", { class: "warnings" }, run.warnings.map(({ step, warning }) => el("li", {}, `step ${step}: ${warning}`))) : ""];
}

function configTab(run) {
  return run.config ? el("pre", { class: "config" }, run.config) : el("p", { class: "empty" }, "This run folder has no config.toml.");
}

function start() {
  const run = JSON.parse(document.getElementById("data").textContent);
  const tabs = { curves: () => curvesTab(run), episodes: (first) => episodesTab(run, first), config: () => configTab(run) };
  if (run.lanes) tabs.processes = () => lanesTab(run.lanes);
  const main = document.getElementById("main");
  const nav = document.getElementById("tabs");
  const show = (name, detail) => {
    for (const button of nav.children) button.setAttribute("aria-selected", String(button.dataset.tab === name));
    history.replaceState(null, "", "#" + name);
    main.replaceChildren(tabs[name](detail));
  };
  nav.replaceChildren(...Object.keys(tabs).map((name) =>
    el("button", { type: "button", role: "tab", "data-tab": name, onclick: () => show(name) }, name)));
  document.getElementById("head").replaceChildren(...headView(run));
  const route = () => {
    const [name, detail] = location.hash.slice(1).split("/");
    show(name in tabs ? name : "curves", Number(detail));
  };
  window.addEventListener("hashchange", route);  // a link in the head; the page itself replaces its state silently
  route();
}

start();
