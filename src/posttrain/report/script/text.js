  // The report page. Everything shown comes from the JSON in #data and reaches the page as text: no HTML is ever made from it.
  // The parts of this script share one scope: text, charts, curves, time, diff, tokens, samples, main.
  let data = JSON.parse(document.getElementById("data").textContent);
  const byId = (id) => document.getElementById(id);

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
  // Rows of cells; a cell is text, an element, or [class, text or element].
  function table(heads, rows) {
    const cell = (tag, value) => (Array.isArray(value) ? el(tag, { class: value[0] }, value[1]) : el(tag, {}, value));
    return el("table", {}, el("thead", {}, el("tr", {}, ...heads.map((head) => cell("th", head)))),
      el("tbody", {}, ...rows.map((row) => el("tr", {}, ...row.map((value) => cell("td", value))))));
  }
  // Put options ([value, label] each) into a select, and keep what is chosen where it is still there.
  function fillSelect(select, options) {
    const before = select.value;
    select.replaceChildren(...options.map(([value, label]) => el("option", { value }, label)));
    if (options.some(([value]) => value === before)) select.value = before;
  }

  // ---- Text that may be anything ----------------------------------------------------------------------------------
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
  const text = (value) => (typeof value === "string" ? value : value === null || value === undefined ? "" : JSON.stringify(value));

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

