"use strict";
// Figures, sorting, a filter, the theme. Without it the page still has every number.
(() => {
  const root = document.documentElement;
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const isDark = () => (root.dataset.theme ? root.dataset.theme === "dark" : dark.matches);
  const isNarrow = () => innerWidth < 640;
  const colour = (name) => getComputedStyle(root).getPropertyValue(name).trim();

  function config(legendColumns = isNarrow() ? 2 : 8) {
    const [ink, soft, line] = ["--ink", "--soft", "--line"].map(colour);
    const font = getComputedStyle(document.body).fontFamily;
    return {
      background: "transparent", font, view: { stroke: null },
      axis: { labelColor: soft, titleColor: ink, gridColor: line, domainColor: line, tickColor: line, labelFontSize: 12, titleFontSize: 12, titleFontWeight: 500, labelLimit: isNarrow() ? 130 : 400, labelSeparation: 6 },
      legend: { labelColor: ink, titleColor: soft, orient: "top", labelFontSize: 12, labelLimit: isNarrow() ? 130 : 180, columns: legendColumns, layout: { top: { direction: "vertical" } } },
      header: { labelColor: ink, labelFontSize: 13, labelFontWeight: 600 }, text: { color: ink, fontSize: 12 }, tick: { color: ink }, rule: { color: soft }, line: { color: soft },
    };
  }

  const MOST_SHAPES = 1500; // beyond, elements of their own are slow
  const MARGIN = 84; // of a panel, for its axis and the gap
  function sized(content, place) {
    if (!content.facet) return { ...content, width: "container", autosize: { type: "fit-x", contains: "padding" } };
    const panels = new Set(content.data.values.map((row) => row[content.facet.field])).size;
    const columns = isNarrow() ? 1 : Math.min(2, panels);
    return { ...content, columns, spec: { ...content.spec, width: place.clientWidth / columns - MARGIN } };
  }
  async function draw() {
    const errors = [];
    for (const holder of document.querySelectorAll("script[data-figure]")) {
      const key = holder.dataset.figure;
      const place = document.querySelector(`div.plot[data-figure="${key}"]`);
      if (!place.offsetParent) continue; // another choice shows it
      const about = document.querySelector(`#figure-${key} h3`).textContent;
      const content = JSON.parse(holder.textContent);
      if (isNarrow() && content.layer) content.layer = content.layer.filter(({ mark }) => mark.type !== "text"); // a tap names a point
      const spec = { ...sized(content, place), description: about, config: content.facet && isNarrow() ? config(1) : config() };
      const options = { actions: false, renderer: content.data.values.length > MOST_SHAPES ? "canvas" : "svg", ast: true, tooltip: { theme: isDark() ? "dark" : "light" } };
      await acbenchEmbed(place, spec, options).catch((error) => errors.push(`${key}: ${error}`));
    }
    document.body.dataset.drawn = errors.length ? errors.join("; ") : "all";
    if (errors.length) throw new Error(errors.join("; "));
  }

  const button = document.getElementById("theme");
  const label = () => { button.textContent = isDark() ? "Light" : "Dark"; };
  button.hidden = false;
  button.addEventListener("click", () => { root.dataset.theme = isDark() ? "light" : "dark"; label(); redraw(); });
  const redraw = () => { if (window.acbenchEmbed) draw(); };
  dark.addEventListener("change", () => { label(); redraw(); });
  label();

  function value(row, column) {
    const cell = row.cells[column], number = cell.querySelector("data");
    return number ? Number(number.value) : cell.textContent;
  }
  function sort(table, column, heading) {
    const order = heading.getAttribute("aria-sort") === "ascending" ? "descending" : "ascending";
    for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
    heading.setAttribute("aria-sort", order);
    const sign = order === "ascending" ? 1 : -1;
    const keyed = [...table.tBodies[0].rows].map((row) => [value(row, column), row]);
    keyed.sort(([a], [b]) => {
      if (typeof a !== typeof b) return typeof a === "number" ? -1 : 1;
      return sign * (typeof a === "number" ? a - b : a.localeCompare(b));
    });
    table.tBodies[0].append(...keyed.map(([, row]) => row));
  }
  const choice = document.getElementById("chapter"), limits = [];
  function choose() {
    for (const part of document.querySelectorAll("div[data-chapter]")) part.hidden = part.dataset.chapter !== choice.value;
    for (const limit of limits) limit();
    redraw();
  }
  const MOST_ROWS = 200;
  for (const table of document.querySelectorAll("table.sortable")) {
    [...table.tHead.rows[0].cells].forEach((heading, column) => {
      const click = document.createElement("button");
      click.type = "button";
      click.textContent = heading.textContent;
      click.addEventListener("click", () => { sort(table, column, heading); limit(); });
      heading.replaceChildren(click);
    });
    const rows = table.tBodies[0].rows, tools = document.createElement("div");
    tools.className = "tools";
    const name = document.createElement("label"), input = document.createElement("input"), more = document.createElement("button");
    const count = document.createElement("span");
    count.setAttribute("role", "status");
    input.type = "search";
    name.append("Filter rows ", input);
    more.type = "button";
    let all = rows.length <= MOST_ROWS;
    function limit() {
      const wanted = input.value.toLowerCase().split(/\s+/).filter(Boolean);
      let shown = 0, found = 0;
      for (const row of rows) {
        const text = wanted.length ? row.textContent.toLowerCase() : "";
        const fits = (!choice || !row.dataset.chapter || row.dataset.chapter === choice.value) && wanted.every((word) => text.includes(word));
        found += fits;
        const visible = fits && (all || shown < MOST_ROWS);
        shown += visible;
        row.classList.toggle("more", !visible);
      }
      table.classList.add("limited");
      more.hidden = shown === found;
      more.textContent = `Show all ${found}`;
      count.textContent = `${shown} of ${rows.length} rows`;
    }
    input.addEventListener("input", limit);
    more.addEventListener("click", () => { all = true; limit(); });
    tools.append(name, count, more);
    table.closest(".scroll").before(tools);
    limits.push(limit);
    limit();
  }

  document.addEventListener("mouseover", ({ target }) => {
    if (target.tagName === "DATA" && !target.title) target.title = `${target.value} (${target.dataset.p})`;
  });

  function reveal() {
    const aim = location.hash && document.getElementById(location.hash.slice(1));
    if (aim && aim.tagName === "DETAILS") aim.open = true;
  }
  addEventListener("hashchange", reveal);
  reveal();
  const refresh = Number(document.body.dataset.refreshS) * 1000;
  let touched = -Infinity; // who reads, scrolls or types is not interrupted
  for (const kind of ["pointermove", "pointerdown", "keydown", "wheel", "touchmove"]) addEventListener(kind, () => { touched = performance.now(); }, { passive: true });
  const isIdle = () => !document.hidden && performance.now() - touched > 10 * refresh;
  if (refresh) setInterval(() => { if (isIdle()) location.reload(); }, refresh);
  if (choice) {
    choice.parentElement.hidden = false;
    choice.addEventListener("change", choose);
    choose();
  } else redraw();
})();
