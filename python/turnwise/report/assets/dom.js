"use strict";
// Text of a run enters the page as text nodes alone: nothing here reads HTML out of a string.

const SVG = "http://www.w3.org/2000/svg";
// Okabe and Ito's colours, which the colour-blind tell apart, a little darker for thin lines.
const PALETTE = ["#2a86c7", "#d55e00", "#009e73", "#cc79a7", "#b8860b", "#3a9bd9", "#7a5cc7", "#8a8a8a"];

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "style") Object.assign(node.style, value);
    else node.setAttribute(name, value === true ? "" : value);
  }
  for (const child of children.flat(Infinity)) {
    if (child !== null && child !== undefined && child !== false) node.append(child);
  }
  return node;
}

function el(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

function svg(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

// At most `digits` significant digits, and no exponent where a plain number is short.
function number(value, digits = 4) {
  if (value === null || value === undefined) return "–";
  if (typeof value !== "number") return String(value);
  if (Number.isInteger(value)) return Math.abs(value) < 1e7 ? value.toLocaleString("en") : value.toPrecision(digits);
  const size = Math.abs(value);
  return size >= 1e-3 && size < 1e6 ? String(Number(value.toPrecision(digits))) : value.toExponential(2);
}

function signed(value, digits = 4) {
  return typeof value === "number" && value > 0 ? "+" + number(value, digits) : number(value, digits);
}

function showTip(event, ...content) {
  const tip = document.getElementById("tip");
  tip.replaceChildren(...content.flat(Infinity));
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  const left = Math.min(event.clientX + 14, window.innerWidth - box.width - 8);
  const below = event.clientY + 18;
  const top = below + box.height > window.innerHeight ? event.clientY - box.height - 12 : below;
  tip.style.left = Math.max(4, left) + "px";
  tip.style.top = Math.max(4, top) + "px";
}

function hideTip() {
  document.getElementById("tip").hidden = true;
}

function rows(pairs) {
  return el("table", { class: "pairs" },
    pairs.map(([name, value]) => el("tr", {}, el("th", {}, name), el("td", {}, value))));
}
