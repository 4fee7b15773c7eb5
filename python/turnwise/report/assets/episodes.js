// The tab of episodes: a list, and one episode as a table with a column per seat and a row per turn.

const JUDGE = "judge";

function walk(episode) {
  return [episode, ...episode.children.flatMap(walk)];
}

function seatOf(step) {
  return step.actor === null ? JUDGE : step.actor;
}

// Siblings of a tree node stand together; every other call stands alone. Order is that of the record.
function groupsOf(steps) {
  const groups = [];
  const nodes = new Map();
  for (const step of steps) {
    const known = step.node !== null ? nodes.get(step.node) : undefined;
    if (known) known.push(step);
    else {
      const group = [step];
      groups.push(group);
      if (step.node !== null) nodes.set(step.node, group);
    }
  }
  return groups;
}

function signOf(value) {
  return value < 0 ? "minus" : value > 0 ? "plus" : "dim";
}

function rewardsOf(episode) {
  return Object.entries(episode.rewards || {}).map(([actor, reward]) => `${actor} ${number(reward)}`).join(" · ");
}

function status(step) {
  if (step.info.error) return el("span", { class: "badge bad", title: step.info.error }, "failed");
  if (step.finish_reason !== "stop") return el("span", { class: "badge warn" }, step.finish_reason === "length" ? "cut off" : "aborted");
  if (step.actor !== null && !step.trainable) return el("span", { class: "badge" }, "not trained");
  return null;
}

// ---- one turn of one seat ------------------------------------------------------------------------------------------
// All messages of a prompt: the first ones of the prompt that it goes on from, and its own.
function messagesOf(run, place) {
  const parts = [];
  for (let wanted = Infinity; place !== null;) {
    const { after, kept, messages } = run.prompts[place];
    parts.unshift(messages.slice(0, Math.max(wanted - kept, 0)));
    wanted = Math.min(wanted, kept);
    place = after;
  }
  return parts.flat();
}

function promptView(run, step) {
  const { kept, messages } = run.prompts[step.prompt];
  const count = kept + messages.length;
  const marked = [step.info.private || []].flat();
  const show = (message) => {
    const parts = Array.isArray(message.private) ? [...message.private, ...marked] : marked;
    const whole = message.private === true;
    return el("div", { class: "message" }, el("span", { class: "role" }, message.role),
      whole ? el("span", { class: "badge private" }, "private") : null,
      el("div", { class: whole ? "said private" : "said" }, whole ? message.content : markPrivate(message.content, parts)));
  };
  const place = el("div");
  // A long chat has as many prompts as turns, so a prompt's messages are made when it is opened.
  return el("details", { class: "prompt", ontoggle: () => { if (!place.childNodes.length) fill(place, {}, messagesOf(run, step.prompt).map(show)); } },
    el("summary", {}, `prompt: ${count} message${count === 1 ? "" : "s"}, ${number(step.prompt_tokens)} tokens`), place);
}

// The parts of a text that only this seat saw, each in a <mark>.
function markPrivate(text, parts) {
  const part = parts.find((one) => one && text.includes(one));
  if (!part) return text;
  const at = text.indexOf(part);
  return [markPrivate(text.slice(0, at), parts), el("mark", { class: "private", title: "private: no other seat saw this" }, part),
    markPrivate(text.slice(at + part.length), parts)].flat();
}

function facts(step) {
  const shown = [["reward", signed(step.reward)], ["advantage", signed(step.advantage)], ["tokens", number(step.ids.length)],
    ["ends", (step.info.ends || []).join(", ")], ["policy", step.policy], ["temperature", number(step.info.temperature)]].filter(([, value]) => value && value !== "–");
  return el("div", { class: "facts" }, shown.map(([name, value]) => el("span", {}, el("i", {}, name), " ", value)));
}

function whySelected(step) {
  if (!step.selected) return "not selected";
  const by = { best: "selected as the best", draw: "selected by a draw among all branches" };
  return `${by[step.info.selected_by] || "selected"}: the episode went on from here`;
}

function branchView(run, step, scale, tint) {
  const answer = step.info.env_response;
  return el("div", { class: "branch-view", "data-branch": step.branch },
    facts(step), promptView(run, step), completion(step, scale, tint),
    answer ? el("div", { class: "answer" }, el("span", { class: "role" }, "environment"), el("div", { class: "said" }, answer)) : null,
    step.info.error ? el("pre", { class: "error" }, step.info.error) : null);
}

function groupView(run, steps, scale, view) {
  const place = el("div");
  let shown = steps.find((step) => step.selected && !step.info.error) || steps[0];
  const chips = el("div", { class: "branches", role: "group", "aria-label": "branches" });
  const draw = () => {
    place.replaceChildren(branchView(run, shown, scale, view.tint));
    if (steps.length < 2) return;
    chips.replaceChildren(...steps.map((step) => el("button", {
      type: "button", class: "branch" + (step.selected ? " selected" : ""), "data-branch": step.branch,
      "aria-pressed": String(step === shown), title: whySelected(step),
      onclick: () => { shown = step; draw(); },
    }, el("b", {}, !step.selected ? "" : step.info.selected_by === "draw" ? "⚄ " : "★ ", `branch ${step.branch}`), status(step),
    step.reward === null ? null : el("span", {}, number(step.reward, 3)),
    step.advantage === null ? null : el("span", { class: signOf(step.advantage) }, signed(step.advantage, 2)))));
  };
  draw();
  view.redraw.push(draw);
  return el("div", { class: "group" }, steps.length > 1 ? chips : status(shown), place);
}

// ---- one episode ---------------------------------------------------------------------------------------------------
function boardView(run, episode, scale, view) {
  const seats = [...new Set(episode.steps.map(seatOf))];
  const turns = [...new Set(episode.steps.map((step) => step.turn))].sort((a, b) => a - b);
  const cell = (turn, seat) => groupsOf(episode.steps.filter((step) => step.turn === turn && seatOf(step) === seat))
    .map((group) => groupView(run, group, scale, view));
  return el("div", { class: "scroll" }, el("table", { class: "board" },
    el("thead", {}, el("tr", {}, el("th", {}), seats.map((seat) =>
      el("th", {}, seat, seat === JUDGE ? el("span", { class: "badge" }, "never trained") : null)))),
    el("tbody", {}, turns.map((turn) => el("tr", {}, el("th", {}, `turn ${turn}`),
      seats.map((seat) => el("td", {}, cell(turn, seat))))))));
}

function fold(title, value) {
  if (value === null || value === undefined || (typeof value === "object" && !Object.keys(value).length)) return null;
  const text = typeof value === "string" ? value : JSON.stringify(value, null, 1);
  return el("details", {}, el("summary", {}, title), el("pre", {}, text));
}

// Whose sub-agent an episode is, and the call after which it was opened.
function openedBy({ meta }) {
  const child = meta && meta.child;
  if (!child) return "";
  const [actor, call] = child.after || [];
  return ` · sub-agent of ${child.parent}, as ${child.actor}` + (child.after ? `, after call ${call} of ${actor}` : ", before any call")
    + (child.inherits ? ", with its reward" : "");
}

function episodeView(run, episode, view, depth = 0) {
  const scale = scaleOf(walk(episode).flatMap((part) => part.steps));
  const measured = Object.entries(episode.metrics || {}).map(([name, value]) => [name, number(value)]);
  return el("article", { class: "episode", "data-id": episode.id },
    el(depth ? "h3" : "h2", {}, episode.id, " ", el("span", { class: "type" }, episode.episode_type),
      episode.error ? el("span", { class: "badge bad" }, "failed") : null,
      episode.trainable ? null : el("span", { class: "badge" }, "not trained on")),
    el("p", { class: "summary" }, depth ? "" : `step ${episode.step} · `, rewardsOf(episode) || "no rewards", ` · seed ${episode.seed}`,
      openedBy(episode)),
    episode.error ? el("pre", { class: "error" }, episode.error) : null,
    el("div", { class: "folds" }, fold("artifact", episode.artifact), measured.length
      ? el("details", {}, el("summary", {}, "metrics"), rows(measured)) : null, fold("extras", episode.extras), fold("meta", episode.meta)),
    episode.steps.length ? boardView(run, episode, scale, view) : el("p", { class: "empty" }, "No model call was recorded."),
    episode.children.length ? el("details", { class: "children", open: episode.children.length < 4 },
      el("summary", {}, `${episode.children.length} nested episode${episode.children.length === 1 ? "" : "s"}`),
      episode.children.map((child) => episodeView(run, child, view, depth + 1))) : null);
}

function entry(episode, index, open) {
  const nested = walk(episode).length - 1;
  return el("button", { type: "button", class: "entry", "data-index": index, onclick: () => open(index) },
    el("span", { class: "line" }, el("b", {}, `step ${episode.step}`), ` ${episode.id}`,
      episode.error ? el("span", { class: "badge bad" }, "failed") : null),
    el("span", { class: "line dim" }, rewardsOf(episode) || episode.episode_type, nested ? ` · ${nested} nested` : ""));
}

function episodesTab(run, first) {
  const episodes = run.episodes;
  if (!episodes.length) return el("p", { class: "empty" }, "No episode has been recorded yet: log.rollouts_per_step says how many are.");
  const view = { tint: "advantage", redraw: [] };
  const stage = el("div", { class: "stage" });
  const list = el("div", { class: "list" });
  const open = (index) => {
    view.redraw = [];
    stage.replaceChildren(episodeView(run, episodes[index], view));
    for (const one of list.children) one.setAttribute("aria-current", String(one.dataset.index === String(index)));
    history.replaceState(null, "", `#episodes/${index}`);
  };
  const fillList = (text) => list.replaceChildren(...episodes.map((episode, index) => [episode, index]).reverse()
    .filter(([episode]) => `step ${episode.step} ${episode.id} ${episode.episode_type} ${episode.error ? "failed" : ""}`.includes(text))
    .map(([episode, index]) => entry(episode, index, open)));
  fillList("");
  open(first in episodes ? first : episodes.length - 1);
  const tint = el("label", {}, "tint tokens by ", el("select", {
    id: "tint", onchange: (event) => { view.tint = event.target.value; view.redraw.forEach((draw) => draw()); },
  }, Object.keys(TINTS).map((name) => el("option", {}, name))));
  const left = run.recorded - episodes.length;
  return el("section", { class: "episodes" },
    el("aside", {}, el("input", { type: "search", placeholder: "Filter: failed, step 12 …", "aria-label": "Filter episodes",
      oninput: (event) => fillList(event.target.value.trim()) }),
      left ? el("p", { class: "note" }, `${episodes.length} of ${run.recorded} recorded episodes: the newest, and others evenly `
        + "over the run; rollouts.jsonl has all.") : null, list),
    el("div", { class: "detail" }, el("div", { class: "toolbar" }, tint), stage));
}
