// Drawings out of numbers: bars of steps, lines of seconds. Colours are the style sheet's.

import { make, setAttribute, setText, svg } from "./dom.js";

const drawing = (width, className) =>
  svg("svg", { viewBox: `0 0 ${width} 1`, preserveAspectRatio: "none", class: className, "aria-hidden": "true" });

// A row of bars, the newest at the right end; `series` are drawn on top of each other.
export class Strip {
  constructor(title, series, length) {
    this.length = length;
    this.paths = series.map((name) => svg("path", { class: name }));
    const picture = drawing(length, "strip");
    picture.append(...this.paths);
    this.value = make("span", { class: "quiet" });
    this.element = make("div", { class: "chart" },
      make("p", { class: "chart-head" }, make("span", {}, title), this.value), picture);
  }

  // `rows` has one list of values per series, all of the same length.
  draw(rows, caption) {
    const size = rows[0]?.length || 0;
    const sums = Array.from({ length: size }, (_, index) => rows.reduce((sum, row) => sum + row[index], 0));
    const top = Math.max(...sums, 1e-9);
    const floor = new Float64Array(size);
    rows.forEach((row, layer) => {
      let shape = "";
      row.forEach((value, index) => {
        if (value <= 0) return;
        const low = 1 - floor[index] / top;
        floor[index] += value;
        // However small a value, it can be seen.
        const high = Math.min(1 - floor[index] / top, low - 0.03);
        const left = this.length - size + index;
        shape += `M${left + 0.1} ${low.toFixed(3)}V${high.toFixed(3)}h.8V${low.toFixed(3)}z`;
      });
      setAttribute(this.paths[layer], "d", shape);
    });
    setText(this.value, caption);
  }
}

// Lines over the last minutes, each second a point; null is a gap.
export class Spark {
  constructor(title, { names = [""], filled = false, length }) {
    this.length = length;
    this.names = names;
    this.paths = names.map((_, index) => svg("path", { class: `line line-${index}` }));
    this.area = filled ? svg("path", { class: "area" }) : null;
    const picture = drawing(length, "spark");
    picture.append(...(this.area ? [this.area] : []), ...this.paths);
    this.value = make("strong", { class: "value" }, "–");
    this.note = make("span", { class: "quiet note" }, "\u00a0");
    this.element = make("div", { class: "card" },
      make("h4", {}, title), make("p", { class: "reading" }, this.value, " ", this.note), picture);
  }

  draw(rows, { value, note }) {
    const top = Math.max(...rows.flat().filter((each) => each !== null), 1e-9) * 1.05;
    const last = this.length - 1;
    rows.forEach((row, index) => {
      let shape = "", drawn = false;
      row.forEach((each, position) => {
        if (each === null) {
          drawn = false;
          return;
        }
        const x = last - (row.length - 1) + position, y = (1 - each / top).toFixed(3);
        // A point that stands alone is a line of no length, whose round ends are a dot.
        shape += drawn ? `L${x} ${y}` : `M${x} ${y}h0`;
        drawn = true;
      });
      setAttribute(this.paths[index], "d", shape);
      if (this.area && index === 0) {
        const left = last - (row.length - 1);
        const points = row.map((each, position) => `L${left + position} ${(1 - (each ?? 0) / top).toFixed(3)}`);
        setAttribute(this.area, "d", row.length ? `M${left} 1${points.join("")}V1z` : "");
      }
    });
    setText(this.value, value);
    setText(this.note, note || "\u00a0");
  }
}

// One bar cut into parts, with a legend that says how much each is.
export class Parts {
  constructor(title, names) {
    this.bars = names.map((name, index) => make("span", { class: `part part-${index}`, hidden: true }));
    this.numbers = names.map(() => make("dd"));
    this.note = make("span", { class: "quiet" });
    this.element = make("div", { class: "panel" },
      make("h3", { class: "chart-head" }, make("span", {}, title), this.note),
      make("div", { class: "parts", "aria-hidden": "true" }, ...this.bars),
      make("dl", { class: "legend" }, ...names.map((name, index) =>
        make("div", {}, make("dt", {}, make("span", { class: `swatch part-${index}`, "aria-hidden": "true" }), name), this.numbers[index]))));
  }

  draw(values, texts, note) {
    values.forEach((value, index) => {
      const grow = String(Math.max(value, 0));
      if (this.bars[index].style.flexGrow !== grow) this.bars[index].style.flexGrow = grow;
      this.bars[index].hidden = value <= 0;
      setText(this.numbers[index], texts[index]);
    });
    setText(this.note, note);
  }
}
