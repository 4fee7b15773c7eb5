// A completion token by token: tinted by advantage, log-probability or policy version, with all of them on hover.

const TINTS = {
  advantage: (token, scale) => {
    if (!token.advantage) return "transparent";
    const share = Math.min(1, Math.abs(token.advantage) / scale.advantage);
    return `color-mix(in srgb, var(${token.advantage < 0 ? "--bad" : "--good"}) ${Math.round(8 + 42 * share)}%, transparent)`;
  },
  "log-probability": (token) =>
    typeof token.logprob !== "number" ? "transparent"
      : `color-mix(in srgb, var(--warm) ${Math.round(60 * Math.min(1, -token.logprob / 4))}%, transparent)`,
  version: (token, scale) =>
    `color-mix(in srgb, ${PALETTE[Math.max(0, scale.versions.indexOf(token.version)) % PALETTE.length]} 25%, transparent)`,
  none: () => "transparent",
};

function tokensOf(step) {
  const versions = step.versions.flatMap(([count, version]) => Array(count).fill(version));
  return step.tokens.map((text, index) => ({
    text, id: step.ids[index], logprob: step.logprobs[index], version: versions[index], advantage: step.advantage,
  }));
}

function scaleOf(steps) {
  const sizes = steps.map((step) => Math.abs(step.advantage || 0));
  const versions = steps.flatMap((step) => step.versions.map(([, version]) => version));
  return { advantage: Math.max(0, ...sizes), versions: [...new Set(versions)].sort((a, b) => a - b) };
}

function tokenTip(token) {
  const chance = typeof token.logprob === "number" ? ` (p = ${number(Math.exp(token.logprob))})` : "";
  return [el("div", { class: "tip-title mono" }, JSON.stringify(token.text)), rows([
    ["token id", String(token.id)],
    ["advantage", token.advantage === null ? "none: not trained on" : signed(token.advantage)],
    ["log-prob", number(token.logprob) + chance],
    ["policy version", String(token.version)]])];
}

function completion(step, scale, tint) {
  const spans = tokensOf(step).map((token) => {
    const span = el("span", { class: "token", style: { background: TINTS[tint](token, scale) } }, token.text || "\u200b");
    span.addEventListener("pointermove", (event) => showTip(event, tokenTip(token)));
    span.addEventListener("pointerleave", hideTip);
    return span;
  });
  return el("div", { class: "completion mono" }, spans.length ? spans : step.text);
}
