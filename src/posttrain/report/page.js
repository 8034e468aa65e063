// The report page. Everything shown comes from the JSON in #data and reaches the page as text: no HTML is ever made from it.
"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const byId = (id) => document.getElementById(id);

  // Curves in the order they are shown; a chart whose metrics were not logged is left out.
  const CHARTS = [
    { title: "Reward", unit: "mean of a step", lines: [["reward/mean", "reward"]] },
    { title: "Held-out accuracy", unit: "share right", match: /^validation\/(.+)\/accuracy$/, dots: true },
    { title: "Response length", unit: "tokens", lines: [["response/length_mean", "mean"]] },
    { title: "KL to the reference", unit: "nats per token", lines: [["reference/kl", "KL"]] },
    { title: "KL within the step", unit: "nats per token", lines: [["policy/kl_old", "KL"]] },
    { title: "Entropy", unit: "nats per token", lines: [["policy/entropy", "entropy"]] },
    { title: "Sampler–trainer gap", unit: "nats per token", lines: [["gap/mean", "mean"]] },
    { title: "Gradient norm", unit: "before clipping", lines: [["policy/grad_norm", "norm"]] },
    { title: "Speed", unit: "tokens/s", lines: [["speed/rollout_tokens_per_s", "rollout"], ["speed/update_tokens_per_s", "update"]] },
  ];
  const PHASES = ["rollout", "reward", "logprobs", "update", "weight_sync", "validation"];
  const ROWS_AT_ONCE = 50;

  // ---- Making elements ------------------------------------------------------------------------------------------
  function el(tag, props, ...children) {
    const node = document.createElement(tag);
    for (const [name, value] of Object.entries(props || {})) {
      if (name === "class") node.className = value;
      else if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
      else node.setAttribute(name, value);
    }
    node.append(...children.filter((child) => child !== null && child !== undefined));
    return node;
  }
  function svg(tag, attributes, text) {
    const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [name, value] of Object.entries(attributes || {})) node.setAttribute(name, value);
    if (text !== undefined) node.textContent = text;
    return node;
  }

  // Control, direction and invisible characters, each written as the escape that Python would print for it.
  // Kept as they are: tab, newline, and the zero-width joiners that scripts and emoji need.
  const HIDDEN = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb]|[\ud800-\udbff](?![\udc00-\udfff])|(?<![\ud800-\udbff])[\udc00-\udfff]|\udb40[\udc00-\udc7f]/g;
  function seen(match) {
    const code = match.codePointAt(0);
    const hex = code.toString(16);
    return code < 0x100 ? `\\x${hex.padStart(2, "0")}` : code < 0x10000 ? `\\u${hex.padStart(4, "0")}` : `\\U${hex.padStart(8, "0")}`;
  }
  const visible = (text) => String(text).replace(HIDDEN, seen);
  function visibleNodes(text) {
    const nodes = [];
    let from = 0;
    for (const match of text.matchAll(HIDDEN)) {
      if (match.index > from) nodes.push(text.slice(from, match.index));
      nodes.push(el("span", { class: "control" }, seen(match[0])));
      from = match.index + match[0].length;
    }
    nodes.push(text.slice(from));
    return nodes;
  }

  // ---- Numbers as text ------------------------------------------------------------------------------------------
  function short(value) {
    if (typeof value !== "number") return value === null || value === undefined ? "–" : String(value);
    const size = Math.abs(value);
    if (size >= 1e6 || (size > 0 && size < 1e-4)) return Number(value.toPrecision(3)).toExponential();
    if (size >= 100) return Math.round(value).toLocaleString("en-US");
    return String(Number(value.toPrecision(3)));
  }
  function seconds(value) {
    if (value < 10) return `${value.toFixed(value < 1 ? 2 : 1)} s`;
    if (value < 90) return `${Math.round(value)} s`;
    const minutes = Math.floor(Math.round(value) / 60);
    if (minutes < 90) return `${minutes} min ${Math.round(value) % 60} s`;
    return `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
  }
  const known = (values) => values.filter((value) => typeof value === "number");
  const sum = (values) => known(values).reduce((total, value) => total + value, 0);

  // The 1, 2 or 5 times a power of ten that cuts a span into at most count parts.
  function tickSize(span, count) {
    const power = 10 ** Math.floor(Math.log10(span / count));
    return [1, 2, 5, 10].map((factor) => factor * power).find((size) => span / size <= count + 1e-9);
  }
  function ticks(low, high, size) {
    const result = [];
    for (let i = Math.ceil(low / size - 1e-9); i * size <= high + size * 1e-9; i++) result.push(Number((i * size).toPrecision(12)));
    return result;
  }
  // Lower end, upper end and tick distance of an axis; it starts at 0 unless that would press the curve flat.
  function axis(values) {
    let low = Math.min(...values), high = Math.max(...values);
    if (low >= 0 && low < 0.5 * high) low = 0;
    if (low === high) { const pad = Math.abs(low) * 0.1 || 1; high += pad; if (low !== 0) low -= pad; }
    const size = tickSize(high - low, 5);
    return [Math.floor(low / size + 1e-9) * size, Math.ceil(high / size - 1e-9) * size, size];
  }
  // Centred mean over about a fifteenth of the run: follows the curve without lagging behind it.
  function smooth(points) {
    const half = Math.round(points.length / 30);
    return points.map(([step], i) => {
      const window = points.slice(Math.max(0, i - half), i + half + 1);
      return [step, window.reduce((total, point) => total + point[1], 0) / window.length];
    });
  }

  // ---- Charts ---------------------------------------------------------------------------------------------------
  const HEIGHT = 170, LEFT = 46, RIGHT = 10, TOP = 8, BOTTOM = 22;
  const charts = [];  // each: draw(), mark(step)

  function frame(figure, height, label) {
    const width = Math.max(240, figure.clientWidth - 28);
    const root = svg("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img", tabindex: "0", "aria-label": label });
    return { root, width };
  }
  // Grid and labels; without x, the steps are left to the caller.
  function axes(root, width, height, x, y, stepRange, valueRange) {
    for (const value of ticks(...valueRange)) {
      root.append(svg("line", { class: "grid", x1: LEFT, x2: width - RIGHT, y1: y(value), y2: y(value) }));
      root.append(svg("text", { x: LEFT - 6, y: y(value) + 4, "text-anchor": "end" }, short(value)));
    }
    for (const step of x ? stepTicks(stepRange, width) : []) {
      root.append(svg("text", { x: x(step), y: height - 5, "text-anchor": "middle" }, String(step)));
    }
  }
  function stepTicks([first, last], width) {
    return ticks(first, last, Math.max(1, tickSize(Math.max(1, last - first), Math.max(2, Math.floor(width / 70)))));
  }
  // One cursor for all charts: pointing at a step in one shows that step in every one.
  function follow(root, stepAt, steps) {
    const show = (step) => charts.forEach((chart) => chart.mark(step));
    root.addEventListener("pointermove", (event) => {
      const box = root.getBoundingClientRect();
      show(stepAt((event.clientX - box.left) * (root.viewBox.baseVal.width / box.width)));
    });
    root.addEventListener("pointerleave", (event) => { if (event.pointerType === "mouse") show(null); });
    root.addEventListener("blur", () => show(null));
    let at = steps.length - 1;
    root.addEventListener("keydown", (event) => {
      const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (!move) return;
      event.preventDefault();
      at = Math.min(steps.length - 1, Math.max(0, at + move));
      show(steps[at]);
    });
  }
  const nearest = (steps, wanted) => steps.reduce((best, step) => (Math.abs(step - wanted) < Math.abs(best - wanted) ? step : best), steps[0]);

  function lineChart(spec, parent) {
    const lines = (spec.match
      ? Object.keys(data.series).filter((name) => spec.match.test(name)).map((name) => [name, visible(spec.match.exec(name)[1])])
      : spec.lines
    ).filter(([name]) => name in data.series).slice(0, 8).map(([name, label], index) => ({
      name, label, color: index + 1,
      points: data.steps.map((step, i) => [step, data.series[name][i]]).filter((point) => typeof point[1] === "number"),
    }));
    const lost = lines.flatMap((line) => data.nonfinite[line.name] || []);
    if (!lines.some((line) => line.points.length) && !lost.length) return false;

    const value = el("span", { class: "value" });
    const caption = el("figcaption", {}, el("span", { class: "title" }, spec.title + " ", el("span", { class: "unit" }, spec.unit || "")), value);
    for (const line of lines) line.value = el("span", {});
    if (lines.length > 1) caption.append(el("span", { class: "legend" }, ...lines.map((line) => el("span", {}, el("i", { class: `f${line.color}` }), line.label + " ", line.value))));
    if (lost.length) caption.append(el("span", { class: "alarm" }, `not finite at step ${lost.slice(0, 5).join(", ")}${lost.length > 5 ? ", …" : ""}`));
    const figure = el("figure", { class: "chart card" }, caption);
    parent.append(figure);

    const steps = [...new Set(lines.flatMap((line) => line.points.map((point) => point[0])))].sort((a, b) => a - b);
    const valueAt = (line, step) => (line.points.find((point) => point[0] === step) || [])[1];
    let root = null, x = null, y = null, marks = null;

    function draw() {
      if (root) root.remove();
      if (!steps.length) return;
      const made = frame(figure, HEIGHT, `${spec.title}, ${spec.unit || ""}, from step ${steps[0]} to ${steps.at(-1)}`);
      root = made.root;
      const stepRange = [data.steps[0], data.steps.at(-1)];
      const valueRange = axis(lines.flatMap((line) => line.points.map((point) => point[1])));
      x = (step) => LEFT + ((step - stepRange[0]) / Math.max(1, stepRange[1] - stepRange[0])) * (made.width - LEFT - RIGHT);
      y = (amount) => HEIGHT - BOTTOM - ((amount - valueRange[0]) / (valueRange[1] - valueRange[0])) * (HEIGHT - TOP - BOTTOM);
      axes(root, made.width, HEIGHT, x, y, stepRange, valueRange);
      const path = (points) => points.map((point, i) => `${i ? "L" : "M"}${x(point[0]).toFixed(1)} ${y(point[1]).toFixed(1)}`).join("");
      for (const line of lines) {
        const smoothed = !spec.dots && line.points.length >= 15;
        if (smoothed) root.append(svg("path", { class: `raw ${line.points.length > 300 ? "dense " : ""}s${line.color}`, d: path(line.points) }));
        root.append(svg("path", { class: `line s${line.color}`, d: path(smoothed ? smooth(line.points) : line.points) }));
        if (spec.dots || line.points.length < 15) for (const point of line.points) root.append(svg("circle", { class: `f${line.color}`, cx: x(point[0]), cy: y(point[1]), r: 3 }));
      }
      marks = svg("g");
      root.append(marks);
      follow(root, (at) => nearest(steps, stepRange[0] + ((at - LEFT) / (made.width - LEFT - RIGHT)) * (stepRange[1] - stepRange[0])), steps);
      figure.append(root);
      mark(null);
    }
    function mark(step) {
      if (!marks) return;
      marks.replaceChildren();
      const at = step === null ? null : spec.dots ? nearest(steps, step) : step;
      const rows = lines.map((line) => [line, at === null ? (line.points.at(-1) || [])[1] : valueAt(line, at)]).filter((row) => row[1] !== undefined);
      for (const line of lines) line.value.textContent = "";
      for (const [line, amount] of rows) line.value.textContent = short(amount);
      const single = lines.length === 1 && rows.length ? short(rows[0][1]) : "";
      value.textContent = at === null ? single : `${single} at step ${at}`;
      if (at === null) return;
      marks.append(svg("line", { class: "cursor", x1: x(at), x2: x(at), y1: TOP, y2: HEIGHT - BOTTOM }));
      for (const [line, amount] of rows) marks.append(svg("circle", { class: `f${line.color}`, cx: x(at), cy: y(amount), r: 4 }));
    }
    charts.push({ draw, mark });
    draw();
    return true;
  }

  // ---- Time -----------------------------------------------------------------------------------------------------
  // Seconds of each phase, step by step; what a step took beyond its phases is "other".
  function phaseRows() {
    const names = PHASES.filter((phase) => `time/${phase}_s` in data.series);
    const rows = names.map((name) => ({ name: name.replace("_", " "), values: data.series[`time/${name}_s`] }));
    const whole = data.series["time/step_s"];
    if (whole) {
      const rest = whole.map((total, i) => (typeof total === "number" ? Math.max(0, total - sum(rows.map((row) => row.values[i]))) : null));
      if (sum(rest) > 0.005 * sum(whole)) rows.push({ name: "other", values: rest });
    }
    rows.forEach((row, i) => { row.color = i + 1; row.total = sum(row.values); });
    return rows;
  }
  function timeSection(rows) {
    if (!rows.length) return;
    byId("time").hidden = false;
    const all = sum(rows.map((row) => row.total));
    const stepsTimed = data.steps.filter((step) => step >= 1).length || 1;

    const table = el("table", {}, el("thead", {}, el("tr", {}, el("th", {}, "Phase"), el("th", { class: "num" }, "Total"), el("th", { class: "num" }, "Per step"), el("th", { class: "num" }, "Share"))));
    const body = el("tbody");
    for (const row of rows) body.append(el("tr", {}, el("td", {}, el("i", { class: `f${row.color}` }), row.name), el("td", { class: "num" }, seconds(row.total)), el("td", { class: "num" }, seconds(row.total / stepsTimed)), el("td", { class: "num" }, `${((100 * row.total) / all || 0).toFixed(1)} %`)));
    body.append(el("tr", {}, el("td", {}, "all"), el("td", { class: "num" }, seconds(all)), el("td", { class: "num" }, seconds(all / stepsTimed)), el("td", { class: "num" }, "")));
    table.append(body);
    byId("time-table").append(table);

    const figure = byId("time-chart");
    const value = el("span", { class: "value" });
    let root = null, marks = null, bars = [], x = null, barWidth = 0;
    figure.append(el("figcaption", {}, el("span", { class: "title" }, "Seconds per step"), value));
    function draw() {
      if (root) root.remove();
      const height = 220;
      const made = frame(figure, height, "Seconds of each phase, step by step");
      root = made.root;
      // As many bars as there is room for; each is the mean of its steps.
      const per = Math.max(1, Math.ceil(data.steps.length / Math.floor((made.width - LEFT - RIGHT) / 4)));
      bars = [];
      for (let i = 0; i < data.steps.length; i += per) {
        const steps = data.steps.slice(i, i + per);
        bars.push({ steps, parts: rows.map((row) => sum(row.values.slice(i, i + per)) / steps.length) });
      }
      const range = axis([0, ...bars.map((bar) => sum(bar.parts))]);
      const slot = (made.width - LEFT - RIGHT) / bars.length;
      barWidth = Math.max(1, Math.min(28, slot * 0.8));
      x = (index) => LEFT + (index + 0.5) * slot;
      const y = (amount) => height - BOTTOM - (amount / range[1]) * (height - TOP - BOTTOM);
      axes(root, made.width, height, null, y, null, range);
      const labels = stepTicks([data.steps[0], data.steps.at(-1)], made.width);
      bars.forEach((bar, i) => {
        let base = 0;
        bar.parts.forEach((part, k) => {
          if (part <= 0) return;
          root.append(svg("rect", { class: `f${rows[k].color}`, x: x(i) - barWidth / 2, width: barWidth, y: y(base + part), height: Math.max(0, y(base) - y(base + part)) }));
          base += part;
        });
        for (const step of labels.filter((label) => bar.steps.includes(label))) root.append(svg("text", { x: x(i), y: height - 5, "text-anchor": "middle" }, String(step)));
      });
      marks = svg("g");
      root.append(marks);
      follow(root, (at) => bars[Math.min(bars.length - 1, Math.max(0, Math.floor((at - LEFT) / slot)))].steps[0], data.steps);
      figure.append(root);
      mark(null);
    }
    function mark(step) {
      marks.replaceChildren();
      const index = step === null ? -1 : bars.findIndex((bar) => bar.steps[0] <= step && step <= bar.steps.at(-1));
      if (index < 0) { value.textContent = ""; return; }
      const bar = bars[index];
      const big = bar.parts.map((part, k) => [part, rows[k].name]).filter(([part]) => part > 0).sort((a, b) => b[0] - a[0]).slice(0, 3);
      value.textContent = `step ${bar.steps.length > 1 ? `${bar.steps[0]}–${bar.steps.at(-1)}` : bar.steps[0]}: ${seconds(sum(bar.parts))} (${big.map(([part, name]) => `${name} ${seconds(part)}`).join(", ")})`;
      marks.append(svg("line", { class: "cursor", x1: x(index), x2: x(index), y1: TOP, y2: 220 - BOTTOM }));
    }
    charts.push({ draw, mark });
    draw();
  }

  // ---- Header ---------------------------------------------------------------------------------------------------
  function header(spent) {
    const info = data.info || {};
    const versions = info.versions && typeof info.versions === "object" ? Object.entries(info.versions).map(([name, version]) => `${name} ${version}`).join(", ") : "";
    const facts = [
      ["model", data.model],
      ["steps", info.total_steps ? `${data.steps_done} of ${info.total_steps}` : String(data.steps_done)],
      ["status", info.status], ["time", spent ? seconds(spent) : ""], ["device", info.device],
      ["started", String(info.started || "").replace("T", " ").replace(/\.\d+/, "")], ["versions", versions],
    ].filter(([, value]) => value !== undefined && value !== null && value !== "");
    byId("header").append(
      el("p", { class: "eyebrow" }, "posttrain run"),
      el("h1", {}, visible(data.name)),
      el("dl", { class: "facts" }, ...facts.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, visible(typeof value === "object" ? JSON.stringify(value) : value))))),
    );
    for (const { source, points } of data.headline) {
      if (!points.length) continue;
      const first = points[0], last = points.at(-1);
      const big = el("div", { class: "big" });
      if (points.length > 1) {
        const delta = Number(last.accuracy.toFixed(3)) - Number(first.accuracy.toFixed(3));
        big.append(el("span", { class: "from" }, first.accuracy.toFixed(3)), el("span", { class: "arrow" }, "→"), el("span", {}, last.accuracy.toFixed(3)),
          el("span", { class: `delta ${delta > 0 ? "up" : delta < 0 ? "down" : ""}` }, `${delta < 0 ? "−" : "+"}${Math.abs(delta).toFixed(3)}`));
      } else big.append(last.accuracy.toFixed(3));
      const over = last.prompts ? `${last.prompts} held-out prompt${last.prompts > 1 ? "s" : ""}, ` : "";
      const when = points.length > 1 ? `step ${first.step} → step ${last.step}` : `step ${last.step}`;
      const span = (point) => `${point.interval[0].toFixed(2)}–${point.interval[1].toFixed(2)}`;
      const sure = points.every((point) => point.interval) ? `95 % interval ${points.map(span).join(" → ")}` : "";
      byId("headline").append(el("div", { class: "card" }, el("h3", {}, `Held-out accuracy · ${visible(source)}`), big, el("div", { class: "hint" }, over + when), el("div", { class: "hint" }, sure)));
    }
    if (data.notes.length) {
      byId("notes").append(...data.notes.map((note) => el("p", {}, visible(note))));
      byId("notes").className = "card";
      byId("notes").hidden = false;
    }
  }

  function curves() {
    byId("curves").hidden = false;  // before drawing: a hidden chart has no width
    const shown = CHARTS.map((spec) => lineChart(spec, byId("charts"))).some(Boolean);
    const drawn = new Set(CHARTS.flatMap((spec) => (spec.lines || []).map((line) => line[0])));
    const others = Object.keys(data.series).filter((name) => !drawn.has(name) && !CHARTS.some((spec) => spec.match && spec.match.test(name)));
    byId("curves").hidden = !shown && !others.length;
    byId("curves-hint").textContent = data.steps.length >= 15 ? "Thin line: every step. Thick line: smoothed. Point at a chart to read a step in all of them." : "Point at a chart to read a step in all of them.";
    byId("more").hidden = !others.length;
    byId("more").addEventListener("toggle", () => others.forEach((name) => lineChart({ title: visible(name), lines: [[name, visible(name)]], dots: name.startsWith("validation/") }, byId("more-charts"))), { once: true });
  }

  // ---- Samples --------------------------------------------------------------------------------------------------
  function samples() {
    byId("left-out").textContent = data.left_out.join(" ");
    if (!data.samples.length) { byId("samples").hidden = !data.left_out.length; byId("controls").hidden = byId("table").hidden = true; return; }
    byId("samples").hidden = false;
    const key = (sample) => `${sample.kind} ${sample.step}`;
    const outcome = (sample) => (sample.invalid || typeof sample.reward !== "number" ? "invalid" : sample.reward >= 1 ? "right" : "wrong");
    const reward = (sample) => (typeof sample.reward === "number" ? sample.reward : null);
    const text = (value) => (typeof value === "string" ? value : value === null || value === undefined ? "" : JSON.stringify(value));

    // Prompts of a task open and end with the same words (system message, chat template); a row shows what differs.
    const prompts = [...new Set(data.samples.map((sample) => text(sample.prompt)))];
    let start = prompts.length > 1 ? prompts[0].length : 0, end = start;
    for (const prompt of prompts) while (!prompt.startsWith(prompts[0].slice(0, start))) start--;
    start = prompts[0].slice(0, start).search(/\S*$/);
    for (const prompt of prompts) while (!prompt.endsWith(prompts[0].slice(prompts[0].length - end)) || start + end > prompt.length) end--;
    function differing(prompt) {
      return (start ? "… " : "") + prompt.slice(start, prompt.length - end).slice(0, 300) + (end ? " …" : "");
    }

    const groups = new Map();
    for (const sample of data.samples) groups.set(key(sample), (groups.get(key(sample)) || 0) + 1);
    byId("pick").append(el("option", { value: "" }, `all on this page (${data.samples.length})`));
    const order = (kind) => [...groups.keys()].filter((name) => name.startsWith(kind)).sort((a, b) => Number(b.split(" ")[1]) - Number(a.split(" ")[1]));
    for (const kind of ["validation", "training"]) {
      const names = order(kind);
      if (!names.length) continue;
      byId("pick").append(el("optgroup", { label: kind }, ...names.map((name) => el("option", { value: name }, `${name.replace(" ", " step ")} (${groups.get(name)})`))));
    }
    byId("pick").value = order("validation")[0] || order("training")[0];

    let chosen = [], shown = 0;
    function choose() {
      const wanted = byId("pick").value, kind = byId("outcome").value, needle = byId("find").value.toLowerCase();
      chosen = data.samples.filter((sample) => (!wanted || key(sample) === wanted) && (kind === "all" || outcome(sample) === kind)
        && (!needle || ["prompt", "response", "ground_truth", "prompt_id", "sample_id", "data_source"].some((field) => text(sample[field]).toLowerCase().includes(needle))));
      const low = -Infinity;  // samples without a reward come last where the highest is first, first where the lowest is
      const by = { high: (a, b) => (reward(b) ?? low) - (reward(a) ?? low) || 0, low: (a, b) => (reward(a) ?? low) - (reward(b) ?? low) || 0, long: (a, b) => (b.response_tokens || 0) - (a.response_tokens || 0) }[byId("order").value];
      if (by) chosen.sort(by);
      const right = chosen.filter((sample) => outcome(sample) === "right").length;
      byId("count").textContent = `${chosen.length} sample${chosen.length === 1 ? "" : "s"}, ${right} right`;
      shown = 0;
      byId("rows").replaceChildren();
      more();
    }
    function more() {
      const next = chosen.slice(shown, shown + ROWS_AT_ONCE);
      byId("rows").append(...next.map(row));
      shown += next.length;
      if (!shown) byId("rows").append(el("tr", {}, el("td", { colspan: "6", class: "wide empty" }, "No sample fits.")));
      byId("show-more").hidden = shown >= chosen.length;
      byId("show-more").textContent = `Show more (${chosen.length - shown} left)`;
    }
    const excerpt = (value, long) => el("span", { class: long ? "excerpt long" : "excerpt", dir: "auto" }, visible(text(value).slice(0, 300).replace(/\s+/g, " ").trim()) || "(empty)");
    function badge(sample) {
      const kind = outcome(sample);
      return el("span", { class: `badge ${kind}` }, kind === "invalid" ? visible((sample.invalid && sample.invalid.reason) || "none") : short(sample.reward));
    }
    function row(sample) {
      const line = el("tr", { class: "row", tabindex: "0", "aria-expanded": "false" },
        el("td", { class: "inline" }, badge(sample)),
        el("td", { "data-label": "prompt" }, excerpt(differing(text(sample.prompt)), true)),
        el("td", { "data-label": "response" }, excerpt(sample.response, true)),
        el("td", { class: "inline", "data-label": "expected" }, excerpt(sample.ground_truth, false)),
        el("td", { class: "inline num", "data-label": "tokens" }, short(sample.response_tokens)),
        el("td", { class: "inline", "data-label": "step" }, `${sample.kind === "validation" ? "val " : ""}${sample.step}`));
      let opened = null;
      const toggle = () => {
        if (opened) { opened.remove(); opened = null; }
        else { opened = el("tr", {}, el("td", { colspan: "6", class: "wide" }, detail(sample))); line.after(opened); }
        line.setAttribute("aria-expanded", String(opened !== null));
      };
      line.addEventListener("click", toggle);
      line.addEventListener("keydown", (event) => { if (event.key === "Enter" || event.key === " ") { event.preventDefault(); toggle(); } });
      return line;
    }
    function detail(sample) {
      const block = (title, value) => [el("h4", {}, title), el("pre", { class: "text", dir: "auto", tabindex: "0" }, ...visibleNodes(text(value) || "(empty)"))];
      const terms = Object.entries(sample.reward_terms && typeof sample.reward_terms === "object" ? sample.reward_terms : {});
      const facts = [
        ["reward", short(reward(sample))], ...terms.map(([name, value]) => [`· ${visible(name)}`, short(value)]),
        ["advantage", sample.kind === "training" ? short(sample.advantage) : undefined],
        ["no reward because", sample.invalid ? visible(`${sample.invalid.reason ?? ""}: ${sample.invalid.detail ?? ""}`.slice(0, 2000)) : undefined],
        ["ended by", sample.stop_reason], ["tokens", sample.response_tokens], ["policy version", sample.policy_version],
        ["task", sample.data_source], ["sample", sample.sample_id],
      ].filter(([, value]) => value !== undefined && value !== null);
      const same = el("button", { type: "button", class: "link" }, "all samples of this prompt on this page");
      same.addEventListener("click", () => { byId("pick").value = ""; byId("outcome").value = "all"; byId("find").value = text(sample.prompt_id); choose(); byId("controls").scrollIntoView(); });
      return el("div", { class: "detail" },
        el("dl", {}, ...facts.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, visible(text(value)))))),
        ...block("Prompt", sample.prompt), ...block("Response", sample.response), ...block("Expected", sample.ground_truth),
        sample.prompt_id ? el("p", {}, same) : null);
    }
    byId("controls").addEventListener("submit", (event) => event.preventDefault());
    for (const id of ["pick", "outcome", "order"]) byId(id).addEventListener("change", choose);
    byId("find").addEventListener("input", choose);
    byId("show-more").addEventListener("click", more);
    choose();
  }

  const rows = phaseRows();
  header(sum(rows.map((row) => row.total)));
  curves();
  timeSection(rows);
  samples();
  if (data.config) { byId("config-text").append(...visibleNodes(data.config)); byId("config").hidden = false; }

  let width = document.body.clientWidth;
  new ResizeObserver(() => {
    if (document.body.clientWidth === width) return;
    width = document.body.clientWidth;
    charts.forEach((chart) => chart.draw());
  }).observe(document.body);
})();
