// The tab of processes: a lane for the loop, with the parts of its steps, and one for each process of the cluster.

const LANE = { width: 1100, left: 150, right: 16, top: 6, height: 24, axis: 24 };
const PARTS = ["rollout", "update", "sync"];
// From an event to the class and the shape of its mark.
const MARKS = { died: ["died", "cross"], restarted: ["restarted", "up"], started: ["came", "up"],
  ended: ["left", "down"] };
const WINDOWS = [["all", null], ["100 newest steps", 100], ["10 newest steps", 10]];

// "2 h 5 min", of times as long as `whole` seconds: no more digits than the picture shows.
function clock(seconds, whole) {
  if (whole < 300) return number(seconds, 3) + " s";
  const minutes = Math.round(seconds / 60);
  return minutes < 60 ? minutes + " min" : Math.floor(minutes / 60) + " h" + (minutes % 60 ? ` ${minutes % 60} min` : "");
}

// Ticks at whole seconds, minutes or hours.
function clockTicks(low, high) {
  const unit = high - low < 300 ? 1 : high - low < 4 * 3600 ? 60 : 3600;
  return ticks(low / unit, high / unit, 8).map((at) => at * unit);
}

function moment(lanes, at) {
  return new Date(1000 * (lanes.start + at)).toISOString().slice(0, 19).replace("T", " ") + " UTC";
}

function tipOf(title, pairs) {
  return { onpointermove: (event) => showTip(event, el("div", { class: "tip-title" }, title), rows(pairs)), onpointerleave: hideTip };
}

function markOf(shape, x, y) {
  const points = { cross: [[-5, -3], [-3, -5], [0, -2], [3, -5], [5, -3], [2, 0], [5, 3], [3, 5], [0, 2], [-3, 5], [-5, 3], [-2, 0]],
    up: [[0, -5], [5, 4], [-5, 4]], down: [[0, 5], [5, -4], [-5, -4]] }[shape];
  return points.map(([dx, dy]) => `${(x + dx).toFixed(1)},${y + dy}`).join(" ");
}

function stepBars(lanes, inside, toX, y) {
  const bars = [];
  for (const [step, begin, ...seconds] of lanes.steps) {
    let at = begin;
    seconds.forEach((length, place) => {
      const from = at;
      at += length;
      if (!length || !inside(from, at)) return;
      bars.push(svg("rect", { class: "part", "data-step": step, "data-part": PARTS[place], x: toX(from).toFixed(2), y: y + 4, height: LANE.height - 8,
        width: Math.max(toX(at) - toX(from), 0.5).toFixed(2), style: { fill: PALETTE[place] },
        ...tipOf(`step ${step}: ${PARTS[place]}`, [["seconds", number(length)], ["began", moment(lanes, from)]]) }));
    });
  }
  return bars;
}

function roleLane(lanes, role, inside, toX, y, whole) {
  const bars = role.spans.filter(([from, to]) => inside(from, to)).map(([from, to, node]) =>
    svg("rect", { class: "ran", x: toX(from).toFixed(2), y: y + 7, width: Math.max(toX(to) - toX(from), 0.5).toFixed(2), height: LANE.height - 14,
      ...tipOf(role.name, [["node", node || "–"], ["from", moment(lanes, from)], ["for", clock(to - from, whole)]]) }));
  const marks = role.events.filter(([at, event]) => event in MARKS && inside(at, at)).map(([at, event, detail]) =>
    svg("polygon", { class: "mark " + MARKS[event][0], "data-event": event, points: markOf(MARKS[event][1], toX(at), y + LANE.height / 2),
      ...tipOf(`${role.name} ${event}`, [["at", moment(lanes, at)], ...(detail ? [["detail", detail]] : [])]) }));
  return [bars, marks];
}

function lanesPicture(lanes, newest) {
  const begin = newest && lanes.steps.length ? lanes.steps[Math.max(lanes.steps.length - newest, 0)][1] : 0;
  const end = Math.max(lanes.end - lanes.start, begin + 1e-3);
  const drawn = [["loop", null], ...lanes.roles.map((role) => [role.name, role])];
  const bottom = LANE.top + drawn.length * LANE.height;
  const toX = (at) => LANE.left + ((Math.max(at, begin) - begin) / (end - begin)) * (LANE.width - LANE.left - LANE.right);
  const inside = (from, to) => to >= begin && from <= end;
  const times = clockTicks(begin, end).map((at) => [
    svg("line", { class: "grid", x1: toX(at), x2: toX(at), y1: LANE.top, y2: bottom }),
    svg("text", { x: toX(at), y: bottom + 16, "text-anchor": "middle" }, clock(at, end - begin))]);
  const shown = drawn.map(([name, role], place) => {
    const y = LANE.top + place * LANE.height;
    return svg("g", { class: "lane", "data-role": name },
      svg("text", { x: LANE.left - 10, y: y + LANE.height / 2 + 4, "text-anchor": "end" }, name.length > 20 ? name.slice(0, 19) + "…" : name, svg("title", {}, name)),
      role ? roleLane(lanes, role, inside, toX, y, end - begin) : stepBars(lanes, inside, toX, y));
  });
  return svg("svg", { viewBox: `0 0 ${LANE.width} ${bottom + LANE.axis}`, role: "img", "aria-label": "Processes of the run over time" },
    svg("g", { class: "axes" }, times), shown);
}

function lanesTab(lanes) {
  const place = el("div", { class: "lanes" });
  const draw = (newest) => place.replaceChildren(lanesPicture(lanes, newest));
  const legendOf = (node, label) => el("span", {}, node, " ", label);
  const shape = (event) => svg("svg", { width: 12, height: 12, viewBox: "-6 -6 12 12", style: { verticalAlign: "-1px" } },
    svg("polygon", { class: "mark " + MARKS[event][0], points: markOf(MARKS[event][1], 0, 0) }));
  draw(null);
  return el("section", { class: "processes" },
    el("div", { class: "toolbar" },
      el("label", {}, "show ", el("select", { "aria-label": "Time shown", onchange: (event) => draw(WINDOWS[event.target.value][1]) },
        WINDOWS.map(([label], index) => el("option", { value: index }, label)))),
      el("span", { class: "legend lanes-legend" },
        PARTS.map((part, index) => legendOf(el("i", { class: "dot", style: { background: PALETTE[index] } }), part)),
        legendOf(shape("started"), "started"), legendOf(shape("restarted"), "restarted"), legendOf(shape("died"), "died"),
        legendOf(shape("ended"), "ended"))),
    el("p", { class: "note" }, `Time since ${moment(lanes, 0)}. The loop's gaps are validation, checkpoints and logs.`
      + (lanes.left_out ? ` The loop's lane shows the newest ${lanes.steps.length} steps; ${lanes.left_out} earlier ones are left out.` : "")),
    place);
}
