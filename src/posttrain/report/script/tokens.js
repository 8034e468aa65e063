  // ---- Single tokens ------------------------------------------------------------------------------------------------
  const TOKENS_AT_ONCE = 2000;
  // What a token can be coloured by: its values, its strength from -1 to 1 (sign: which colour), and what the colours say.
  const shades = {
    gap: { label: "gap, rollout − trainer", strength: (value) => Math.sign(value) * Math.max(0, Math.min(1, (Math.log10(Math.abs(value) || 1e-9) + 4) / 4)),
      legend: "|log-prob of the sampler − of the trainer|, nats: none below 0.0001, strongest from 1; red: the sampler was surer" },
    rollout_logprobs: { label: "log-prob", strength: (value) => Math.min(1, -value / 5), legend: "log-prob by the sampler, nats: strongest from −5" },
    advantages: { label: "advantage", scaled: true, legend: "green: made likelier; red: made less likely" },
    in_loss: { label: "mask", strength: () => 0, legend: "grey: not written by the policy; dotted: written by it, but not in the loss" },
    ref_gap: { label: "trainer − reference", strength: (value) => Math.sign(value) * Math.min(1, Math.abs(value) / 2), legend: "log-prob of the trainer − of the reference, nats: strongest from 2; green: likelier now" },
    values: { label: "critic's value", scaled: true, legend: "green: above 0; red: below" },
    returns: { label: "return", scaled: true, legend: "green: above 0; red: below" },
    token_rewards: { label: "reward on the token", scaled: true, legend: "green: above 0; red: below" },
    versions: { label: "version of the weights", palette: true, legend: "each version of the weights that sampled tokens of this response has a colour" },
    importance_weights: { label: "importance weight", strength: (value) => Math.max(-1, Math.min(1, value - 1)), legend: "green: above 1; red: below" },
  };
  const READ = { rollout_logprobs: "log-prob", gap: "gap", ref_gap: "trainer − reference", advantages: "advantage", versions: "weights of version", importance_weights: "weight", values: "value", returns: "return", token_rewards: "token reward", rejected: "rejected", in_loss: "in loss", sampled: "sampled" };

  // A column has an entry per token, or one value for all of them.
  const entry = (column, i) => (Array.isArray(column) ? column[i] : column);
  function largestGap(sample) {
    const gaps = (sample.tokens || []).flatMap((part) => part.gap ?? []);
    return gaps.length ? known(gaps).reduce((most, value) => Math.max(most, Math.abs(value)), 0) : null;
  }

  // The tokens of a response, coloured by one of their columns. ``values`` is a row of step_N.tokens.jsonl.
  function tokenView(values, texts) {
    const ids = values.token_ids;
    const pick = el("select", { class: "shade" }, ...Object.keys(shades).filter((name) => name in values).map((name) => el("option", { value: name }, shades[name].label)));
    const legend = el("p", { class: "hint" }), reading = el("p", { class: "hint reading", "aria-live": "polite" }, "Point at a token, or tap it, to read its values.");
    const box = el("pre", { class: "text tokens", tabindex: "0" });
    const next = el("button", { type: "button", class: "link" });
    let shown = 0;
    function read(i) {
      const found = Object.entries(READ).filter(([name]) => name in values).map(([name, label]) => `${label} ${short(entry(values[name], i))}`);
      reading.textContent = visible(`token ${i}, id ${text(ids[i])}: ${found.join(" · ")}`);
    }
    function token(i) {
      const node = el("span", { class: "token", "data-i": String(i) }, ...visibleNodes(text(texts[text(ids[i])]) || `<id ${text(ids[i])}>`));
      if (!entry(values.sampled, i)) node.classList.add("given");
      else if ("in_loss" in values && !entry(values.in_loss, i)) node.classList.add("outside");
      return node;
    }
    function more() {
      const last = Math.min(ids.length, shown + TOKENS_AT_ONCE);
      for (; shown < last; shown++) box.append(token(shown));
      next.hidden = shown >= ids.length;
      next.textContent = `Show more tokens (${ids.length - shown} left)`;
      shade();
    }
    function shade() {
      const name = pick.value, kind = shades[name];
      const numbers = known(Array.isArray(values[name]) ? values[name] : [values[name]]);
      const most = numbers.reduce((top, value) => Math.max(top, Math.abs(value)), 0) || 1;
      const versions = kind.palette ? [...new Set(numbers)].sort((a, b) => a - b) : [];
      for (const node of box.children) {
        for (let i = 1; i <= 10; i++) node.classList.remove(`v${i}`);
        const value = entry(values[name], Number(node.dataset.i));
        if (kind.palette && typeof value === "number" && !node.classList.contains("given")) node.classList.add(`v${(versions.indexOf(value) % 10) + 1}`);
        const strength = kind.palette || typeof value !== "number" || node.classList.contains("given") ? 0 : kind.scaled ? value / most : kind.strength(value);
        const rising = name === "gap" ? "179, 66, 61" : name === "rollout_logprobs" ? "208, 122, 29" : "31, 140, 80";
        const falling = name === "gap" ? "42, 116, 181" : "179, 66, 61";
        node.style.backgroundColor = strength ? `rgba(${strength > 0 ? rising : falling}, ${(0.75 * Math.abs(strength)).toFixed(2)})` : "";
        node.classList.toggle("lost", typeof value !== "number");
      }
      legend.replaceChildren(kind.legend, ...versions.map((version, i) => el("span", { class: `token key v${(i % 10) + 1}` }, visible(text(version)))));
    }
    const pointed = (event) => { const node = event.target.closest(".token"); if (node) read(Number(node.dataset.i)); };
    box.addEventListener("pointerover", pointed);
    box.addEventListener("click", pointed);
    pick.addEventListener("change", shade);
    next.addEventListener("click", more);
    more();
    return el("div", {}, el("h4", {}, el("label", {}, "Tokens, coloured by ", pick)), legend, box, next, reading);
  }

