"use strict";
// The table of rows: sorted and filtered by the report's own numbers, shown a page at a time.
const halRows = (() => {
  const PAGE = 50;
  const KEYS = {
    order: ["as in the report", () => 0, 1],
    place: ["place", (row) => row.place, 1],
    implementation: ["implementation", (row) => row.data.implementation, 1],
    tier: ["worst tier first", (row) => row.rank, 1],
    calls: ["most calls first", (row) => row.data.calls, -1],
    time: ["longest time first", (row) => row.data.time_us, -1],
    rate: ["FLOP/s, lowest first", (row) => (row.data.time_us && row.data.flops ? row.data.flops / row.data.time_us : null), 1],
    achieved: ["furthest from its bound first",
      (row) => (row.data.time_us && row.data.bound_us !== null ? row.data.bound_us / row.data.time_us : null), 1],
    leaf: ["leaf", (row) => ["other", "not-observed", "seen", "not-declared"].indexOf(row.data.leaf.state), 1],
    losers: ["most better ones first", (row) => row.data.losers.length, -1],
  };
  const collator = new Intl.Collator("en", { numeric: true });
  const state = { key: "order", sign: 1, limit: PAGE };
  let rows = [];
  let ordered = [];
  let parts = {};
  let preset = ["order", 1];

  const read = (table, report) => {
    rows = [...table.tBodies[0].rows].map((element, index) => {
      const data = report.rows[Number(element.dataset.i)];
      const line = data.location && data.location.line ? `:${data.location.line}` : ""; // 0: the file as a whole
      const place = data.site || (data.location ? `${data.location.file}${line}` : "");
      return {
        element, data, index, place, isSum: "sum" in element.dataset,
        rank: Number(element.dataset.rank),
        text: [place, data.op, data.phase, data.arguments, data.implementation, element.dataset.tier, data.tier,
          data.location ? data.location.function : ""].join("\n").toLowerCase(),
      };
    });
    ordered = rows;
  };

  const sorted = () => {
    const value = KEYS[state.key][1];
    const keyed = rows.map((row) => [value(row), row]);
    keyed.sort(([a, first], [b, second]) => {
      if (a === null || b === null) return (a === null) - (b === null) || first.index - second.index; // unknown last
      const order = typeof a === "string" ? collator.compare(a, b) : a - b;
      return order * state.sign || first.index - second.index;
    });
    return keyed.map(([, row]) => row);
  };

  // A row that sums others is found by the place of each: its layer is "*", its file has no line.
  const has = (row, word) => row.text.includes(word) || (row.isSum
    && (row.text.includes(word.replace(/(^|\.)\d+(?=\.|$)/, "$1*"))
      || (row.place !== "" && word.startsWith(`${row.place.toLowerCase()}:`))));
  const isAt = (row, place) => row.place.toLowerCase() === place || (row.isSum && has(row, place));

  const update = () => {
    const wanted = parts.text.value.trim().toLowerCase();
    const exact = /^"(.+)"$/.exec(wanted);
    const words = exact ? [] : wanted.split(/\s+/).filter(Boolean);
    const [op, tier, phase, isLoss] = [parts.op.value, parts.tier.value, parts.phase.value, parts.loss.checked];
    let matching = 0;
    for (const row of ordered) {
      const fits = (!op || row.data.op === op) && (!tier || row.element.dataset.tier === tier)
        && (!phase || row.data.phase === phase) && (!isLoss || "loss" in row.element.dataset)
        && (!exact || isAt(row, exact[1])) && words.every((word) => has(row, word));
      if (fits) matching += 1;
      row.element.classList.toggle("off", !fits);
      row.element.classList.toggle("later", fits && matching > state.limit);
    }
    const visible = Math.min(matching, state.limit);
    const number = (value) => value.toLocaleString("en");
    parts.status.textContent = matching
      ? `${number(visible)} of ${number(matching)} matching rows shown; ${number(rows.length)} in all`
      : `No row matches; ${number(rows.length)} in all`;
    parts.more.hidden = visible === matching;
    parts.more.textContent = `Show ${number(Math.min(PAGE * 2, matching - visible))} more rows`;
  };

  const sortBy = (key, sign) => {
    state.key = key;
    state.sign = sign;
    ordered = sorted();
    parts.body.append(...ordered.map((row) => row.element));
    parts.sort.value = key;
    for (const head of parts.heads) {
      if (head.dataset.sort !== key) head.removeAttribute("aria-sort");
      else head.setAttribute("aria-sort", sign > 0 ? "ascending" : "descending");
    }
    update();
  };

  const startHeads = () => {
    for (const head of parts.heads) {
      const button = document.createElement("button");
      button.type = "button";
      button.textContent = head.textContent;
      head.replaceChildren(button);
      button.addEventListener("click", () => {
        const key = head.dataset.sort;
        sortBy(key, state.key === key ? -state.sign : KEYS[key][2]);
      });
    }
    for (const [key, [label]] of Object.entries(KEYS)) {
      const option = document.createElement("option");
      option.value = key;
      option.textContent = label;
      parts.sort.append(option);
    }
    parts.sort.addEventListener("change", () => sortBy(parts.sort.value, KEYS[parts.sort.value][2]));
  };

  const start = (report) => {
    preset = report.rows.some((row) => row.time_us !== null) ? ["time", -1] : ["order", 1];
    const table = document.getElementById("row-table");
    if (!table) return;
    const byId = (id) => document.getElementById(id);
    parts = {
      form: byId("filters"), text: byId("f-text"), op: byId("f-op"), tier: byId("f-tier"), phase: byId("f-phase"),
      loss: byId("f-loss"), sort: byId("f-sort"), status: byId("shown"), more: byId("more"), body: table.tBodies[0],
      heads: [...table.tHead.querySelectorAll("th")],
    };
    read(table, report);
    startHeads();
    const restart = () => { state.limit = PAGE; update(); };
    for (const control of [parts.text, parts.op, parts.tier, parts.phase, parts.loss]) {
      control.addEventListener("input", restart);
    }
    parts.form.addEventListener("submit", (event) => event.preventDefault());
    parts.form.addEventListener("reset", () => setTimeout(() => { state.limit = PAGE; sortBy(...preset); }));
    parts.more.addEventListener("click", () => { state.limit += PAGE * 2; update(); });
    parts.form.hidden = false;
    sortBy(...preset);
  };

  // Shows the rows of one place, for a cell of the map.
  const find = (text) => {
    if (!parts.form) return;
    parts.form.reset();
    setTimeout(() => {
      parts.text.value = rows.some((row) => row.place === text) ? `"${text}"` : text;
      update();
      document.getElementById("rows").scrollIntoView();
      if (!matchMedia("(pointer: coarse)").matches) parts.text.focus({ preventScroll: true }); // no keyboard jumps up
    });
  };
  return { start, find };
})();
