// One chart: lines over a common x, with ticks, a legend, and the values under the pointer.

const BOX = { width: 420, height: 190, left: 48, right: 10, top: 8, bottom: 24 };

function ticks(low, high, wanted) {
  const rough = (high - low) / wanted;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= rough) || rough;
  const found = [];
  for (let at = Math.ceil(low / step) * step; at <= high + step * 1e-9; at += step) found.push(Number(at.toPrecision(12)));
  return found;
}

function range(values) {
  let low = Math.min(...values), high = Math.max(...values);
  if (low === high) {
    const margin = Math.abs(low) * 0.1;
    return margin ? [low - margin, high + margin] : [-0.05, 1];
  }
  const margin = (high - low) * 0.05;
  return [low - margin, high + margin];
}

function short(value) {
  const size = Math.abs(value);
  if (size >= 1e6) return Number((value / 1e6).toPrecision(3)) + "M";
  if (size >= 1e4) return Number((value / 1e3).toPrecision(3)) + "k";
  return number(value);
}

// An exponential mean, as TensorBoard's: `weight` of what was, the bias of the start taken out.
function smooth(points, weight) {
  let mean = 0, total = 0;
  return points.map(([x, y]) => {
    mean = mean * weight + y * (1 - weight);
    total = total * weight + (1 - weight);
    return [x, mean / total];
  });
}

function pointsOf(line, xs) {
  return line.values.map((y, index) => [xs[index], y]).filter(([x, y]) => y !== null && x !== null && x !== undefined);
}

function path(points, toX, toY) {
  return points.map(([x, y], index) => `${index ? "L" : "M"}${toX(x).toFixed(1)},${toY(y).toFixed(1)}`).join("");
}

function chart(title, lines, xs, smoothing) {
  const drawn = lines.map((line) => ({ ...line, points: pointsOf(line, xs) })).filter((line) => line.points.length);
  const everything = drawn.flatMap((line) => line.points);
  const [left, right] = spanOf(everything.map(([x]) => x));
  const [low, high] = range(everything.map(([, y]) => y));
  const toX = (x) => BOX.left + ((x - left) / (right - left || 1)) * (BOX.width - BOX.left - BOX.right);
  const toY = (y) => BOX.height - BOX.bottom - ((y - low) / (high - low)) * (BOX.height - BOX.top - BOX.bottom);
  const guide = svg("line", { class: "guide", y1: BOX.top, y2: BOX.height - BOX.bottom, visibility: "hidden" });
  const picture = svg("svg", { viewBox: `0 0 ${BOX.width} ${BOX.height}`, role: "img", "aria-label": title },
    axes(left, right, low, high, toX, toY), drawn.map((line) => curve(line, toX, toY, smoothing)), guide);
  picture.addEventListener("pointermove", (event) => {
    const place = picture.getBoundingClientRect();
    const at = ((event.clientX - place.left) / place.width) * BOX.width;
    const near = everything.reduce((best, [x]) => (Math.abs(toX(x) - at) < Math.abs(toX(best) - at) ? x : best), left);
    fill(guide, { x1: toX(near), x2: toX(near), visibility: "visible" }, []);
    showTip(event, el("div", { class: "tip-title" }, xs.name + " " + number(near)), rows(drawn.map((line) =>
      [[el("i", { class: "dot", style: { background: line.color } }), line.label], number(valueAt(line.points, near))])));
  });
  picture.addEventListener("pointerleave", () => { guide.setAttribute("visibility", "hidden"); hideTip(); });
  return el("figure", { class: "chart", "data-family": title }, el("figcaption", {}, el("b", {}, title), legend(drawn)), picture);
}

function spanOf(values) {
  return [Math.min(...values), Math.max(...values)];
}

// The last value at or before x: metrics such as validation are not measured at every step.
function valueAt(points, x) {
  const before = points.filter(([at]) => at <= x);
  return before.length ? before[before.length - 1][1] : null;
}

function legend(lines) {
  const last = (line) => el("span", { class: "last" }, number(line.points[line.points.length - 1][1]));
  if (lines.length === 1) return last(lines[0]);
  return el("span", { class: "legend" },
    lines.map((line) => el("span", {}, el("i", { class: "dot", style: { background: line.color } }), line.label, " ", last(line))));
}

function axes(left, right, low, high, toX, toY) {
  const across = (right > left ? ticks(left, right, 5) : [left]).map((x) =>
    svg("text", { x: toX(x), y: BOX.height - 7, "text-anchor": "middle" }, short(x)));
  const up = ticks(low, high, 5).map((y) => [
    svg("line", { class: "grid", x1: BOX.left, x2: BOX.width - BOX.right, y1: toY(y), y2: toY(y) }),
    svg("text", { x: BOX.left - 6, y: toY(y) + 3.5, "text-anchor": "end" }, short(y))]);
  return svg("g", { class: "axes" }, up, across);
}

function curve(line, toX, toY, smoothing) {
  const style = { stroke: line.color };
  const raw = svg("path", { class: smoothing ? "line faint" : "line", d: path(line.points, toX, toY), style });
  const mean = smoothing ? svg("path", { class: "line", d: path(smooth(line.points, smoothing), toX, toY), style }) : null;
  const dots = line.points.length > 40 || smoothing ? [] : line.points.map(([x, y]) =>
    svg("circle", { cx: toX(x), cy: toY(y), r: 2.2, style: { fill: line.color } }));
  return svg("g", {}, raw, mean, dots);
}
