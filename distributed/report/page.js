"use strict";
// Draws the panels of the page with BokehJS. What is drawn was decided when the page was written: see panels.py.
(() => {
  const page = JSON.parse(document.getElementById("page-data").textContent);
  const chosen = { axis: "step", scale: "linear" };
  const hidden = new Set(); // names of lines, of all panels
  const isFinePointer = matchMedia("(pointer: fine)").matches;
  const markers = { checkpoint_saved: "circle", worker_failed: "x", node_failed: "x", node_lost: "x", node_joined: "triangle", resumed: "triangle", restarted: "diamond", preempted: "square" };
  let drawing = null; // the Bokeh document that is shown

  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const colour = (number) => css(number < 0 ? "--series-grey" : `--series-${number % 7}`);
  const first = (them) => [...them][0];
  const dash = (line) => (line.is_dashed ? "dashed" : line.color >= 7 ? "dotdash" : "solid");

  function source(data, x) {
    const columns = {};
    for (const [name, values] of Object.entries(data)) columns[name] = values.map((v) => (v === null ? NaN : v));
    columns.x = columns.x ?? columns[x];
    if (columns.step !== undefined) columns.when = data.time.map(clock);
    return new Bokeh.ColumnDataSource({ data: columns });
  }

  function clock(seconds) {
    const s = Math.round(seconds);
    const two = (n) => String(n).padStart(2, "0");
    return s < 3600 ? `${Math.floor(s / 60)}:${two(s % 60)}` : `${Math.floor(s / 3600)}:${two(Math.floor(s / 60) % 60)}:${two(s % 60)}`;
  }

  // ------------------------------------------------------------------ a figure

  function tools() {
    const zoom = new Bokeh.BoxZoomTool();
    const all = [zoom, new Bokeh.PanTool(), new Bokeh.ResetTool()];
    if (isFinePointer) all.push(new Bokeh.WheelZoomTool(), new Bokeh.SaveTool());
    return { all, drag: isFinePointer ? zoom : null };
  }

  function axisOf(panel) {
    if (panel.x !== "run") return { label: panel.x, scale: 1 };
    if (chosen.axis === "step") return { label: "step", scale: 1 };
    return { label: `time (${page.time_unit})`, scale: page.time_scale };
  }

  function newFigure(panel, height, more) {
    const { all, drag } = tools();
    const fig = Bokeh.Plotting.figure({
      height, sizing_mode: "stretch_width", tools: all, toolbar_location: "above", x_axis_label: axisOf(panel).label,
      background_fill_color: css("--card"), border_fill_color: css("--card"), outline_line_color: null,
      min_border_left: 62, min_border_right: 14, min_border_top: 4, ...more,
    });
    fig.toolbar.logo = null;
    fig.toolbar.autohide = isFinePointer;
    fig.toolbar.active_drag = drag; // a finger scrolls the page until a tool is chosen
    fig.toolbar.active_scroll = null;
    for (const axis of [...fig.xaxis, ...fig.yaxis]) styleAxis(axis);
    for (const grid of [...fig.xgrid, ...fig.ygrid]) grid.grid_line_color = css("--grid");
    return fig;
  }

  function styleAxis(axis) {
    Object.assign(axis, {
      axis_label_text_color: css("--faint"), axis_label_text_font_style: "normal", axis_label_text_font_size: "13px",
      major_label_text_color: css("--text"), major_label_text_font_size: "12px", axis_line_color: css("--line"),
      major_tick_line_color: css("--line"), minor_tick_line_color: null, axis_label_standoff: 6,
    });
  }

  function numberAxes(fig, panel) {
    if (panel.x === "run" && chosen.axis === "time") {
      first(fig.xaxis).formatter = new Bokeh.PrintfTickFormatter({ format: "%.4g" });
    } else {
      first(fig.xaxis).formatter = new Bokeh.NumeralTickFormatter({ format: "0[.]0[00]a" });
      if (panel.x === "run" || panel.more.is_whole) first(fig.xaxis).ticker = new Bokeh.BasicTicker({ min_interval: 1, desired_num_ticks: 6 });
    }
    if (panel.y.includes("per second")) first(fig.yaxis).formatter = new Bokeh.NumeralTickFormatter({ format: "0[.]0[0]a" });
    else first(fig.yaxis).formatter = new Bokeh.PrintfTickFormatter({ format: "%.4g" });
  }

  function hover(fig, renderers, rows, more) {
    const tool = new Bokeh.HoverTool({ renderers, tooltips: rows, visible: false, ...more });
    fig.add_tools(tool);
  }

  function addMarks(fig, panel) {
    const places = panel.marks.map((mark) => (chosen.axis === "step" ? mark.step : mark.time / page.time_scale));
    for (const location of new Set(places)) {
      fig.add_layout(new Bokeh.Span({ location, dimension: "height", line_color: css("--faint"), line_dash: [5, 4], line_width: 1, level: "underlay" }));
    }
  }

  function scaled(line, panel) {
    const { scale } = axisOf(panel);
    const data = { ...line.data };
    if (panel.x === "run") data.x = data[chosen.axis].map((v) => v / scale);
    return data;
  }

  // ------------------------------------------------------------------ the kinds of panels

  function lines(panel, shared) {
    const values = panel.lines.flatMap((line) => line.data.y).filter((v) => v !== null);
    const canLog = values.length > 0 && values.every((v) => v > 0);
    const isLog = chosen.scale === "log" && canLog && panel.heading !== "Scaling";
    const fig = newFigure(panel, 260, {
      y_axis_label: panel.y, y_axis_type: isLog ? "log" : "linear", ...(panel.x === "run" ? { x_range: shared } : {}),
      y_range: new Bokeh.DataRange1d({
        ...(panel.more.from === undefined ? {} : { start: panel.more.from }),
        default_span: values.reduce((most, v) => Math.max(most, Math.abs(v)), 0) || 1, // around a line that does not change
      }),
    });
    numberAxes(fig, panel);
    addMarks(fig, panel);
    const drawn = panel.lines.map((line) => {
      const data = source(scaled(line, panel), "x");
      data.data.name = new Array(data.data.y.length).fill(line.name);
      const look = { color: colour(line.color), alpha: line.is_faint ? 0.55 : 1, visible: !hidden.has(line.name) };
      const both = [];
      if (panel.more.points_only !== line.name) {
        both.push(fig.line({ field: "x" }, { field: "y" }, { source: data, line_width: line.is_faint ? 1.2 : 2, line_dash: dash(line), ...look }));
      }
      if (line.has_points) both.push(fig.scatter({ field: "x" }, { field: "y" }, { source: data, size: 6, ...look }));
      return both;
    });
    const where = panel.x === "run" ? [["step", "@step{0,0}"], ["time", "@when"]] : [[panel.x, "@x{0,0}"]];
    const texts = panel.lines.some((line) => line.data.text) ? [["", "@text"]] : [];
    hover(fig, drawn.map((both) => both[both.length - 1]), [["", "@name"], ...where, [panel.y, "@y{%.5g}"], ...texts], {
      formatters: { "@y": "printf" }, point_policy: "snap_to_data", line_policy: "nearest",
    });
    return fig;
  }

  function areas(panel, shared) {
    const fig = newFigure(panel, 260, { y_axis_label: panel.y, x_range: shared, y_range: new Bokeh.DataRange1d({ start: 0 }) });
    numberAxes(fig, panel);
    addMarks(fig, panel);
    const shown = panel.lines.filter((line) => !hidden.has(line.name));
    let below = null;
    for (const line of shown) {
      const data = scaled(line, panel);
      const own = data.y.map((v) => v ?? 0);
      const y1 = below === null ? own.map(() => 0) : below;
      const y2 = own.map((v, i) => v + y1[i]);
      below = y2;
      const its = source({ ...data, y1, y2, own, name: own.map(() => line.name) }, "x");
      fig.varea({ field: "x" }, { field: "y1" }, { field: "y2" }, { source: its, fill_color: colour(line.color), fill_alpha: 1 });
      const edge = fig.line({ field: "x" }, { field: "y2" }, { source: its, color: colour(line.color), line_width: 1 });
      hover(fig, [edge], [["", "@name"], ["step", "@step{0,0}"], ["ms", "@own{%.4g}"]], { formatters: { "@own": "printf" } });
    }
    return fig;
  }

  function short(name, length) {
    return name.length <= length ? name : `${name.slice(0, Math.ceil(length / 2) - 1)}…${name.slice(-Math.floor(length / 2))}`;
  }

  // Each name as short as the screen needs it; Bokeh takes no other label for a category than its name.
  function shortened(names) {
    const found = new Map();
    for (const name of names) {
      let text = short(name, innerWidth < 600 ? 14 : 30);
      while ([...found.values()].includes(text)) text += "\u200b"; // cannot be seen
      found.set(name, text);
    }
    return found;
  }

  function categories(fig) {
    first(fig.ygrid).grid_line_color = null;
    first(fig.yaxis).major_tick_line_color = null;
  }

  function bars(panel) {
    const names = shortened([...panel.more.rows].reverse());
    const fig = newFigure(panel, 84 + 30 * names.size, {
      y_range: new Bokeh.FactorRange({ factors: [...names.values()] }), x_range: new Bokeh.DataRange1d({ start: 0 }), min_border_left: 10,
    });
    categories(fig);
    first(fig.xaxis).formatter = new Bokeh.PrintfTickFormatter({ format: "%.4g" });
    const ends = new Map();
    for (const line of panel.lines.filter((each) => !hidden.has(each.name))) {
      const left = line.data.y.map((name) => ends.get(name) ?? 0);
      const right = line.data.x.map((v, i) => (v ?? 0) + left[i]);
      line.data.y.forEach((name, i) => ends.set(name, right[i]));
      const y = line.data.y.map((name) => names.get(name));
      const its = source({ left, right, y, row: line.data.y, own: line.data.x, name: right.map(() => line.name), x: right }, "x");
      const bar = fig.hbar({ y: { field: "y" }, left: { field: "left" }, right: { field: "right" }, height: 0.7, source: its, fill_color: colour(line.color), line_color: css("--card") });
      hover(fig, [bar], [["", "@row"], ["@name", "@own{%.4g}"]], { formatters: { "@own": "printf" } });
    }
    return fig;
  }

  function events(panel, shared) {
    const names = shortened([...panel.more.rows].reverse());
    const fig = newFigure(panel, 74 + 24 * names.size, { y_range: new Bokeh.FactorRange({ factors: [...names.values()] }), x_range: shared, min_border_left: 10 });
    categories(fig);
    numberAxes(fig, { ...panel, y: "" });
    first(fig.yaxis).formatter = new Bokeh.CategoricalTickFormatter();
    const drawn = panel.lines.map((line) => {
      const its = source({ ...scaled(line, panel), y: line.data.step.map(() => names.get(line.name)) }, "x");
      its.data.marker = line.data.kind.map((kind) => markers[kind] ?? "square_pin");
      return fig.scatter({ field: "x" }, { field: "y" }, {
        source: its, marker: { field: "marker" }, size: 11, color: colour(line.color), fill_alpha: 0.6, line_width: 2, visible: !hidden.has(line.name),
      });
    });
    hover(fig, drawn, [["", "@text"], ["step", "@step{0,0}"], ["time", "@when"]]);
    return fig;
  }

  // From the best to the worst: cividis, made for colour-blind readers.
  const cividis = ["#fde725", "#e1cc55", "#c3b369", "#a69d75", "#8b8779", "#727274", "#575d6d", "#3b496c", "#123570"];

  function parallel(panel) {
    const { axes, trials } = panel.more;
    const last = axes.length - 1;
    const fig = newFigure(panel, 330, {
      x_range: new Bokeh.Range1d({ start: -0.35, end: last + 0.55 }), y_range: new Bokeh.Range1d({ start: -0.06, end: 1.08 }),
      x_axis_label: null, min_border_left: 10, tools: [new Bokeh.SaveTool()],
    });
    fig.toolbar.active_drag = null;
    first(fig.yaxis).visible = false;
    first(fig.xgrid).grid_line_color = null;
    first(fig.ygrid).grid_line_color = null;
    first(fig.xaxis).ticker = new Bokeh.FixedTicker({ ticks: axes.map((_, i) => i) });
    first(fig.xaxis).major_label_overrides = new Map(axes.map((axis, i) => [i, short(axis.name, 18)]));
    const isDark = matchMedia("(prefers-color-scheme: dark)").matches;
    const shades = isDark ? cividis.slice(0, 7) : cividis.slice(2); // what can be seen on the ground
    const shade = (place) => shades[Math.round((place / Math.max(trials.length - 1, 1)) * (shades.length - 1))];
    const order = trials.map((trial, place) => ({ ...trial, place })).reverse(); // the best lies on top
    const data = new Bokeh.ColumnDataSource({ data: {
      xs: order.map(() => axes.map((_, i) => i)), ys: order.map((trial) => trial.y), text: order.map((trial) => trial.text),
      value: order.map((trial) => trial.value), shade: order.map((trial) => (trial.place ? shade(trial.place) : css("--series-1"))),
      width: order.map((trial) => (trial.place ? 1.6 : 3.5)),
    } });
    const drawn = fig.multi_line({ field: "xs" }, { field: "ys" }, {
      source: data, line_color: { field: "shade" }, line_width: { field: "width" }, hover_line_width: 4,
    });
    const ticks = axes.flatMap((axis, i) => axis.ticks.map(([y, text]) => ({ x: i, y, text: short(text, 12) })));
    fig.segment({ x0: axes.map((_, i) => i), y0: axes.map(() => 0), x1: axes.map((_, i) => i), y1: axes.map(() => 1), line_color: css("--faint"), line_width: 1.2 });
    fig.text(ticks.map((t) => t.x), ticks.map((t) => t.y), ticks.map((t) => t.text), {
      x_offset: 6, text_baseline: "middle", text_font_size: "12px", text_color: css("--text"), background_fill_color: css("--card"), background_fill_alpha: 0.8, padding: 2,
    });
    hover(fig, [drawn], [["", "@text"], [panel.more.metric, "@value{%.5g}"]], { formatters: { "@value": "printf" }, line_policy: "nearest" });
    return fig;
  }

  // ------------------------------------------------------------------ the page

  const kinds = { lines, areas, bars, events, parallel };

  function legend(panel, element) {
    element.replaceChildren();
    const seen = new Map();
    for (const line of panel.lines) if (line.in_legend && !seen.has(line.name)) seen.set(line.name, line);
    if (panel.kind === "events" && panel.more.rows.length === seen.size) return; // its axis says the names
    for (const [name, line] of seen) {
      const button = document.createElement("button");
      const swatch = document.createElement("i");
      swatch.style.borderTopColor = colour(line.color);
      swatch.style.borderTopStyle = line.is_dashed ? "dashed" : "solid";
      const value = document.createElement("b");
      value.textContent = line.label;
      button.append(swatch, document.createTextNode(name), value);
      button.setAttribute("aria-pressed", String(!hidden.has(name)));
      button.title = "show or hide";
      button.onclick = () => { if (!hidden.delete(name)) hidden.add(name); draw(); };
      element.append(button);
    }
  }

  async function draw() {
    if (drawing !== null) drawing.clear();
    Bokeh.documents.splice(0); // it keeps every document that was shown
    drawing = new Bokeh.Document();
    const shared = new Bokeh.DataRange1d({ range_padding: 0.06 });
    const targets = [];
    page.panels.forEach((panel, number) => {
      const element = document.getElementById(`panel-${number}`);
      legend(panel, element.querySelector(".legend"));
      const target = element.querySelector(".plot");
      target.replaceChildren();
      if (!panel.lines.length && !(panel.more.trials ?? []).length) return;
      if (panel.kind === "parallel") target.style.minWidth = `${96 * panel.more.axes.length}px`;
      drawing.add_root(kinds[panel.kind](panel, shared));
      targets.push(target);
    });
    await Bokeh.embed.add_document_standalone(drawing, document.body, targets);
    document.body.dataset.drawn = String(Number(document.body.dataset.drawn ?? 0) + 1);
  }

  function choose(control, value) {
    chosen[control] = value;
    for (const button of document.querySelectorAll(`[data-control="${control}"]`)) {
      button.setAttribute("aria-pressed", String(button.dataset.value === value));
    }
    draw();
  }

  for (const button of document.querySelectorAll("[data-control]")) {
    button.onclick = () => choose(button.dataset.control, button.dataset.value);
  }
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  for (const cell of document.querySelectorAll("[data-color]")) cell.style.borderTopColor = `var(--series-${cell.dataset.color % 7})`;
  draw();
})();
