  // ---- Time -----------------------------------------------------------------------------------------------------
  // Phases in the order in which a step has them.
  const PHASES = ["rollout", "reward", "baseline", "logprobs", "values", "critic_update", "update", "weight_sync", "validation", "validation_loss"];
  const PHASE_COLORS = [1, 2, 3, 4, 5, 6, 7, 9, 10], OTHER_COLOR = 8;
  const LANE = 20, LANE_LEFT = 92, STEPS_AT_ONCE = 5;
  const phaseName = (name) => visible(String(name).replace("_", " "));

  // Seconds of each phase, step by step; what a step took beyond its phases is "other".
  function phaseRows(run) {
    const names = PHASES.filter((phase) => `time/${phase}_s` in run.series);
    const rows = names.map((name) => ({ phase: name, name: phaseName(name), values: run.series[`time/${name}_s`] }));
    const whole = run.series["time/step_s"];
    if (whole) {
      const rest = whole.map((total, i) => (typeof total === "number" ? Math.max(0, total - sum(rows.map((row) => row.values[i]))) : null));
      if (sum(rest) > 0.005 * sum(whole)) rows.push({ phase: "other", name: "other", values: rest });
    }
    rows.forEach((row, i) => { row.color = row.phase === "other" ? OTHER_COLOR : PHASE_COLORS[i % PHASE_COLORS.length]; row.total = sum(row.values); });
    return rows;
  }
  const spentBy = (run) => sum(phaseRows(run).map((row) => row.total));

  function timeSection() {
    fillSelect(byId("time-run"), data.runs.map((run, i) => [String(i), visible(run.label)]));
    byId("time-run").parentElement.hidden = data.runs.length < 2;
    byId("time-run").onchange = () => { charts = charts.filter((chart) => !chart.time); drawTime(); };
    byId("time").hidden = !data.runs.some((run) => phaseRows(run).length);
    if (!byId("time").hidden) drawTime();
  }
  function drawTime() {
    const run = data.runs[Number(byId("time-run").value) || 0];
    const rows = phaseRows(run);
    const all = sum(rows.map((row) => row.total));
    const stepsTimed = run.steps.filter((step) => step >= 1).length || 1;
    const line = (name, total, share) => [name, ["num", seconds(total)], ["num", seconds(total / stepsTimed)], ["num", share]];
    byId("time-table").replaceChildren(table(["Phase", ["num", "Total"], ["num", "Per step"], ["num", "Share"]], [
      ...rows.map((row) => line(el("span", {}, el("i", { class: `f${row.color}` }), row.name), row.total, `${((100 * row.total) / all || 0).toFixed(1)} %`)),
      line("all", all, ""),
    ]));
    byId("time-chart").replaceChildren();
    byId("gantt").replaceChildren();
    if (!rows.length) return;
    secondsPerStep(run, rows);
    gantt(run, rows);
  }

  function secondsPerStep(run, rows) {
    const figure = byId("time-chart");
    const value = el("span", { class: "value" });
    let root = null, marks = null, bars = [], x = null;
    figure.append(el("figcaption", {}, el("span", { class: "title" }, "Seconds per step"), value));
    function draw() {
      if (root) root.remove();
      const height = 220;
      const made = frame(figure, height, "Seconds of each phase, step by step");
      root = made.root;
      // As many bars as there is room for; each is the mean of its steps.
      const per = Math.max(1, Math.ceil(run.steps.length / Math.floor((made.width - LEFT - RIGHT) / 4)));
      bars = [];
      for (let i = 0; i < run.steps.length; i += per) {
        const steps = run.steps.slice(i, i + per);
        bars.push({ steps, parts: rows.map((row) => sum(row.values.slice(i, i + per)) / steps.length) });
      }
      const range = axis([0, ...bars.map((bar) => sum(bar.parts))]);
      const slot = (made.width - LEFT - RIGHT) / bars.length;
      const barWidth = Math.max(1, Math.min(28, slot * 0.8));
      x = (index) => LEFT + (index + 0.5) * slot;
      const y = (amount) => height - BOTTOM - (amount / range[1]) * (height - TOP - BOTTOM);
      axes(root, made.width, height, null, y, null, range);
      const labels = stepTicks([run.steps[0], run.steps.at(-1)], made.width);
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
      follow(root, (at) => bars[Math.min(bars.length - 1, Math.max(0, Math.floor((at - LEFT) / slot)))].steps[0], run.steps);
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
    charts.push({ draw, mark, time: true });
    draw();
  }

  // When each phase ran, a lane per phase: from timeline.jsonl, or laid end to end where a run has none.
  function phasesInOrder(run, rows) {
    if (run.timeline.length) return run.timeline.map(([step, phase, start, end, lane]) => ({ step, phase, start, end, lane: lane || "" }));
    let now = 0;
    return run.steps.flatMap((step, i) => rows.filter((row) => row.values[i] > 0).map((row) => {
      const start = now;
      now += row.values[i];
      return { step, phase: row.phase, start, end: now };
    }));
  }
  // The time between the intervals, from start to end.
  function between(intervals, start, end) {
    const free = [];
    let until = start;
    for (const [from, to] of intervals.slice().sort((a, b) => a[0] - b[0])) {
      if (from > until) free.push([until, from]);
      until = Math.max(until, to);
    }
    if (end > until) free.push([until, end]);
    return free;
  }
  // Of an asynchronous run, who waited for whom: the trainer while the loop itself samples or waits for a sampler; the samplers
  // while nothing is sampled.
  function waitsOf(run, phases, start, end) {
    if (!run.asynchronous || !run.timeline.length) return [];
    const sampled = phases.filter((phase) => phase.phase === "rollout").map((phase) => [phase.start, phase.end]);
    const held = phases.filter((phase) => !phase.lane && ["rollout", "sampler_wait"].includes(phase.phase)).map((phase) => [phase.start, phase.end]);
    return [{ name: "trainer waits", spans: held }, { name: "sampler waits", spans: between(sampled, start, end) }];
  }
  function gantt(run, rows) {
    const figure = byId("gantt");
    const phases = phasesInOrder(run, rows);
    const steps = [...new Set(phases.map((phase) => phase.step))].sort((a, b) => a - b);
    if (!steps.length) return;
    const pick = el("select", { id: "gantt-steps" });
    const groups = [];
    for (let i = 0; i < steps.length; i += STEPS_AT_ONCE) groups.push(steps.slice(i, i + STEPS_AT_ONCE));
    pick.append(...groups.map((group, i) => el("option", { value: String(i) }, group.length > 1 ? `${group[0]}–${group.at(-1)}` : String(group[0]))));
    pick.value = String(Math.max(0, groups.length - (groups.length > 1 && groups.at(-1).length < STEPS_AT_ONCE ? 2 : 1)));
    const value = el("span", { class: "value" });
    const measured = run.timeline.length ? "as timeline.jsonl has them" : "laid end to end: this run has no timeline.jsonl";
    figure.append(el("figcaption", {}, el("span", { class: "title" }, "When the phases ran ", el("span", { class: "unit" }, measured)), el("label", {}, "Steps ", pick), value));
    const lanes = [...new Set([...PHASES, ...phases.map((phase) => phase.phase)])].filter((name) => phases.some((phase) => phase.phase === name));
    const color = (name) => (rows.find((row) => row.phase === name) || { color: OTHER_COLOR }).color;
    let root = null;
    function draw() {
      if (root) root.remove();
      const group = groups[Number(pick.value)];
      const shown = phases.filter((phase) => group.includes(phase.step));
      const start = Math.min(...shown.map((phase) => phase.start)), end = Math.max(...shown.map((phase) => phase.end));
      const waits = waitsOf(run, shown, start, end);
      const height = TOP + (lanes.length + waits.length) * LANE + BOTTOM;
      const made = frame(figure, height, `Phases of steps ${group[0]} to ${group.at(-1)}`);
      root = made.root;
      const x = (time) => LANE_LEFT + ((time - start) / Math.max(1e-9, end - start)) * (made.width - LANE_LEFT - RIGHT);
      for (const time of ticks(0, end - start, tickSize(Math.max(1e-9, end - start), Math.max(2, Math.floor(made.width / 90))))) {
        root.append(svg("line", { class: "grid", x1: x(start + time), x2: x(start + time), y1: TOP, y2: height - BOTTOM }));
        root.append(svg("text", { x: x(start + time), y: height - 5, "text-anchor": "middle" }, `${short(time)} s`));
      }
      [...lanes, ...waits.map((wait) => wait.name)].forEach((name, i) => root.append(svg("text", { x: LANE_LEFT - 8, y: TOP + (i + 0.5) * LANE + 4, "text-anchor": "end" }, phaseName(name))));
      for (const step of group) {
        const first = Math.min(...shown.filter((phase) => phase.step === step).map((phase) => phase.start));
        root.append(svg("line", { class: "cursor", x1: x(first), x2: x(first), y1: TOP, y2: height - BOTTOM }));
      }
      for (const phase of shown) {
        const bar = svg("rect", { class: `f${color(phase.phase)}`, rx: 2, x: x(phase.start), y: TOP + lanes.indexOf(phase.phase) * LANE + 3, width: Math.max(1, x(phase.end) - x(phase.start)), height: LANE - 6 });
        bar.addEventListener("pointerenter", () => { value.textContent = `step ${phase.step}, ${phaseName(phase.phase)}: ${seconds(phase.end - phase.start)}`; });
        bar.addEventListener("pointerleave", () => { value.textContent = ""; });
        root.append(bar);
      }
      waits.forEach((wait, i) => {
        for (const [from, to] of wait.spans) {
          const bar = svg("rect", { class: "wait", rx: 2, x: x(from), y: TOP + (lanes.length + i) * LANE + 5, width: Math.max(1, x(to) - x(from)), height: LANE - 10 });
          bar.addEventListener("pointerenter", () => { value.textContent = `${wait.name}: ${seconds(to - from)}`; });
          bar.addEventListener("pointerleave", () => { value.textContent = ""; });
          root.append(bar);
        }
      });
      figure.append(root);
    }
    pick.addEventListener("change", draw);
    charts.push({ draw, mark: () => {}, time: true });
    draw();
  }

