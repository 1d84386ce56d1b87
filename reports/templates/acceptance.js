(() => {
  const { data, say } = page;
  const viewers = new Map();
  document.addEventListener("relabel", () => { for (const viewer of viewers.values()) viewer.relabel(); });

  // ---- the packed curves --------------------------------------------------------------------------------------------
  const bytesOf = (text) => Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0)).buffer;
  const stepsOf = (packed) => Array.isArray(packed) ? Array.from({ length: packed[1] }, (_, i) => packed[0] + i) : Array.from(new Int32Array(bytesOf(packed)));
  const floatsOf = (text) => Array.from(text[0] === "f" ? new Float32Array(bytesOf(text.slice(1))) : new Float64Array(bytesOf(text.slice(1))));
  const columns = [];
  const columnOf = (number) => columns[number] ??= floatsOf(data.columns[number]);
  const unpacked = new Map();
  const curveOf = (leg, rank, reference) => {
    const key = leg + "/" + rank;
    if (unpacked.has(key)) return unpacked.get(key);
    const packed = data.legs[leg][rank];
    if (!packed) return null;
    const curve = { steps: stepsOf(packed[0]), thin: Boolean(packed[4]), at: {} };
    for (const [place, metric] of ["loss", "lr", "grad_norm"].entries()) {
      let values = [];
      const found = packed[place + 1];
      if (found === "=") {
        const other = curveOf(reference, rank, null).at[metric];
        values = curve.steps.map((step) => other.get(step));
      } else if (found !== "") {
        const [column, first] = [found].flat();
        values = columnOf(column).slice(first || 0, (first || 0) + curve.steps.length);
      }
      curve.at[metric] = new Map(curve.steps.map((step, i) => [step, values.length ? values[i] : NaN]));
    }
    unpacked.set(key, curve);
    return curve;
  };
  // The bits of a float as Python's float.hex() writes them.
  const hexOf = (value) => {
    if (!Number.isFinite(value)) return String(value);
    const view = new DataView(new ArrayBuffer(8));
    view.setFloat64(0, value);
    const high = view.getUint32(0), exponent = (high >>> 20) & 2047;
    const digits = (high & 0xfffff).toString(16).padStart(5, "0") + view.getUint32(4).toString(16).padStart(8, "0");
    const sign = high >>> 31 ? "-" : "";
    if (exponent === 0) return /^0+$/.test(digits) ? sign + "0x0.0p+0" : `${sign}0x0.${digits}p-1022`;
    const power = exponent - 1023;
    return `${sign}0x1.${digits}p${power < 0 ? "" : "+"}${power}`;
  };

  // ---- drawing ------------------------------------------------------------------------------------------------------
  // A screen that is too narrow for the wide chart gets one of its own width, with letters of the same size.
  const WIDE = 960, LEAST_WIDE = 640, RIGHT = 18;
  const MARKERS = { dot: "m-2 0a2 2 0 1 0 4 0a2 2 0 1 0-4 0", ring: "m-4.5 0a4.5 4.5 0 1 0 9 0a4.5 4.5 0 1 0-9 0", cross: "m-4 -4l8 8m0 -8l-8 8", triangle: "m0 -5l5 9h-10z", square: "m-4 -4h8v8h-8z", plus: "m-5 0h10m-5 -5v10" };
  const node = (name, attributes, text) => {
    const made = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const key in attributes) made.setAttribute(key, attributes[key]);
    if (text !== undefined) made.textContent = text;
    return made;
  };
  const element = (name, attributes, text) => {
    const made = document.createElement(name);
    for (const key in attributes) made.setAttribute(key, attributes[key]);
    if (text !== undefined) made.textContent = text;
    return made;
  };
  const ticksOf = (low, high, wanted) => {
    const raw = (high - low) / wanted, power = 10 ** Math.floor(Math.log10(raw));
    const size = [1, 2, 5, 10].find((factor) => factor * power >= raw * (1 - 1e-9)) * power;
    const found = [];
    for (let i = Math.ceil(low / size - 1e-9); i * size <= high + size * 1e-9; i++) found.push(i * size);
    return { found, size };
  };
  const tickText = (tick, size) => tick === 0 ? "0" : Math.abs(size) < 1e-3 || Math.abs(tick) >= 1e6 ? tick.toPrecision(3).replace(/\.?0+(e|$)/, "$1") : tick.toFixed(Math.max(0, -Math.floor(Math.log10(size))));
  const symlog = (values) => {
    const sizes = values.map(Math.abs).filter((size) => size > 0 && Number.isFinite(size));
    if (!sizes.length) return { unit: () => 0.5, ticks: [[0, "0"]] };
    const smallest = Math.floor(Math.log10(sizes.reduce((a, b) => Math.min(a, b))));
    const largest = Math.max(Math.ceil(Math.log10(sizes.reduce((a, b) => Math.max(a, b)))), smallest + 1);
    const unit = (value) => value === 0 ? 0.5 : 0.5 + Math.sign(value) * 0.5 * Math.min(Math.max(0.4 + 0.6 * (Math.log10(Math.abs(value)) - smallest) / (largest - smallest), 0), 1);
    const ticks = [[0, "0"]];
    for (const edge of new Set([smallest, largest])) ticks.push([10 ** edge, "+1e" + edge], [-(10 ** edge), "−1e" + edge]);
    return { unit, ticks };
  };
  const linear = (values, log) => {
    let shown = values.filter(Number.isFinite);
    const scale = log ? Math.log10 : (value) => value;
    if (log) shown = shown.filter((value) => value > 0);
    if (!shown.length) return { unit: () => 0.5, ticks: [] };
    let low = scale(shown.reduce((a, b) => Math.min(a, b))), high = scale(shown.reduce((a, b) => Math.max(a, b)));
    if (low === high) { const spread = Math.abs(low) || 1; low -= spread / 2; high += spread / 2; }
    const room = (high - low) * 0.05;
    low -= room; high += room;
    const { found, size } = ticksOf(low, high, 4);
    const unit = (value) => log && value <= 0 ? NaN : (scale(value) - low) / (high - low);
    return { unit, ticks: found.map((tick) => log ? [10 ** tick, (10 ** tick).toPrecision(3)] : [tick, tickText(tick, size)]) };
  };

  // Within a case the viewer is that case's.
  const caseOf = (box) => data.cases[box.dataset.case || box.closest(".body").id];

  class Viewer {
    constructor(box) {
      this.box = box;
      this.case = caseOf(box);
      this.rank = box.dataset.rank ?? "0";
      this.log = false;
      this.step = null;
      this.load();
      this.range = [...this.whole];
      this.metrics = ["loss", "lr", "grad_norm"].filter((metric) => this.legs.some((leg) => [...leg.curve.at[metric].values()].some((value) => !Number.isNaN(value))));
      this.shown = new Set(box.dataset.metrics === "all" ? this.metrics : this.metrics.slice(0, 1));
      this.build();
    }

    load() {
      const all = this.case.legs.map(([id, label, look]) => ({ id, label, style: data.looks[look][0], marker: data.looks[look][1], curve: curveOf(id, this.rank, this.case.ref) })).filter((leg) => leg.curve);
      this.legs = all;
      this.reference = all.find((leg) => leg.id === this.case.ref) ?? null;
      this.steps = [...new Set(all.flatMap((leg) => leg.curve.steps))].sort((a, b) => a - b);
      this.whole = [this.steps[0] - 0.5, this.steps[this.steps.length - 1] + 0.5];
    }

    ranks() { return [...new Set(this.case.legs.flatMap(([id]) => Object.keys(data.legs[id]).filter((rank) => data.legs[id][rank])))].sort((a, b) => a - b); }

    build() {
      this.box.replaceChildren();
      this.bar = element("div", { class: "bar", role: "group" });
      this.readout = element("div", { class: "readout", "aria-live": "polite" });
      this.figures = element("div", {});
      this.box.append(this.bar, this.readout, this.figures);
      this.relabel();
      new ResizeObserver(() => { if (this.fitting() !== this.width) this.draw(); }).observe(this.box);
    }

    fitting() {
      const room = this.box.clientWidth;
      return room && room < LEAST_WIDE ? room : WIDE;
    }

    relabel() {
      this.bar.replaceChildren();
      for (const metric of this.metrics) {
        const label = element("label", {}), check = element("input", { type: "checkbox" });
        check.checked = this.shown.has(metric);
        check.addEventListener("change", () => { if (check.checked) this.shown.add(metric); else this.shown.delete(metric); this.draw(); });
        label.append(check, " " + say(metric));
        this.bar.append(label);
      }
      const log = element("label", {}), check = element("input", { type: "checkbox", class: "log" });
      check.checked = this.log;
      check.addEventListener("change", () => { this.log = check.checked; this.draw(); });
      log.append(check, " " + say("log_scale"));
      this.bar.append(log);
      if (this.ranks().length > 1) {
        const label = element("label", {}, say("rank") + " "), select = element("select", { class: "rank" });
        for (const rank of this.ranks()) {
          const option = element("option", { value: rank }, rank);
          option.selected = rank === this.rank;
          select.append(option);
        }
        select.addEventListener("change", () => { this.rank = select.value; this.load(); this.draw(); });
        label.append(select);
        this.bar.append(label);
      }
      for (const [name, act] of [["zoom_in", () => this.zoom(0.5)], ["zoom_out", () => this.zoom(2)], ["reset", () => this.reset()]]) {
        const button = element("button", { type: "button", class: name }, say(name));
        button.addEventListener("click", act);
        this.bar.append(button);
      }
      if (this.legs.some((leg) => leg.curve.thin)) this.bar.append(element("span", { class: "soft" }, say("thinned")));
      this.draw();
    }

    reset() { this.range = [...this.whole]; this.draw(); }

    zoom(factor) {
      const middle = this.step !== null && this.step >= this.range[0] && this.step <= this.range[1] ? this.step : (this.range[0] + this.range[1]) / 2;
      const half = Math.max((this.range[1] - this.range[0]) * factor / 2, 1);
      this.setRange(middle - half, middle + half);
    }

    setRange(low, high) {
      this.range = [Math.max(low, this.whole[0]), Math.min(high, this.whole[1])];
      if (this.range[1] - this.range[0] < 1) this.range = [this.range[0] - 0.5, this.range[1] + 0.5];
      this.draw();
    }

    x(step) { return this.left + 12 + (this.width - RIGHT - this.left - 24) * (step - this.range[0]) / (this.range[1] - this.range[0]); }

    stepAt(x) { return this.range[0] + (x - this.left - 12) / (this.width - RIGHT - this.left - 24) * (this.range[1] - this.range[0]); }

    draw() {
      this.figures.replaceChildren();
      this.cursors = [];
      this.width = this.fitting();
      this.left = this.width < WIDE ? 64 : 92;
      for (const metric of this.metrics) {
        if (!this.shown.has(metric)) continue;
        const figure = element("figure", { "data-metric": metric });
        figure.append(element("figcaption", {}, say(metric)));
        const values = this.legs.map((leg) => ({ leg, at: leg.curve.at[metric] }));
        this.panel(figure, metric, values, false);
        if (this.reference) {
          const base = this.reference.curve.at[metric];
          const deltas = values.filter(({ leg }) => leg !== this.reference).map(({ leg, at }) => ({ leg, at: new Map([...at].filter(([step]) => base.has(step)).map(([step, value]) => [step, Object.is(value, base.get(step)) ? 0 : value - base.get(step)])) }));
          if (deltas.length) this.panel(figure, metric, deltas, true);
        }
        this.figures.append(figure);
      }
      this.point(this.step);
    }

    panel(figure, metric, curves, isDifference) {
      const height = isDifference ? 150 : 250, top = isDifference ? 10 : 30, bottom = height - (isDifference || !this.reference ? 42 : 26);
      const visible = curves.map(({ leg, at }) => ({ leg, points: this.visible(leg, at) }));
      const all = visible.flatMap(({ points }) => points.map(([, value]) => value));
      const scale = isDifference ? symlog(all) : linear(all, this.log);
      const y = (value) => bottom - 8 - (bottom - top - 16) * scale.unit(value);
      const title = `${say(metric)}${isDifference ? ": " + say("difference") : ""}`;
      const svg = node("svg", { class: (this.width < WIDE ? "chart fitting" : "chart") + (visible.some(({ points }) => points.length > 400) ? " thin" : ""), viewBox: `0 0 ${this.width} ${height}`, role: "img", tabindex: "0", "aria-label": title });
      for (const [first, last] of this.case.bands || []) {
        const from = Math.max(this.x(first - 0.5), this.left), to = Math.min(this.x(last + 0.5), this.width - RIGHT);
        if (to > from) svg.append(node("rect", { class: "band", x: from, y: top, width: to - from, height: bottom - top }));
      }
      for (const [value, text] of scale.ticks) {
        svg.append(node("path", { class: isDifference && value === 0 ? "zero" : "grid", d: `M${this.left} ${y(value)}H${this.width - RIGHT}` }), node("text", { class: "tick", x: this.left - 8, y: y(value) + 4, "text-anchor": "end" }, text));
      }
      svg.append(node("path", { class: "axis", d: `M${this.left} ${bottom}H${this.width - RIGHT}` }));
      for (const step of ticksOf(this.range[0], this.range[1], this.width < WIDE ? 5 : 12).found) {
        if (!Number.isInteger(step)) continue;
        svg.append(node("path", { class: "axis", d: `M${this.x(step)} ${bottom}v5` }), node("text", { class: "tick", x: this.x(step), y: bottom + 19, "text-anchor": "middle" }, step));
      }
      if (isDifference) svg.append(node("text", { class: "tick", x: this.left + 6, y: top + 12 }, `− ${this.reference.label}`));
      if (isDifference || !this.reference) svg.append(node("text", { class: "label", x: (this.left + this.width - RIGHT) / 2, y: bottom + 36 }, say("step")));
      this.marks(svg, top, bottom, isDifference);
      for (const { leg, points } of visible) this.curve(svg, leg, points, y);
      const cursor = node("path", { class: "cursor", d: "" }), selection = node("rect", { class: "selection", y: top, height: bottom - top, x: 0, width: 0 });
      svg.append(cursor, selection);
      this.cursors.push({ cursor, top, bottom });
      this.listen(svg, selection);
      const wide = element("div", { class: "wide" });
      wide.append(svg);
      figure.append(wide);
    }

    visible(leg, at) {
      const found = [], [low, high] = this.range;
      const steps = leg.curve.steps;
      for (let i = 0; i < steps.length; i++) {
        // One point beyond each edge, so that the line runs on.
        if ((steps[i + 1] ?? Infinity) < low || (steps[i - 1] ?? -Infinity) > high) continue;
        if (at.has(steps[i])) found.push([steps[i], at.get(steps[i])]);
      }
      return found;
    }

    marks(svg, top, bottom, isDifference) {
      const rows = [];
      const put = (at, text, style) => {
        if (at < this.range[0] || at > this.range[1]) return;
        const x = this.x(at), half = text.length * 3.8 + 6;
        const row = rows.findIndex((end) => end <= x - half);
        const place = row < 0 ? rows.length : row;
        rows[place] = x + half;
        svg.append(node("path", { class: "mark " + style, d: `M${x} ${isDifference ? top : 8 + 14 * place + 8}V${bottom}` }));
        if (!isDifference) svg.append(node("text", { class: "tag " + style, x, y: 12 + 14 * place, "text-anchor": "middle" }, text));
      };
      const kills = this.case.kills || [];
      const all = kills.map((step, i) => [step + 0.5, kills.length > 1 ? `kill ${i + 1}` : "kill", "kill"]);
      if (this.case.difference) all.push([this.case.difference[0], say("divergence"), "first-difference"]);
      for (const mark of all.sort((a, b) => a[0] - b[0])) put(...mark);
    }

    curve(svg, leg, points, y) {
      let path = "", previous = null;
      const drawn = [];
      for (const [step, value] of points) {
        const height = y(value);
        if (!Number.isFinite(height)) { previous = null; continue; }
        const x = this.x(step);
        path += `${previous !== null && (leg.curve.thin || previous === step - 1) ? "L" : "M"}${x.toFixed(1)} ${height.toFixed(1)}`;
        previous = step;
        drawn.push([x, height]);
      }
      const clip = `clip-${Viewer.count++}`;
      const frame = node("clipPath", { id: clip });
      frame.append(node("rect", { x: this.left, y: 0, width: this.width - this.left - RIGHT, height: 400 }));
      const group = node("g", { "clip-path": `url(#${clip})` });
      group.append(node("path", { class: "curve " + leg.style, d: path }));
      if (drawn.length <= 90) for (const [x, height] of drawn) group.append(node("path", { class: "marker " + leg.style, d: `M${x.toFixed(1)} ${height.toFixed(1)}${MARKERS[leg.marker]}` }));
      svg.append(frame, group);
    }

    listen(svg, selection) {
      let from = null;
      const place = (event) => {
        const box = svg.getBoundingClientRect();
        return (event.clientX - box.left) * this.width / box.width;
      };
      svg.addEventListener("pointermove", (event) => {
        const x = place(event);
        this.point(this.nearest(this.stepAt(x)));
        if (from === null) return;
        selection.setAttribute("x", Math.min(from, x));
        selection.setAttribute("width", Math.abs(x - from));
      });
      svg.addEventListener("pointerdown", (event) => { if (event.button === 0) { from = place(event); svg.setPointerCapture(event.pointerId); } });
      svg.addEventListener("pointerup", (event) => {
        if (from === null) return;
        const to = place(event), start = from;
        from = null;
        selection.setAttribute("width", 0);
        if (Math.abs(to - start) > 8) this.setRange(this.stepAt(Math.min(start, to)), this.stepAt(Math.max(start, to)));
      });
      svg.addEventListener("dblclick", () => this.reset());
      svg.addEventListener("keydown", (event) => {
        const index = this.step === null ? -1 : this.steps.indexOf(this.step), far = event.shiftKey ? 10 : 1;
        const acts = {
          ArrowRight: () => this.point(this.steps[Math.min(index + far, this.steps.length - 1)]),
          ArrowLeft: () => this.point(this.steps[Math.max(index - far, 0)]),
          Home: () => this.point(this.steps[0]),
          End: () => this.point(this.steps[this.steps.length - 1]),
        };
        const zooms = { "+": () => this.zoom(0.5), "=": () => this.zoom(0.5), "-": () => this.zoom(2), 0: () => this.reset() };
        if (event.key in acts) acts[event.key]();
        else if (event.key in zooms) {
          const charts = [...this.box.querySelectorAll("svg.chart")], own = charts.indexOf(svg);
          zooms[event.key]();
          this.box.querySelectorAll("svg.chart")[own]?.focus();
        } else return;
        event.preventDefault();
      });
    }

    nearest(step) {
      let best = this.steps[0];
      for (const one of this.steps) if (Math.abs(one - step) < Math.abs(best - step)) best = one;
      return best;
    }

    point(step) {
      this.step = step;
      for (const { cursor, top, bottom } of this.cursors) {
        const inside = step !== null && step >= this.range[0] && step <= this.range[1];
        cursor.setAttribute("d", inside ? `M${this.x(step)} ${top}V${bottom}` : "");
      }
      this.readout.replaceChildren();
      if (step === null) {
        this.readout.append(element("span", { class: "soft" }, say("hint")));
        return;
      }
      this.readout.append(element("b", {}, `${say("step")} ${step}`));
      for (const metric of this.metrics) {
        if (!this.shown.has(metric)) continue;
        const base = this.reference && this.reference.curve.at[metric].get(step);
        for (const leg of this.legs) {
          const value = leg.curve.at[metric].get(step);
          if (value === undefined) continue;
          const line = element("span", { "data-leg": leg.label, "data-metric": metric }, `${leg.label} ${say(metric)} `);
          line.append(element("b", {}, Number.isNaN(value) ? say("no_value") : String(value)));
          if (leg !== this.reference && base !== undefined) {
            if (Object.is(base, value)) line.append(` (${say("same_bits")})`);
            else line.append(` (${say("difference")} ${value - base}) `, element("span", { class: "hex" }, `${hexOf(value)}, ${say("reference")} ${hexOf(base)}`));
          }
          this.readout.append(line);
        }
      }
    }
  }
  Viewer.count = 0;

  const start = (box) => { if (!viewers.has(box) && caseOf(box)) viewers.set(box, new Viewer(box)); };
  for (const box of document.querySelectorAll(".detail .viewer")) start(box);
  for (const details of document.querySelectorAll("details.case")) {
    const body = details.querySelector(".body"), drawn = data.cases[body.id];
    if (!drawn) continue;
    details.addEventListener("toggle", () => {
      if (!details.open || body.querySelector(".viewer")) return;
      const box = element("div", { class: "viewer" });
      if (drawn.difference) box.dataset.rank = drawn.difference[1];
      body.querySelector(".command").before(box);
      start(box);
    });
  }
})();
