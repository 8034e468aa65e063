  // ---- Samples --------------------------------------------------------------------------------------------------
  const ROWS_AT_ONCE = 50;
  const SEARCHED = ["prompt", "response", "ground_truth", "prompt_id", "sample_id", "data_source"];
  const reward = (sample) => (typeof sample.reward === "number" ? sample.reward : null);
  const outcome = (sample) => (sample.invalid || reward(sample) === null ? "invalid" : sample.reward >= 1 ? "right" : "wrong");
  const stepOf = (sample) => `${sample.kind === "validation" ? "val " : ""}${sample.step}`;
  const keyOf = (sample) => `${sample.kind} ${sample.step}`;
  const opened = new Map();  // key of a sample -> what is shown below its row while that is open
  let chosen = [], shown = 0, differing = text;

  // Prompts of a task open and end with the same words (system message, chat template); a row shows what differs.
  function commonWords() {
    const prompts = [...new Set(data.samples.map((sample) => text(sample.prompt)))];
    let start = prompts.length > 1 ? prompts[0].length : 0, end = start;
    for (const prompt of prompts) while (!prompt.startsWith(prompts[0].slice(0, start))) start--;
    if (prompts.length) start = prompts[0].slice(0, start).search(/\S*$/);
    for (const prompt of prompts) while (!prompt.endsWith(prompts[0].slice(prompts[0].length - end)) || start + end > prompt.length) end--;
    return (prompt) => (start ? "… " : "") + prompt.slice(start, prompt.length - end).slice(0, 300) + (end ? " …" : "");
  }

  function samples() {
    byId("left-out").textContent = visible(data.left_out.join(" "));
    const some = data.samples.length > 0;
    byId("samples").hidden = !some && !data.left_out.length;
    byId("controls").hidden = byId("table").hidden = !some;
    if (!some) return;
    nameSamples();
    differing = commonWords();
    fillSteps();
    const options = (values, label = visible) => [["", "all"], ...[...new Set(values)].sort().map((value) => [value, label(value)])];
    fillSelect(byId("of-run"), options(data.samples.map((sample) => String(sample.run)), (number) => visible(data.runs[number].label)));
    fillSelect(byId("task"), options(data.samples.map((sample) => text(sample.data_source))));
    fillSelect(byId("ended"), options(data.samples.map((sample) => text(sample.stop_reason))));
    for (const id of ["of-run", "task", "ended"]) byId(id).parentElement.hidden = byId(id).options.length < 3;
    byId("order").querySelector("[value=gap]").hidden = !data.samples.some((sample) => largestGap(sample) !== null);
    choose(Math.max(ROWS_AT_ONCE, shown));
  }
  // A key for each sample that stays the same when a live page gets more of them.
  function nameSamples() {
    const times = new Map();
    for (const sample of data.samples) {
      const name = `${data.runs[sample.run].folder} ${keyOf(sample)} ${text(sample.sample_id)}`;
      times.set(name, (times.get(name) || 0) + 1);
      sample.key = `${name} ${times.get(name)}`;
    }
  }
  function fillSteps() {
    const first = !byId("pick").options.length;
    const before = byId("pick").value;
    const groups = new Map();
    for (const sample of data.samples) groups.set(keyOf(sample), (groups.get(keyOf(sample)) || 0) + 1);
    const order = (kind) => [...groups.keys()].filter((name) => name.startsWith(kind)).sort((a, b) => Number(b.split(" ")[1]) - Number(a.split(" ")[1]));
    byId("pick").replaceChildren(el("option", { value: "" }, `all on this page (${data.samples.length})`));
    for (const kind of ["validation", "training"]) {
      const names = order(kind);
      if (names.length) byId("pick").append(el("optgroup", { label: kind }, ...names.map((name) => el("option", { value: name }, `${name.replace(" ", " step ")} (${groups.get(name)})`))));
    }
    byId("pick").value = first ? order("validation")[0] || order("training")[0] : groups.has(before) ? before : "";
  }

  const bound = (id) => (byId(id).value.trim() === "" || !Number.isFinite(Number(byId(id).value)) ? null : Number(byId(id).value));
  function choose(atLeast = ROWS_AT_ONCE) {
    const [step, kind, run, task, ended] = ["pick", "outcome", "of-run", "task", "ended"].map((id) => byId(id).value);
    const needle = byId("find").value.toLowerCase(), low = bound("at-least"), high = bound("at-most");
    chosen = data.samples.filter((sample) => (!step || keyOf(sample) === step) && (kind === "all" || outcome(sample) === kind)
      && (!run || String(sample.run) === run) && (!task || text(sample.data_source) === task) && (!ended || text(sample.stop_reason) === ended)
      && (low === null || (reward(sample) !== null && sample.reward >= low)) && (high === null || (reward(sample) !== null && sample.reward <= high))
      && (!needle || SEARCHED.some((name) => text(sample[name]).toLowerCase().includes(needle))));
    const by = (value, sign) => (a, b) => sign * ((value(b) ?? -Infinity) - (value(a) ?? -Infinity)) || 0;  // without the value: lowest
    const length = (sample) => sample.response_tokens ?? 0;
    const orders = { high: by(reward, 1), low: by(reward, -1), long: by(length, 1), short: by(length, -1), advantage: by((sample) => sample.advantage, 1), gap: by(largestGap, 1), new: by((sample) => sample.step, 1) };
    if (orders[byId("order").value]) chosen.sort(orders[byId("order").value]);
    const right = chosen.filter((sample) => outcome(sample) === "right").length;
    const rewards = known(chosen.map(reward));
    byId("count").textContent = `${chosen.length} sample${chosen.length === 1 ? "" : "s"}, ${right} right${rewards.length ? `, mean reward ${short(sum(rewards) / rewards.length)}` : ""}`;
    shown = 0;
    byId("rows").replaceChildren();
    moreRows(atLeast);
  }
  function moreRows(count = ROWS_AT_ONCE) {
    const next = chosen.slice(shown, shown + count);
    byId("rows").append(...next.flatMap(row));
    shown += next.length;
    if (!shown) byId("rows").append(el("tr", {}, el("td", { colspan: "6", class: "wide empty" }, "No sample fits.")));
    byId("show-more").hidden = shown >= chosen.length;
    byId("show-more").textContent = `Show more (${chosen.length - shown} left)`;
  }
  const excerpt = (value, long) => el("span", { class: long ? "excerpt long" : "excerpt", dir: "auto" }, visible(text(value).slice(0, 300).replace(/\s+/g, " ").trim()) || "(empty)");
  function badge(sample) {
    const kind = outcome(sample);
    return el("span", { class: `badge ${kind}` }, kind === "invalid" ? visible((sample.invalid && text(sample.invalid.reason)) || "none") : short(sample.reward));
  }
  // The row of a sample, and below it what is known about it, when it is open.
  function row(sample) {
    const line = el("tr", { class: "row", tabindex: "0", "aria-expanded": "false" },
      el("td", { class: "inline" }, badge(sample)),
      el("td", { "data-label": "prompt" }, thumbnail(sample), excerpt(differing(text(sample.prompt)), true)),
      el("td", { "data-label": "response" }, excerpt(sample.response, true)),
      el("td", { class: "inline", "data-label": "expected" }, excerpt(sample.ground_truth, false)),
      el("td", { class: "inline num", "data-label": "tokens" }, visible(short(sample.response_tokens))),
      el("td", { class: "inline", "data-label": "step" }, ...(data.runs.length > 1 ? [swatch(sample.run)] : []), stepOf(sample)));
    const toggle = () => {
      const open = !opened.has(sample.key);
      if (open) {
        opened.set(sample.key, el("tr", {}, el("td", { colspan: "6", class: "wide" }, detail(sample))));
        line.after(opened.get(sample.key));
      } else {
        opened.get(sample.key).remove();
        opened.delete(sample.key);
      }
      line.setAttribute("aria-expanded", String(open));
    };
    line.addEventListener("click", toggle);
    line.addEventListener("keydown", (event) => { if (event.key === "Enter" || event.key === " ") { event.preventDefault(); toggle(); } });
    if (!opened.has(sample.key)) return [line];
    line.setAttribute("aria-expanded", "true");
    return [line, opened.get(sample.key)];
  }

  const block = (title, value) => [el("h4", {}, title), el("pre", { class: "text", dir: "auto", tabindex: "0" }, ...visibleNodes(text(value) || "(empty)"))];
  const facts = (pairs) => el("dl", {}, ...pairs.filter(([, value]) => value !== undefined && value !== null && value !== "").map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, visible(text(value))))));
  const entries = (value) => Object.entries(value && typeof value === "object" && !Array.isArray(value) ? value : {});

  // The version of the weights that sampled a response; of several, with the first token of each.
  function spansOf(sample) {
    const spans = Array.isArray(sample.version_spans) ? sample.version_spans.filter(Array.isArray) : [];
    return spans.length > 1 ? spans.map(([first, version]) => `${text(version)} from token ${text(first)}`).join(", ") : sample.policy_version;
  }

  function detail(sample) {
    const environment = sample.environment && typeof sample.environment === "object" ? sample.environment : {};
    const about = facts([
      ["reward", short(reward(sample))], ...entries(sample.reward_terms).map(([name, value]) => [`· ${visible(name)}`, short(value)]),
      ...entries(sample.reward_texts).map(([name, value]) => [`· ${visible(name)}`, value]),
      ["advantage", sample.kind === "training" ? short(sample.advantage) : undefined],
      ["no reward because", sample.invalid ? `${text(sample.invalid.reason)}: ${text(sample.invalid.detail)}`.slice(0, 2000) : undefined],
      ["ended by", sample.stop_reason], ["tokens", sample.response_tokens === undefined ? undefined : String(sample.response_tokens)], ["policy version", spansOf(sample)],
      ["environment ended by", environment.stop], ...entries(environment.metrics).map(([name, value]) => [`· ${visible(name)}`, short(value)]),
      ["run", data.runs.length > 1 ? data.runs[sample.run].label : undefined], ["task", sample.data_source], ["sample", sample.sample_id],
    ]);
    const same = el("button", { type: "button", class: "link" }, "all samples of this prompt on this page");
    same.addEventListener("click", () => {
      for (const id of ["pick", "of-run", "task", "ended", "at-least", "at-most"]) byId(id).value = "";
      byId("outcome").value = "all";
      byId("find").value = text(sample.prompt_id);
      choose();
      byId("controls").scrollIntoView();
    });
    const turns = Array.isArray(sample.turns) ? sample.turns : [];
    return el("div", { class: "detail" }, about,
      ...pictures(sample), ...block("Prompt", sample.prompt), ...(turns.length ? turns.map(turnCard) : block("Response", sample.response)), ...block("Expected", sample.ground_truth),
      ...(sample.tokens || []).map((part) => tokenView(part, data.token_texts[sample.run] || {})), comparisonWith(sample),
      sample.prompt_id ? el("p", {}, same) : null);
  }
  // The images of a prompt, as far as they are on the page: data URLs of small PNG files.
  const imagesOf = (sample) => (Array.isArray(sample.images) ? sample.images : []).filter((image) => image && typeof image === "object");
  const pictureOf = (image) => (Object.hasOwn(data.pictures, text(image.file)) ? data.pictures[image.file] : "");
  function thumbnail(sample) {
    const first = imagesOf(sample).map(pictureOf).find((url) => url);
    return first ? el("img", { class: "thumbnail", src: first, alt: "" }) : null;
  }
  function pictures(sample) {
    const images = imagesOf(sample);
    if (!images.length) return [];
    const size = (image) => `${visible(text(image.width))} × ${visible(text(image.height))}`;
    const one = (image, i) => {
      const url = pictureOf(image);
      const label = `image ${i + 1}, ${size(image)} pixels`;
      return el("figure", { class: "picture" }, url ? el("img", { src: url, alt: label }) : null, el("figcaption", {}, url ? label : `${label}, not on this page`));
    };
    return [el("h4", {}, "Images"), el("div", { class: "pictures" }, ...images.map(one))];
  }
  // One turn of a conversation: what the policy did, and what the environment answered.
  function turnCard(turn, i) {
    const said = facts([["reward", typeof turn.reward === "number" ? short(turn.reward) : undefined], ["ended by", turn.stop_reason], ["policy version", turn.policy_version], ["tokens", typeof turn.end === "number" ? `${turn.start}–${turn.end}` : undefined]]);
    return el("section", { class: "turn" }, el("h4", {}, `Turn ${i + 1}`), said, el("pre", { class: "text", dir: "auto" }, ...visibleNodes(text(turn.text) || "(empty)")),
      ...(text(turn.observation) ? [el("h4", {}, "answered by the environment"), el("pre", { class: "text given", dir: "auto" }, ...visibleNodes(text(turn.observation)))] : []));
  }
  // The same prompt's other responses, one of which can be laid over this one.
  function comparisonWith(sample) {
    const others = data.samples.filter((other) => other !== sample && other.prompt_id && other.prompt_id === sample.prompt_id && other.data_source === sample.data_source && other.kind === sample.kind).slice(0, 200);
    if (!others.length) return null;
    const label = (other) => `${data.runs.length > 1 ? `${visible(data.runs[other.run].label)}, ` : ""}step ${other.step}, reward ${short(reward(other))}, ${visible(text(other.sample_id)).slice(-40)}`;
    const pick = el("select", { class: "other" }, el("option", { value: "" }, "choose another response"), ...others.map((other, i) => el("option", { value: String(i) }, label(other))));
    const box = el("pre", { class: "text difference", dir: "auto", hidden: "" });
    const hint = el("p", { class: "hint", hidden: "" }, el("del", {}, "struck out"), ": only in the other one; ", el("ins", {}, "underlined"), ": only in this one.");
    pick.addEventListener("change", () => {
      box.hidden = hint.hidden = !pick.value;
      if (pick.value) box.replaceChildren(...differenceNodes(text(others[Number(pick.value)].response), text(sample.response)));
    });
    return el("div", {}, el("h4", {}, el("label", {}, "Compared with ", pick)), hint, box);
  }

  function listenToControls() {
    byId("controls").addEventListener("submit", (event) => event.preventDefault());
    for (const id of ["pick", "outcome", "of-run", "task", "ended", "order"]) byId(id).addEventListener("change", () => choose());
    for (const id of ["find", "at-least", "at-most"]) byId(id).addEventListener("input", () => choose());
    byId("show-more").addEventListener("click", () => moreRows());
  }

