// Tables that can be sorted, arms that can be hidden, and the numbers of a figure under the pointer.
// Without it the page shows the same, at rest.
(() => {
  "use strict";

  const hidden = new Set();

  function make(tag, options = {}, ...children) {
    const element = Object.assign(document.createElement(tag), options);
    element.append(...children);
    return element;
  }

  // Tables: every heading becomes a button; a third press goes back to the order in which the rows were written.

  const NEXT = { none: "ascending", ascending: "descending", descending: "none" };

  function makeSortable(table) {
    const body = table.tBodies[0];
    const written = [...body.rows];
    const heads = [...table.tHead.rows[0].cells];
    heads.forEach((head, column) => {
      const button = make("button", { type: "button", title: "Sort" }, ...head.childNodes);
      head.append(button);
      button.addEventListener("click", () => {
        const order = NEXT[head.getAttribute("aria-sort") ?? "none"];
        heads.forEach((other) => other.removeAttribute("aria-sort"));
        if (order !== "none") head.setAttribute("aria-sort", order);
        body.append(...(order === "none" ? written : sorted(written, column, order === "ascending" ? 1 : -1)));
      });
    });
  }

  function sorted(rows, column, sign) {
    const numbers = rows.some((row) => row.cells[column].dataset.value !== undefined);
    const key = (row) => {
      const cell = row.cells[column];
      if (cell.dataset.value !== undefined) return Number(cell.dataset.value);
      return numbers || cell.textContent === "—" ? null : cell.textContent; // what is no number stands last
    };
    return [...rows].sort((one, other) => {
      const a = key(one), b = key(other);
      if (a === null || b === null) return (a === null) - (b === null);
      return sign * (typeof a === "number" ? a - b : a.localeCompare(b, "en", { numeric: true }));
    });
  }

  // Arms

  function show(arm, shown) {
    if (shown) hidden.delete(arm);
    else hidden.add(arm);
    for (const part of document.querySelectorAll(`.arm-${arm}`)) part.classList.toggle("off", !shown);
  }

  // Numbers, as the tables write them: true minus signs, ten to a superscript power.

  const RAISED = { "-": "⁻", 0: "⁰", 1: "¹", 2: "²", 3: "³", 4: "⁴", 5: "⁵", 6: "⁶", 7: "⁷", 8: "⁸", 9: "⁹" };

  function written(value, digits = 5) {
    if (value === null) return "—";
    const [mantissa, power] = value.toExponential(digits - 1).split("e").map(Number);
    const plain = value === 0 || (power >= -2 && power < digits);
    const text = plain
      ? value.toFixed(Math.max(digits - 1 - (value === 0 ? 0 : power), 0))
      : `${mantissa.toFixed(digits - 1)}×10${[...String(power)].map((letter) => RAISED[letter]).join("")}`;
    return text.replace("-", "−");
  }

  const place = (x, against) =>
    against === "seconds" ? `${written(x, 4)} s` : `${Math.round(x).toLocaleString("en")} ${against}`;

  // Figures: the nearest place that a visible curve has, and there each visible curve's value.

  const nearest = (places, x) =>
    places.reduce((best, one, i) => (Math.abs(one - x) < Math.abs(places[best] - x) ? i : best), 0);
  const clamp = (value, low, high) => Math.min(Math.max(value, low), high);

  function makeReadable(plot) {
    const data = JSON.parse(plot.querySelector("script").textContent);
    const svg = plot.querySelector("svg");
    const figure = plot.closest("figure");
    const draw = (tag) => svg.appendChild(document.createElementNS(svg.namespaceURI, tag));
    const marks = draw("g");
    marks.setAttribute("class", "cursor");
    const readout = make("div", { className: "readout", hidden: true });
    readout.setAttribute("role", "status");
    plot.append(readout);
    plot.tabIndex = 0;
    plot.setAttribute("role", "group");
    plot.setAttribute("aria-label", `${figure.previousElementSibling.textContent}: arrow keys read the values`);

    let panel = data.panels[0], at = null;

    const curves = () => panel.curves.filter((curve) => !hidden.has(String(curve.arm)));
    const stops = () => {
      const all = curves().flatMap((curve) => curve.x.filter((x, i) => curve.mean[i] !== null));
      return [...new Set(all)].filter((x) => x >= panel.x[0] && x <= panel.x[1]).sort((a, b) => a - b);
    };
    const share = (value, [low, high], log) =>
      log ? Math.log(value / low) / Math.log(high / low) : (value - low) / (high - low);
    const across = (x) => panel.box[0] + panel.box[2] * share(x, panel.x);
    const down = (y) => panel.box[1] + panel.box[3] * (1 - share(y, panel.y, panel.log));

    function mark(tag, attributes) {
      const element = marks.appendChild(document.createElementNS(svg.namespaceURI, tag));
      for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
      return element;
    }

    function put() {
      marks.replaceChildren();
      readout.hidden = at === null;
      if (at === null) return;
      const [, top, , height] = panel.box;
      mark("path", { d: `M${across(at)} ${top}v${height}` });
      const head = `${panel.title ? `${panel.title}, ` : ""}${place(at, data.against)}`;
      const list = make("dl");
      for (const curve of curves()) {
        if (at < curve.x[0] || at > curve.x.at(-1)) continue; // begins later, or has ended
        const i = nearest(curve.x, at);
        const value = curve.mean[i];
        const range = curve.low && value !== null ? ` (${written(curve.low[i])} to ${written(curve.high[i])})` : "";
        const aside = curve.x[i] === at ? "" : ` at ${place(curve.x[i], data.against)}`;
        list.append(make("dt", {}, curve.name), make("dd", {}, written(value) + range + aside));
        list.lastChild.dataset.arm = curve.arm;
        const y = value === null ? NaN : down(value);
        if (y >= top && y <= top + height && curve.x[i] >= panel.x[0]) {
          mark("circle", { cx: across(curve.x[i]), cy: y, r: 2.6 }).style.fill = curve.colour;
        }
      }
      readout.replaceChildren(make("p", {}, head), list);
      // beside the line, on the side with more room; where there is little, below the picture
      const scale = svg.clientWidth / svg.viewBox.baseVal.width, room = plot.clientWidth - readout.offsetWidth;
      const x = across(at) * scale, beside = x * 2 < plot.clientWidth ? x + 12 : x - readout.offsetWidth - 12;
      const narrow = plot.clientWidth < 440;
      readout.style.left = `${narrow ? 0 : clamp(beside, 0, Math.max(room, 0))}px`;
      readout.style.top = narrow ? "100%" : `${top * scale}px`;
    }

    function point(event) {
      const bounds = svg.getBoundingClientRect();
      const scale = svg.viewBox.baseVal.width / bounds.width;
      const x = (event.clientX - bounds.left) * scale, y = (event.clientY - bounds.top) * scale;
      const distance = ({ box: [left, top, width, height] }) =>
        Math.hypot(x - clamp(x, left, left + width), y - clamp(y, top, top + height));
      panel = data.panels.reduce((best, one) => (distance(one) < distance(best) ? one : best));
      const [left, , width] = panel.box;
      const places = stops();
      const wanted = panel.x[0] + ((x - left) / width) * (panel.x[1] - panel.x[0]);
      at = places.length ? places[nearest(places, wanted)] : null;
      put();
    }

    function step(event) {
      const places = stops(), now = at === null ? -1 : nearest(places, at), last = places.length - 1;
      const panels = data.panels, turn = { ArrowUp: -1, ArrowDown: 1 }[event.key];
      const to = { ArrowLeft: now - 1, ArrowRight: now + 1, Home: 0, End: last }[event.key];
      if (event.key === "Escape") at = null;
      else if (turn && panels.length > 1) {
        panel = panels[clamp(panels.indexOf(panel) + turn, 0, panels.length - 1)];
        at = stops()[nearest(stops(), at ?? 0)] ?? null;
      } else if (to !== undefined && places.length) at = places[clamp(to, 0, last)];
      else return;
      event.preventDefault();
      put();
    }

    const leave = () => { at = null; put(); };
    plot.addEventListener("pointerdown", point);
    plot.addEventListener("pointermove", point);
    plot.addEventListener("pointerleave", (event) => { if (event.pointerType === "mouse") leave(); });
    plot.addEventListener("keydown", step);
    plot.addEventListener("blur", leave);
  }

  document.querySelectorAll("table").forEach(makeSortable);
  document.querySelectorAll(".plot:has(script)").forEach(makeReadable);
  for (const box of document.querySelectorAll(".arms input")) {
    box.addEventListener("change", () => show(box.dataset.arm, box.checked));
    show(box.dataset.arm, box.checked); // a browser may remember it from before
  }
  document.querySelectorAll(".arms").forEach((choice) => { choice.hidden = false; });
})();
