  // ---- Axes -------------------------------------------------------------------------------------------------------
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
  // A tick's number with as many digits as tell it from the next one.
  function tickLabel(value, size) {
    if (value === 0) return "0";
    const place = (number) => Math.floor(Math.log10(Math.abs(number)) + 1e-9);
    if (size < 1e-3 || Math.abs(value) >= 1e6) return Number(value.toPrecision(1 + Math.max(0, place(value) - place(size)))).toExponential();
    return value.toLocaleString("en-US", { maximumFractionDigits: Math.max(0, Math.ceil(-Math.log10(size) - 1e-9)) });
  }
  // Lower end, upper end and tick distance of an axis; it starts at 0 unless that would press the curve flat.
  function axis(values) {
    let low = values.reduce((least, value) => Math.min(least, value), Infinity), high = values.reduce((most, value) => Math.max(most, value), -Infinity);
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
  let charts = [];  // each: draw(), mark(step)

  function frame(figure, height, label) {
    const width = Math.max(240, figure.clientWidth - 28);
    const root = svg("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img", tabindex: "0", "aria-label": label });
    return { root, width };
  }
  // Grid and labels; without x, the steps are left to the caller.
  function axes(root, width, height, x, y, stepRange, valueRange) {
    for (const value of ticks(...valueRange)) {
      root.append(svg("line", { class: "grid", x1: LEFT, x2: width - RIGHT, y1: y(value), y2: y(value) }));
      root.append(svg("text", { x: LEFT - 6, y: y(value) + 4, "text-anchor": "end" }, tickLabel(value, valueRange[2])));
    }
    if (x) root.append(svg("text", { class: "x-word", x: 4, y: height - 5 }, "step"));
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

  // Every step that a run on this page has logged.
  const allSteps = () => [...new Set(data.runs.flatMap((run) => run.steps))].sort((a, b) => a - b);

  // A chart of lines; each is { run, metric, label, color }. False when there is nothing to draw.
  function lineChart({ title, unit, dots, lines: wanted }, parent) {
    const lines = wanted.filter(({ run, metric }) => metric in run.series).map((line) => ({
      ...line, points: line.run.steps.map((step, i) => [step, line.run.series[line.metric][i]]).filter((point) => typeof point[1] === "number"),
    }));
    const lost = [...new Set(lines.flatMap((line) => line.run.nonfinite[line.metric] || []))].sort((a, b) => a - b);
    if (!lines.some((line) => line.points.length) && !lost.length) return false;

    const value = el("span", { class: "value" });
    const caption = el("figcaption", {}, el("span", { class: "title" }, title + " ", el("span", { class: "unit" }, unit || "")), value);
    for (const line of lines) line.value = el("span", {});
    if (lines.length > 1 || data.runs.length > 1) caption.append(el("span", { class: "legend" }, ...lines.map((line) => el("span", {}, el("i", { class: `f${line.color}` }), line.label + " ", line.value))));
    if (lost.length) caption.append(el("span", { class: "alarm" }, `not finite at step ${lost.slice(0, 5).join(", ")}${lost.length > 5 ? ", …" : ""}`));
    const figure = el("figure", { class: "chart card" }, caption);
    parent.append(figure);

    const steps = [...new Set(lines.flatMap((line) => line.points.map((point) => point[0])))].sort((a, b) => a - b);
    for (const line of lines) line.at = new Map(line.points);
    const every = allSteps(), stepRange = [every[0], every.at(-1)];
    let root = null, x = null, y = null, marks = null;

    function draw() {
      if (root) root.remove();
      if (!steps.length) return;
      const made = frame(figure, HEIGHT, `${title}, ${unit || ""}, from step ${steps[0]} to ${steps.at(-1)}`);
      root = made.root;
      const valueRange = axis(lines.flatMap((line) => line.points.map((point) => point[1])));
      x = (step) => LEFT + ((step - stepRange[0]) / Math.max(1, stepRange[1] - stepRange[0])) * (made.width - LEFT - RIGHT);
      y = (amount) => HEIGHT - BOTTOM - ((amount - valueRange[0]) / (valueRange[1] - valueRange[0])) * (HEIGHT - TOP - BOTTOM);
      axes(root, made.width, HEIGHT, x, y, stepRange, valueRange);
      const path = (points) => points.map((point, i) => `${i ? "L" : "M"}${x(point[0]).toFixed(1)} ${y(point[1]).toFixed(1)}`).join("");
      for (const line of lines) {
        const smoothed = !dots && line.points.length >= 15;
        if (smoothed) root.append(svg("path", { class: `raw ${line.points.length > 300 ? "dense " : ""}s${line.color}`, d: path(line.points) }));
        root.append(svg("path", { class: `line s${line.color}`, d: path(smoothed ? smooth(line.points) : line.points) }));
        if (dots || line.points.length < 15) for (const point of line.points) root.append(svg("circle", { class: `f${line.color}`, cx: x(point[0]), cy: y(point[1]), r: 3 }));
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
      const at = step === null ? null : dots ? nearest(steps, step) : step;
      const rows = lines.map((line) => [line, at === null ? (line.points.at(-1) || [])[1] : line.at.get(at)]).filter((row) => row[1] !== undefined);
      for (const line of lines) line.value.textContent = "";
      for (const [line, amount] of rows) line.value.textContent = short(amount);
      const single = lines.length === 1 && data.runs.length === 1 && rows.length ? short(rows[0][1]) : "";
      value.textContent = at === null ? single : `${single} at step ${at}`;
      if (at === null) return;
      marks.append(svg("line", { class: "cursor", x1: x(at), x2: x(at), y1: TOP, y2: HEIGHT - BOTTOM }));
      for (const [line, amount] of rows) marks.append(svg("circle", { class: `f${line.color}`, cx: x(at), cy: y(amount), r: 4 }));
    }
    charts.push({ draw, mark });
    draw();
    return true;
  }

