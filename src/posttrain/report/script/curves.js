  // ---- Curves -----------------------------------------------------------------------------------------------------
  // In the order they are shown; a chart whose metrics were not logged is left out.
  const CHARTS = [
    { title: "Reward", unit: "mean of a step", lines: [["reward/mean", "reward"]] },
    { title: "Held-out accuracy", unit: "share right", match: /^validation\/(?:(.+)\/)?accuracy$/, rest: "all questions", dots: true },
    { title: "Loss", unit: "nats per token", unless: "reward/mean", lines: [["policy/loss", "training"], ["validation/loss", "held-out"]] },
    { title: "Response length", unit: "tokens", lines: [["response/length_mean", "mean"]] },
    { title: "KL to the reference", unit: "nats per token", lines: [["reference/kl", "KL"]] },
    { title: "KL within the step", unit: "nats per token", lines: [["policy/kl_old", "KL"]] },
    { title: "Entropy", unit: "nats per token", lines: [["policy/entropy", "entropy"]] },
    { title: "Sampler–trainer gap", unit: "nats per token", lines: [["gap/mean", "mean"]] },
    { title: "Staleness", unit: "steps", lines: [["async/staleness_steps_max", "oldest group"], ["async/staleness_steps_mean", "mean"]] },
    { title: "Who waited", unit: "share of the step", lines: [["time/trainer_waited_share", "trainer"], ["time/samplers_waited_share", "samplers"]] },
    { title: "Effective tokens", unit: "share", lines: [["async/effective_token_share", "effective"]] },
    { title: "Gradient norm", unit: "before clipping", lines: [["policy/grad_norm", "norm"]] },
    { title: "Clipped tokens", unit: "share", lines: [["policy/clip_fraction", "clipped"]] },
    { title: "No signal, no reward, cut off", unit: "share", lines: [["group/no_signal_share", "groups without signal"], ["reward/invalid_share", "responses without a reward"], ["response/truncated_share", "cut off"]] },
    { title: "Critic against returns", unit: "reward", lines: [["critic/values_mean", "values"], ["critic/returns_mean", "returns"]] },
    { title: "Critic's explained variance", unit: "of the returns", lines: [["critic/explained_variance", "explained"]] },
    { title: "Critic's loss", unit: "reward²", lines: [["critic/loss", "loss"]] },
    { title: "Critic's gradient norm", unit: "before clipping", lines: [["critic/grad_norm", "norm"]] },
    { title: "Speed", unit: "tokens/s", lines: [["speed/rollout_tokens_per_s", "rollout"], ["speed/update_tokens_per_s", "update"]] },
  ];

  const allMetrics = () => [...new Set(data.runs.flatMap((run) => Object.keys(run.series)))].sort();
  const ofRuns = (metric) => data.runs.map((run, i) => ({ run, metric, label: visible(run.label), color: i + 1 }));

  // The charts to draw: of one run, several metrics may share a chart; of several runs, each metric has its own.
  function chartsWanted() {
    return CHARTS.flatMap((spec) => {
      const found = spec.match
        ? allMetrics().filter((metric) => spec.match.test(metric)).map((metric) => [metric, visible(spec.match.exec(metric)[1] || spec.rest)])
        : spec.lines.filter(([metric]) => data.runs.some((run) => metric in run.series));
      if (!found.length || allMetrics().includes(spec.unless)) return [];
      // One data source is all questions.
      if (spec.rest && found.length === 2) found.splice(found.findIndex(([, label]) => label === spec.rest), 1);
      if (data.runs.length === 1) return [{ ...spec, lines: found.slice(0, 8).map(([metric, label], i) => ({ run: data.runs[0], metric, label, color: i + 1 })) }];
      return found.map(([metric, label]) => ({ ...spec, title: found.length > 1 || spec.match ? `${spec.title}: ${label}` : spec.title, lines: ofRuns(metric) }));
    });
  }
  // Nothing but zeros, at every step: such a chart has its place among the others.
  const isZero = (run, metric) => (run.series[metric] || []).every((value) => value === 0 || value === null) && !(run.nonfinite[metric] || []).length;
  function curves() {
    byId("curves").hidden = false;  // before drawing: a hidden chart has no width
    byId("charts").replaceChildren();
    byId("more-charts").replaceChildren();
    const wanted = chartsWanted().filter((spec) => !spec.lines.every(({ run, metric }) => isZero(run, metric)));
    const shown = wanted.map((spec) => lineChart(spec, byId("charts"))).some(Boolean);
    const drawn = new Set(wanted.flatMap((spec) => spec.lines.map((line) => line.metric)));
    const others = allMetrics().filter((metric) => !drawn.has(metric));
    byId("curves").hidden = !shown && !others.length;
    const point = "Point at a chart to read a step in all of them.";
    byId("curves-hint").textContent = allSteps().length >= 15 ? `Thin line: every step. Thick line: smoothed. ${point}` : point;
    byId("more").hidden = !others.length;
    let done = false;
    byId("more").ontoggle = () => {
      if (done || !byId("more").open) return;
      done = true;
      others.forEach((metric) => lineChart({ title: visible(metric), dots: metric.startsWith("validation/"), lines: ofRuns(metric) }, byId("more-charts")));
    };
    byId("more").ontoggle();
  }

  // ---- Several runs side by side ------------------------------------------------------------------------------------
  // [metric or pattern, +1: more is better, -1: less is better, 0: neither]
  const COMPARED = [
    [/^validation\/accuracy$/, 1], [/^validation\/.+\/accuracy$/, 1], [/^validation\/.+\/reward_mean$/, 1], [/^validation\/loss$/, -1], [/^reward\/mean$/, 1],
    [/^response\/length_mean$/, 0], [/^response\/truncated_share$/, 0], [/^group\/no_signal_share$/, 0], [/^reward\/invalid_share$/, 0],
    [/^reference\/kl$/, 0], [/^policy\/entropy$/, 0], [/^policy\/loss$/, 0], [/^gap\/mean$/, 0], [/^critic\/explained_variance$/, 0],
    [/^speed\/rollout_tokens_per_s$/, 0], [/^speed\/update_tokens_per_s$/, 0], [/^time\/step_s$/, 0],
  ];
  const swatch = (i) => el("i", { class: `f${i + 1}` });

  function comparison() {
    byId("compare").hidden = data.runs.length < 2;
    if (data.runs.length < 2) return;
    const heads = data.runs.map((run, i) => ["num", el("span", {}, swatch(i), visible(run.label))]);
    const rows = COMPARED.flatMap(([pattern, better]) => allMetrics().filter((metric) => pattern.test(metric)).map((metric) => lastAndBest(metric, better)));
    byId("results").replaceChildren(table(["last value, at step", ...heads], rows));
    const shown = data.differences.map(([name, values]) => [["name", visible(name)], ...values.map((value) => ["setting", value === null ? "–" : visible(value)])]);
    const settings = data.runs.map((run, i) => ["setting", el("span", {}, swatch(i), visible(run.label))]);
    byId("differences").replaceChildren(shown.length ? table(["setting", ...settings], shown) : el("p", { class: "empty" }, "The configurations are the same."));
    byId("differences-hint").textContent = shown.length ? "Settings that are not the same everywhere; – is not set." : "";
  }
  function lastAndBest(metric, better) {
    const found = data.runs.map((run) => {
      const points = (run.series[metric] || []).map((value, i) => [run.steps[i], value]).filter((point) => typeof point[1] === "number");
      const best = better ? points.reduce((top, point) => (top === null || better * (point[1] - top[1]) > 0 ? point : top), null) : null;
      return { last: points.at(-1), best };
    });
    const top = found.reduce((most, { best }) => (best && (most === null || better * (best[1] - most) > 0) ? best[1] : most), null);
    const cells = found.map(({ last, best }) => {
      if (!last) return ["num", "–"];
      const cell = el("span", {}, `${short(last[1])} at ${last[0]}`);
      if (best) cell.append(el("span", { class: best[1] === top ? "best top" : "best" }, `best ${short(best[1])} at ${best[0]}`));
      return ["num", cell];
    });
    return [["name", visible(metric)], ...cells];
  }

