  // ---- What changed between two texts -------------------------------------------------------------------------------
  const MAX_CELLS = 4e6;  // of the table that a comparison fills

  // [kind, text] pieces that make up both texts: "same", "gone" (only in before) and "new" (only in after). Words are compared;
  // where these are too many, lines; where those are too, what lies between the common beginning and end is taken as a whole.
  function difference(before, after) {
    for (const cut of [/\s+|[^\s]+/g, /[^\n]*\n|[^\n]+/g]) {
      const a = before.match(cut) || [], b = after.match(cut) || [];
      let start = 0, end = 0;
      while (start < Math.min(a.length, b.length) && a[start] === b[start]) start++;
      while (end < Math.min(a.length, b.length) - start && a[a.length - 1 - end] === b[b.length - 1 - end]) end++;
      const left = a.slice(start, a.length - end), right = b.slice(start, b.length - end);
      const whole = left.length * right.length > MAX_CELLS;
      if (whole && cut.source.includes("\\s")) continue;
      const middle = whole ? [["gone", left.join("")], ["new", right.join("")]] : longestCommon(left, right);
      return joined([["same", a.slice(0, start).join("")], ...middle, ["same", a.slice(a.length - end).join("")]]);
    }
  }
  // Longest common subsequence, by the table of its lengths from every place to the ends.
  function longestCommon(a, b) {
    const width = b.length + 1, length = new Uint32Array((a.length + 1) * width);
    for (let i = a.length - 1; i >= 0; i--) for (let j = b.length - 1; j >= 0; j--) {
      length[i * width + j] = a[i] === b[j] ? length[(i + 1) * width + j + 1] + 1 : Math.max(length[(i + 1) * width + j], length[i * width + j + 1]);
    }
    const pieces = [];
    let i = 0, j = 0;
    while (i < a.length || j < b.length) {
      if (i < a.length && j < b.length && a[i] === b[j]) { pieces.push(["same", a[i]]); i++; j++; }
      else if (j === b.length || (i < a.length && length[(i + 1) * width + j] >= length[i * width + j + 1])) pieces.push(["gone", a[i++]]);
      else pieces.push(["new", b[j++]]);
    }
    return pieces;
  }
  function joined(pieces) {
    const result = [];
    for (const [kind, part] of pieces) {
      if (!part) continue;
      if (result.length && result.at(-1)[0] === kind) result.at(-1)[1] += part;
      else result.push([kind, part]);
    }
    return result;
  }
  const MARKS = { same: "span", gone: "del", new: "ins" };
  const differenceNodes = (before, after) => difference(before, after).map(([kind, part]) => el(MARKS[kind], {}, ...visibleNodes(part)));

