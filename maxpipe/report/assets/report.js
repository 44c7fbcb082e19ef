"use strict";
// Draws the page from the JSON in #data. Records are inserted only as text, never as HTML.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const page = document.getElementById("page");
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const COLOURS = [
    ["#2f6fb5", "#7fb1f2"], ["#c2571a", "#f2a06b"], ["#2e8548", "#77c98f"], ["#a23b86", "#e58fcd"],
    ["#7a5bc7", "#b6a1f5"], ["#8a6d12", "#d9bd5c"], ["#16838a", "#66c7cd"], ["#b23a48", "#f08b97"],
  ];
  const DASHES = [[], [7, 4], [2, 3], [9, 3, 2, 3]];
  const MARKED = {
    start: "restart", failed: "failed", preempted: "stopped", bad_step: "bad step", spike: "spike",
    rollback: "rollback", replicas_differ: "replicas differ", alert: "alert", profile: "profile",
    slow_steps: "slow steps", drift: "drift", early_stop: "early stop",
  };

  // Elements and formats.

  function el(tag, properties = {}, ...children) {
    const node = document.createElement(tag);
    for (const [name, value] of Object.entries(properties)) {
      if (name === "style") Object.assign(node.style, value);
      else if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
      else if (name in node) node[name] = value;
      else node.setAttribute(name, value);
    }
    node.append(...children.filter((child) => child !== null && child !== undefined));
    return node;
  }

  function colour(index) {
    return COLOURS[index % COLOURS.length][dark.matches ? 1 : 0];
  }

  function css(name) {
    // Resolve light-dark() by the color of an element that uses the variable.
    const probe = el("span", { style: { color: `var(${name})`, display: "none" } });
    document.body.append(probe);
    const value = getComputedStyle(probe).color;
    probe.remove();
    return value;
  }

  function format(value) {
    if (value === null || value === undefined || Number.isNaN(value)) return "-";
    if (typeof value !== "number") return String(value);
    const size = Math.abs(value);
    if (Number.isInteger(value) && size < 1e9) return value.toLocaleString("en-US");
    if (size >= 1e6) return compact(value);
    if (size !== 0 && size < 1e-3) return value.toExponential(3);
    return String(Number(value.toPrecision(5)));
  }

  function compact(value) {
    for (const [unit, size] of [["T", 1e12], ["G", 1e9], ["M", 1e6], ["k", 1e3]])
      if (Math.abs(value) >= size) return `${Number((value / size).toPrecision(4))}${unit}`;
    return String(Number(value.toPrecision(4)));
  }

  function bytes(value) {
    for (const [unit, size] of [["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10]])
      if (Math.abs(value) >= size) return `${(value / size).toFixed(2)} ${unit}`;
    return `${value} B`;
  }

  function duration(seconds) {
    if (seconds < 1e-3) return `${(1e6 * seconds).toFixed(0)} \u00b5s`;
    if (seconds < 1) return `${(1e3 * seconds).toFixed(1)} ms`;
    if (seconds < 100) return `${seconds.toFixed(1)} s`;
    if (seconds < 6000) return `${(seconds / 60).toFixed(1)} min`;
    return `${(seconds / 3600).toFixed(1)} h`;
  }

  function plural(count, name) {
    return `${format(count)} ${name}${count === 1 ? "" : "s"}`;
  }

  function table(columns, rows, numeric = []) {
    const cell = (tag, value, index) =>
      el(tag, { className: numeric.includes(index) ? "number" : String(value).length < 30 ? "short" : "" },
        value instanceof Node ? value : format(value));
    return el("div", { className: "scroll" },
      el("table", {},
        el("thead", {}, el("tr", {}, ...columns.map((name, i) => cell("th", name, i)))),
        el("tbody", {}, ...rows.map((row) => el("tr", {}, ...row.map((v, i) => cell("td", v, i)))))));
  }

  function swatch(fill) {
    return el("span", { className: "swatch", style: { background: fill } });
  }

  // Series.

  function decode(text, type) {
    const raw = Uint8Array.from(atob(text), (char) => char.charCodeAt(0));
    return Array.from(new type(raw.buffer), (value) => (Number.isNaN(value) ? null : value));
  }

  const lazy = (compute) => {
    let value, known = false;
    return () => (known ? value : ((known = true), (value = compute())));
  };

  const runs = data.runs.map((run, index) => {
    const axes = run.series.axes.map((axis) => ({
      bucket: axis.bucket,
      steps: lazy(() => decode(axis.steps, Float64Array)),
      hours: lazy(() => decode(axis.hours, Float32Array)),
    }));
    const tags = new Map();
    for (const [tag, entry] of Object.entries(run.series.tags)) {
      const values = {};
      for (const name of ["mean", "low", "high"])
        if (entry[name]) values[name] = lazy(() => decode(entry[name], Float32Array));
      tags.set(tag, { axis: axes[entry.axis], ...values });
    }
    return { ...run, index, tags };
  });

  function interpolate(xs, ys, x) {
    let low = 0, high = xs.length - 1;
    if (high < 0) return null;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (xs[middle] <= x) low = middle; else high = middle;
    }
    if (xs[high] === xs[low]) return ys[low];
    const share = Math.min(1, Math.max(0, (x - xs[low]) / (xs[high] - xs[low])));
    return ys[low] + share * (ys[high] - ys[low]);
  }

  // Return a function from steps to positions on the selected x axis.
  function positions(run) {
    if (state.x === "step") return (step) => step;
    const series = state.x === "tokens" ? run.tags.get("train/tokens") : [...run.tags.values()][0];
    if (!series) return () => null;
    const steps = series.axis.steps();
    const values = state.x === "tokens" ? series.mean() : series.axis.hours();
    return (step) => interpolate(steps, values, step);
  }

  function xValues(run, series) {
    if (state.x === "step") return series.axis.steps();
    if (state.x === "hours") return series.axis.hours();
    return series.axis.steps().map(positions(run));
  }

  // Exponential moving average without the bias towards the first value.
  function smooth(values, weight) {
    let sum = 0, norm = 0;
    return values.map((value) => {
      if (value === null) return null;
      sum = weight * sum + (1 - weight) * value;
      norm = weight * norm + (1 - weight);
      return sum / norm;
    });
  }

  // State, kept in the address so that a reload or a shared link restores it.

  const state = { x: "step", smooth: 0, log: false, hidden: [], range: null };
  try {
    const saved = JSON.parse(decodeURIComponent(location.hash.slice(1)) || "{}");
    if (["step", "hours", "tokens"].includes(saved.x)) state.x = saved.x;
    if (saved.smooth >= 0 && saved.smooth < 1) state.smooth = saved.smooth;
    state.log = saved.log === true;
    if (Array.isArray(saved.hidden)) state.hidden = saved.hidden.filter((n) => typeof n === "string");
    if (Array.isArray(saved.range) && saved.range.every(Number.isFinite)) state.range = saved.range;
  } catch { /* not a saved state, e.g. the anchor of a section */ }

  function saveState() {
    history.replaceState(null, "", `#${encodeURIComponent(JSON.stringify(state))}`);
  }

  // Charts.

  const charts = [];
  let settingRange = false;

  function metricInfo(tag) {
    const found = data.metrics.find(([pattern]) => new RegExp(pattern).test(tag));
    return found ? { unit: found[1], meaning: found[2] } : { unit: "", meaning: "" };
  }

  function chartSeries(tags) {
    const lines = [];
    for (const run of runs) {
      if (state.hidden.includes(run.name)) continue;
      tags.forEach((tag, number) => {
        const series = run.tags.get(tag);
        if (series) lines.push({ run, tag, series, number });
      });
    }
    return lines;
  }

  function build(chart) {
    const lines = chartSeries(chart.tags);
    chart.plot?.destroy();
    chart.plot = null;
    chart.node.replaceChildren();
    if (!lines.length) return;
    const positive = (values) => (state.log ? values.map((v) => (v > 0 ? v : null)) : values);
    const tables = [], series = [{ label: state.x, value: (_, v) => axisFormat(v) }], bands = [];
    for (const { run, tag, series: found, number } of lines) {
      const stroke = colour(run.index), name = runs.length > 1 ? `${run.name} ${tag}` : tag;
      const xs = xValues(run, found), values = positive(found.mean());
      if (xs.some((x) => x === null)) continue;
      const add = (ys, options) => {
        tables.push([xs, ys]);
        series.push({ spanGaps: false, points: { show: xs.length < 60 }, ...options });
      };
      const line = { stroke, width: 1.6, dash: DASHES[number % 4], value: (_, v) => format(v) };
      const smoothed = state.smooth > 0 && xs.length > 2;
      if (smoothed) add(values, { label: `${name} (raw)`, stroke, width: 1, alpha: 0.3, value: line.value });
      add(smoothed ? smooth(values, state.smooth) : values, { label: name, ...line });
      if (found.low) {
        add(positive(found.high()), { label: "maximum", stroke: "transparent", width: 0, points: { show: false } });
        add(positive(found.low()), { label: "minimum", stroke: "transparent", width: 0, points: { show: false } });
        bands.push({ series: [series.length - 2, series.length - 1], fill: `${stroke}2e` });
      }
    }
    if (!tables.length) return;
    const grid = { stroke: css("--rule"), width: 1 }, ink = css("--grey");
    const axis = { stroke: ink, grid, ticks: grid, font: "12px system-ui, sans-serif" };
    chart.plot = new uPlot({
      width: Math.max(200, chart.node.clientWidth), height: 240, series, bands,
      scales: { x: { time: false }, y: { distr: state.log ? 3 : 1 } },
      axes: [
        { ...axis, values: (_, ticks) => ticks.map(axisFormat) },
        { ...axis, size: 62, values: (_, ticks) => ticks.map((v) => (v === null ? "" : compactAxis(v))) },
      ],
      cursor: { sync: { key: "report" }, focus: { prox: 24 } },
      hooks: { setScale: [onScale], draw: [(plot) => drawMarks(plot)] },
    }, uPlot.join(tables), chart.node);
    chart.plot.over.addEventListener("dblclick", () => setRange(null));
    chart.plot.over.addEventListener("wheel", (event) => zoomWheel(event, chart.plot), { passive: false });
    if (state.range) applyRange(chart.plot);
  }

  function compactAxis(value) {
    return Math.abs(value) >= 1e4 ? compact(value)
      : Math.abs(value) < 1e-3 && value !== 0 ? value.toExponential(0) : String(Number(value.toPrecision(6)));
  }

  function axisFormat(value) {
    if (value === null || value === undefined) return "-";
    if (state.x === "hours") return `${Number(value.toPrecision(4))} h`;
    return Math.abs(value) >= 1e5 ? compact(value) : format(value);
  }

  function onScale(plot, key) {
    if (key !== "x" || settingRange || !plot.ready) return;
    const { min, max } = plot.scales.x;
    setRange([min, max], plot);
  }

  function setRange(range, source = null) {
    state.range = range;
    saveState();
    for (const { plot } of charts) if (plot && plot !== source) applyRange(plot);
  }

  function applyRange(plot) {
    settingRange = true;
    const xs = plot.data[0];
    const [min, max] = state.range || [xs[0], xs[xs.length - 1]];
    plot.batch(() => plot.setScale("x", { min, max: max > min ? max : min + 1 }));
    settingRange = false;
  }

  function zoomWheel(event, plot) {
    if (!event.ctrlKey && !event.metaKey) return;
    event.preventDefault();
    const { min, max } = plot.scales.x, factor = event.deltaY < 0 ? 0.8 : 1.25;
    const centre = plot.posToVal(event.offsetX, "x");
    setRange([centre - (centre - min) * factor, centre + (max - centre) * factor]);
  }

  const marks = lazy(() => runs.flatMap((run) => {
    let starts = 0;
    return run.events.filter((event) => event.event in MARKED && Number.isFinite(event.step))
      .filter((event) => event.event !== "start" || starts++ > 0)
      .slice(-300).map((event) => ({ run, event }));
  }));

  function drawMarks(plot) {
    if (!state.marks) return;
    const { ctx, bbox } = plot, ratio = devicePixelRatio;
    ctx.save();
    ctx.font = `${11 * ratio}px system-ui, sans-serif`;
    for (const { run, event } of marks()) {
      if (state.hidden.includes(run.name)) continue;
      const x = plot.valToPos(positions(run)(event.step), "x", true);
      if (!(x >= bbox.left && x <= bbox.left + bbox.width)) continue;
      ctx.strokeStyle = ctx.fillStyle = colour(run.index);
      ctx.setLineDash([3 * ratio, 3 * ratio]);
      ctx.beginPath();
      ctx.moveTo(x, bbox.top);
      ctx.lineTo(x, bbox.top + bbox.height);
      ctx.stroke();
      ctx.fillText(MARKED[event.event], x + 3 * ratio, bbox.top + 12 * ratio);
    }
    ctx.restore();
  }

  const visible = new IntersectionObserver((entries) => {
    for (const entry of entries) {
      const chart = charts.find((each) => each.node === entry.target);
      if (!chart) continue;
      chart.visible = entry.isIntersecting;
      if (entry.isIntersecting && chart.stale) { chart.stale = false; build(chart); }
    }
  }, { rootMargin: "300px" });
  const resized = new ResizeObserver((entries) => {
    for (const { target, contentRect } of entries) {
      const chart = charts.find((each) => each.node === target);
      if (chart?.plot && contentRect.width > 0 && Math.abs(contentRect.width - chart.plot.width) > 1)
        chart.plot.setSize({ width: contentRect.width, height: 240 });
    }
  });

  function rebuild() {
    saveState();
    for (const chart of charts) {
      if (chart.visible) build(chart); else chart.stale = true;
    }
    for (const draw of heatMaps) draw();
  }

  function chartCard(title, tags) {
    const chart = { tags, node: el("div", { className: "plot" }), plot: null, stale: true, visible: false };
    charts.push(chart);
    visible.observe(chart.node);
    resized.observe(chart.node);
    const { unit, meaning } = metricInfo(tags[0]);
    const buckets = Math.max(...chartSeries(tags).map(({ series }) => series.axis.bucket), 1);
    const note = buckets > 1 ? `mean and range of ${buckets} records per point` : "";
    return el("div", { className: "card" },
      el("h3", { title: meaning }, unit ? `${title} (${unit})` : title),
      note ? el("p", { className: "note" }, note) : null, chart.node);
  }

  function matchTags(pattern, known) {
    const expression = new RegExp(pattern);
    return known.filter((tag) => expression.test(tag));
  }

  // Sections.

  const sections = [];

  function section(title, ...children) {
    const found = children.filter(Boolean);
    if (!found.length) return;
    const id = title.toLowerCase().replace(/\W+/g, "-");
    sections.push({ title, id });
    page.append(el("section", {}, el("h2", { id }, title), ...found));
  }

  function perRun(draw) {
    return runs.map((run) => {
      const content = draw(run);
      if (!content) return null;
      const name = runs.length > 1
        ? el("h3", {}, swatch(colour(run.index)), ` ${run.name}`) : null;
      return el("div", { className: "card", style: { marginBottom: "12px" } }, name, content);
    }).filter(Boolean);
  }

  function overview() {
    const best = (run) => run.evaluations.find((row) => row.tag === "eval/loss")?.best;
    const lastOf = (run, tag) => {
      const series = run.tags.get(tag);
      return series ? series.mean().findLast((value) => value !== null) : null;
    };
    const rows = runs.map((run) => [
      el("span", {}, swatch(colour(run.index)), ` ${run.name}`),
      el("span", { className: /failed|killed/.test(run.status) ? "bad" : "" }, run.status),
      run.last_step, run.tokens === null ? null : compact(run.tokens), run.loss,
      best(run) ? `${format(best(run)[1])} (step ${best(run)[0]})` : null,
      compactOrNull(lastOf(run, "perf/tokens_per_s")), percent(lastOf(run, "perf/mfu")),
      percent(run.goodput?.productive_share), run.folder,
    ]);
    section("Runs", el("div", { className: "card" }, table(
      ["run", "status", "step", "tokens", "loss", "best eval/loss", "tokens/s", "MFU", "goodput", "folder"],
      rows, [2, 3, 4, 6, 7, 8])));
    const invalid = runs.filter((run) => run.invalid_lines);
    if (invalid.length) page.append(el("p", { className: "note bad" },
      invalid.map((run) => `${run.name}: ${run.invalid_lines} lines of metrics.jsonl are not valid records`).join("; ")));
  }

  const percent = (share) => (share === null || share === undefined ? null : `${(100 * share).toFixed(1)}%`);
  const compactOrNull = (value) => (value === null || value === undefined ? null : compact(value));

  function curves() {
    const known = [...new Set(runs.flatMap((run) => [...run.tags.keys()]))];
    const cards = [];
    for (const [title, patterns] of data.charts) {
      const tags = patterns.flatMap((pattern) => matchTags(pattern, known));
      if (tags.length) cards.push(chartCard(title, tags));
    }
    const groups = new Map();
    for (const tag of known.sort()) {
      const group = tag.split("/")[0];
      groups.set(group, [...(groups.get(group) || []), tag]);
    }
    const all = [...groups].map(([group, tags]) => {
      const grid = el("div", { className: "grid" });
      const details = el("details", { ontoggle: () => {
        if (details.open && !grid.childElementCount) grid.append(...tags.map((tag) => chartCard(tag, [tag])));
      } }, el("summary", {}, `${group}: ${plural(tags.length, "metric")}`), grid);
      return details;
    });
    section("Curves",
      el("p", { className: "note" },
        "Drag to zoom, double-click to reset, Ctrl + wheel to zoom at the cursor. All charts share the x range."),
      cards.length ? el("div", { className: "grid" }, ...cards) : el("p", {}, "No metrics are recorded yet."),
      ...all);
  }

  // Heat maps: layer x step.

  const heatMaps = [];

  function viridis(share) {
    const stops = [[68, 1, 84], [59, 82, 139], [33, 145, 140], [94, 201, 98], [253, 231, 37]];
    const place = Math.min(Math.max(share, 0), 1) * 4, low = Math.min(Math.floor(place), 3);
    return stops[low].map((value, i) => value + (place - low) * (stops[low + 1][i] - value));
  }

  function heatMap(run) {
    const { steps, rows: allRows, values } = run.layers, names = Object.keys(values).sort();
    let rows = [];
    const select = el("select", { "aria-label": "statistic", onchange: () => draw() },
      ...names.map((name) => el("option", {}, name)));
    const canvas = el("canvas", { className: "heat", role: "img" });
    const scale = el("div", { className: "scale" }), hover = el("p", { className: "note" }, "\u00a0");
    let grid = [];
    function draw() {
      grid = decode(values[select.value], Float32Array);
      rows = allRows[select.value];
      const known = grid.filter((value) => value !== null && Number.isFinite(value));
      const low = known.reduce((a, b) => Math.min(a, b), Infinity);
      const high = known.reduce((a, b) => Math.max(a, b), -Infinity);
      const log = low > 0 && high / low > 50;
      const at = (value) => {
        const [a, b, c] = log ? [value, low, high].map(Math.log) : [value, low, high];
        return c > b ? (a - b) / (c - b) : 0.5;
      };
      canvas.width = steps.length;
      canvas.height = rows.length;
      const ctx = canvas.getContext("2d"), pixels = ctx.createImageData(steps.length, rows.length);
      for (let row = 0; row < rows.length; row++) for (let column = 0; column < steps.length; column++) {
        const value = grid[column * rows.length + row];
        if (value === null || !Number.isFinite(value)) continue;
        pixels.data.set([...viridis(at(value)), 255], 4 * (row * steps.length + column));
      }
      ctx.putImageData(pixels, 0, 0);
      const bar = el("canvas", { width: 100, height: 1 }), pen = bar.getContext("2d");
      for (let i = 0; i < 100; i++) { pen.fillStyle = `rgb(${viridis(i / 99)})`; pen.fillRect(i, 0, 1, 1); }
      scale.replaceChildren(known.length ? format(low) : "no values", bar, known.length ? format(high) : "", log ? " (logarithmic)" : "");
      canvas.setAttribute("aria-label", `${select.value} by layer and step, from ${format(low)} to ${format(high)}`);
    }
    canvas.addEventListener("mousemove", (event) => {
      const column = Math.floor((event.offsetX / canvas.clientWidth) * steps.length);
      const row = Math.floor((event.offsetY / canvas.clientHeight) * rows.length);
      if (steps[column] !== undefined && rows[row] !== undefined)
        hover.textContent = `step ${format(steps[column])}, ${rows[row]}: ${format(grid[column * rows.length + row])}`;
    });
    draw();
    return el("div", {}, el("p", {}, select, " layers from top to bottom, steps from left to right"), canvas, scale, hover);
  }

  function stackedBar(parts, show) {
    const total = parts.reduce((sum, part) => sum + part.value, 0) || 1;
    return el("div", {},
      el("div", { className: "stack" }, ...parts.map((part, i) => el("span", {
        title: `${part.name}: ${show(part.value)}`,
        style: { background: colour(i), width: `${(100 * part.value) / total}%` },
      }))),
      el("div", { className: "legend" }, ...parts.map((part, i) => el("span", {},
        swatch(colour(i)), `${part.name} ${show(part.value)} (${((100 * part.value) / total).toFixed(1)}%)`))));
  }

  function pictures() {
    const first = new Map();  // runs with the same schedule share a drawing
    for (const run of runs) for (const { svg } of run.pictures) if (!first.has(svg)) first.set(svg, run);
    const own = (run) => run.pictures.filter(({ svg }) => first.get(svg) === run);
    section("Pipeline", ...perRun((run) => own(run).length ? el("div", {},
      ...own(run).map(({ title, about, svg }) => el("div", {},
        el("h3", {}, title), about ? el("pre", { className: "note" }, about) : null,
        el("div", { className: "scroll" }, el("img", { className: "picture", alt: `${title}. ${about}`,
          src: `data:image/svg+xml;base64,${svg}` }))))) : null));
  }

  function forecast() {
    section("Forecast", ...perRun((run) => {
      if (!run.forecast) return null;
      const { time, step_seconds: step, memory_bytes: memory, hardware } = run.forecast;
      const show = (write) => (term) => [term.name, ...[term.predicted, term.measured].map((value) =>
        (value === null ? null : write(value))), term.ratio === null ? null : term.ratio.toFixed(3)];
      const columns = (name) => [name, "predicted", "measured", "measured / predicted"];
      const predicted = (terms, from) => terms.slice(from).filter((term) => term.predicted > 0)
        .map((term) => ({ name: term.name, value: term.predicted }));
      return el("div", {},
        el("p", {}, `Predicted time of a step on ${hardware}`), stackedBar(predicted(time, 0), duration),
        table(columns("time of a step"), [step, ...time].map(show(duration)), [1, 2, 3]),
        el("p", {}, "Predicted memory of the train step on one device"),
        stackedBar(predicted(memory, memory.findIndex((term) => term.name.startsWith("temporary")) + 1), bytes),
        table(columns("memory of one device"), memory.map(show(bytes)), [1, 2, 3]));
    }));
  }

  function goodput() {
    section("Goodput", ...perRun((run) => run.goodput ? el("div", {},
      el("p", {}, `${duration(run.goodput.seconds)} in ${plural(run.goodput.attempts.length, "attempt")}, ` +
        `${percent(run.goodput.productive_share)} of the time spent on productive steps`),
      stackedBar(run.goodput.causes.map(({ about, seconds }) => ({ name: about, value: seconds })), duration),
      table(["attempt", "began", "from step", "to step", "ended"], run.goodput.attempts.map((each, i) =>
        [i + 1, each.begin.slice(0, 19).replace("T", " "), each.from_step, each.to_step, each.ended]), [2, 3])) : null));
  }

  function sources() {
    section("Data", ...perRun((run) => run.sources.length ? el("div", {},
      stackedBar(run.sources.map(({ name, tokens }) => ({ name, value: tokens })), compact),
      table(["source", "tokens", "epochs"], run.sources.map((each) =>
        [each.name, compact(each.tokens), each.epochs]), [1, 2])) : null));
  }

  function evaluations() {
    section("Evaluations", ...perRun((run) => run.evaluations.length ? table(
      ["metric", "first", "best", "at step", "last", "at step"], run.evaluations.map((row) =>
        [row.tag, row.first[1], row.best[1], stepLink(run, row.best[0]), row.last[1], stepLink(run, row.last[0])]),
      [1, 2, 3, 4, 5]) : null));
  }

  function samples() {
    section("Samples", ...perRun((run) => {
      if (!run.samples.length) return null;
      const shown = el("div", { className: "scroll" });
      const select = el("select", { "aria-label": "step", onchange: () => show() },
        ...run.samples.map(({ step }, i) => el("option", { value: i }, `step ${format(step)}`)));
      select.value = run.samples.length - 1;
      function show() {
        shown.replaceChildren(...run.samples[select.value].samples.map((sample) => el("pre", {},
          el("span", { className: "prompt" }, sample.prompt ?? ""), String(sample.text ?? ""),
          ..."reward" in sample ? [el("span", { className: "note" }, ` (reward ${format(sample.reward)})`)] : [])));
      }
      show();
      return el("div", {}, select, shown);
    }));
  }

  function stepLink(run, step) {
    if (!Number.isFinite(step)) return "-";
    return el("a", { href: "#curves", onclick: (event) => {
      event.preventDefault();
      const x = positions(run)(step), width = state.x === "step" ? Math.max(10, run.last_step / 50) : x / 50 || 1;
      if (x !== null) setRange([Math.max(0, x - width), x + width]);
      document.getElementById("curves")?.scrollIntoView();
    } }, format(step));
  }

  function events() {
    section("Events", ...perRun((run) => {
      if (!run.events.length) return null;
      const kinds = [...new Set(run.events.map((event) => event.event))].sort();
      const select = el("select", { "aria-label": "kind of event", onchange: () => show() },
        el("option", { value: "" }, "all events"), ...kinds.map((kind) => el("option", {}, kind)));
      const shown = el("div");
      function show() {
        const chosen = run.events.filter((event) => !select.value || event.event === select.value);
        shown.replaceChildren(table(["time", "step", "event", "details"], chosen.slice(-1000).reverse().map((event) => {
          const { time, event: kind, step, uptime, ...rest } = event;
          const details = Object.entries(rest).map(([key, value]) =>
            `${key}=${typeof value === "object" ? JSON.stringify(value) : value}`).join("  ");
          return [String(time ?? "").slice(0, 19).replace("T", " "), stepLink(run, step), kind, details.slice(0, 2000)];
        }), [1]));
      }
      show();
      return el("div", {}, el("p", {}, select), shown);
    }));
  }

  function configs() {
    const rows = data.differences.map(({ key, values }) => [key, ...values.map((value) => value ?? "(not set)")]);
    const differences = runs.length > 1 && el("div", { className: "card" },
      el("h3", {}, rows.length ? "Keys that differ" : "The configs do not differ."),
      rows.length ? table(["key", ...runs.map((run) => run.name)], rows) : null);
    const complete = runs.filter((run) => Object.keys(run.config).length).map((run) =>
      el("details", {}, el("summary", {}, `config of ${run.name}`),
        table(["key", "value"], Object.entries(run.config).map(([key, value]) =>
          [key, typeof value === "object" ? JSON.stringify(value) : String(value)]))));
    section("Config", differences, ...complete);
  }

  function toolbar() {
    const select = el("select", { onchange: () => { state.x = select.value; state.range = null; rebuild(); } },
      ...[["step", "step"], ["hours", "wall time"], ["tokens", "tokens"]].map(([value, name]) =>
        el("option", { value, selected: state.x === value }, name)));
    const shown = el("span", { className: "number" }, state.smooth.toFixed(2));
    const slider = el("input", { type: "range", min: 0, max: 0.99, step: 0.01, value: state.smooth, oninput: () => {
      state.smooth = Number(slider.value);
      shown.textContent = state.smooth.toFixed(2);
      rebuild();
    } });
    const box = (name, key) => el("label", {}, el("input", { type: "checkbox", checked: state[key],
      onchange: (event) => { state[key] = event.target.checked; rebuild(); } }), name);
    const toggles = runs.length < 2 ? [] : runs.map((run) => el("label", {}, el("input", {
      type: "checkbox", checked: !state.hidden.includes(run.name),
      onchange: (event) => {
        state.hidden = state.hidden.filter((name) => name !== run.name);
        if (!event.target.checked) state.hidden.push(run.name);
        rebuild();
      } }), swatch(colour(run.index)), run.name));
    return el("div", { className: "bar" },
      el("label", {}, "x axis", select), el("label", {}, "smoothing", slider, shown),
      box("log scale", "log"), box("events", "marks"),
      el("button", { type: "button", onclick: () => setRange(null) }, "reset zoom"), ...toggles, el("nav"));
  }

  // Page.

  state.marks = true;
  page.append(el("header", {},
    el("h1", {}, runs.map((run) => run.name).join(", ")),
    el("p", { className: "note" }, `written ${data.written.slice(0, 19).replace("T", " ")} UTC by maxpipe ${data.version}` +
      (data.refresh ? `; the page reloads every ${data.refresh} s` : ""))), toolbar());
  overview();
  curves();
  section("Layers", ...perRun((run) => (run.layers ? heatMap(run) : null)));
  pictures();
  forecast();
  goodput();
  sources();
  evaluations();
  samples();
  events();
  configs();
  page.querySelector(".bar nav").append(...sections.map(({ title, id }) => el("a", { href: `#${id}`, onclick: (event) => {
    event.preventDefault();
    document.getElementById(id).scrollIntoView();
  } }, title)));
  dark.addEventListener("change", () => location.reload());
  if (data.refresh) {
    const key = "maxpipe-scroll";
    try {
      scrollTo(0, Number(sessionStorage.getItem(key)) || 0);
      addEventListener("pagehide", () => sessionStorage.setItem(key, String(scrollY)));
    } catch { /* no storage for local files in this browser */ }
    setTimeout(() => location.reload(), 1000 * data.refresh);
  }
})();
