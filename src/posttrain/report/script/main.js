  // ---- Header ---------------------------------------------------------------------------------------------------
  function header() {
    const several = data.runs.length > 1;
    byId("header").replaceChildren(el("p", { class: "eyebrow" }, several ? "posttrain runs" : "posttrain run"),
      el("h1", {}, visible(several ? data.runs.map((run) => run.label).join(" · ") : data.runs[0].name)),
      several ? runTable() : factsOf(data.runs[0]));
    byId("headline").replaceChildren(...data.runs.flatMap((run, i) => run.headline.filter(({ points }) => points.length).map(({ source, points }) => accuracyCard(run, i, source, points))));
    byId("notes").hidden = !data.notes.length;
    byId("notes").className = "card";
    byId("notes").replaceChildren(...data.notes.map((note) => el("p", {}, visible(note))));
  }
  function about(run) {
    const info = run.info || {}, spent = spentBy(run);
    const versions = info.versions && typeof info.versions === "object" ? Object.entries(info.versions).map(([name, version]) => `${name} ${version}`).join(", ") : "";
    return [
      ["model", run.model],
      ["steps", info.total_steps ? `${run.steps_done} of ${info.total_steps}` : String(run.steps_done)],
      ["status", info.status], ["time", spent ? seconds(spent) : ""], ["device", info.device],
      ["started", String(info.started || "").replace("T", " ").replace(/\.\d+/, "")], ["versions", versions],
    ].map(([name, value]) => [name, value === undefined || value === null ? "" : visible(typeof value === "object" ? JSON.stringify(value) : value)]);
  }
  const factsOf = (run) => el("dl", { class: "facts" }, ...about(run).filter(([, value]) => value !== "").map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value))));
  function runTable() {
    const known = data.runs.map(about);
    const heads = known[0].map(([name]) => name);
    const rows = data.runs.map((run, i) => [el("span", {}, swatch(i), visible(run.label)), ...known[i].map(([, value]) => value), ["setting", visible(run.folder)]]);
    return el("div", { class: "card scroll runs" }, table(["run", ...heads, "folder"], rows));
  }
  function accuracyCard(run, i, source, points) {
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
    const title = data.runs.length > 1 ? el("h3", {}, swatch(i), `${visible(run.label)} · ${visible(source)}`) : el("h3", {}, `Held-out accuracy · ${visible(source)}`);
    return el("div", { class: "card" }, title, big, el("div", { class: "hint" }, over + when), el("div", { class: "hint" }, sure));
  }
  function configuration() {
    const some = data.runs.filter((run) => run.config);
    byId("config").hidden = !some.length;
    fillSelect(byId("config-run"), some.map((run) => [String(data.runs.indexOf(run)), visible(run.label)]));
    byId("config-run").parentElement.hidden = some.length < 2;
    const fill = () => byId("config-text").replaceChildren(...visibleNodes(data.runs[Number(byId("config-run").value)].config));
    byId("config-run").onchange = fill;
    if (some.length) fill();
  }

  // ---- All of it ------------------------------------------------------------------------------------------------
  function show() {
    charts = [];
    header();
    comparison();
    curves();
    timeSection();
    samples();
    configuration();
  }
  listenToControls();
  show();

  let width = document.body.clientWidth;
  new ResizeObserver(() => {
    if (document.body.clientWidth === width) return;
    width = document.body.clientWidth;
    charts.forEach((chart) => chart.draw());
  }).observe(document.body);

  // ---- While the run goes on --------------------------------------------------------------------------------------
  // A live page asks for what is new. It waits 20 times as long as the answer took, so that a page which is costly to make takes
  // no more than a twentieth of one core from the run; but never longer than half a minute.
  const LEAST_WAIT_MS = 2000, MOST_WAIT_MS = 30000;
  async function watch(version) {
    const begun = performance.now();
    let words = "live";
    try {
      const answer = await fetch(`data.json?seen=${encodeURIComponent(version)}`, { cache: "no-store" });
      if (answer.status === 200) {
        data = await answer.json();
        version = data.version;
        show();
      } else if (answer.status !== 204) words = `posttrain report --live answered ${answer.status}; the page shows what it last sent`;
    } catch {
      words = "posttrain report --live no longer answers; the page shows what it last sent";
    }
    const alive = words === "live";
    byId("live").textContent = alive ? `live, looked at ${new Date().toLocaleTimeString()}` : words;
    byId("live").className = alive ? "live" : "live lost";
    setTimeout(watch, Math.min(MOST_WAIT_MS, Math.max(LEAST_WAIT_MS, 20 * (performance.now() - begun))), version);
  }
  if (data.live) {
    byId("live").hidden = false;
    watch(data.version);
  }
