// Tables that sort, arms that can be hidden, and plotly. Without it the page has the tables.
(async () => {
  "use strict";

  const NEXT = { none: "ascending", ascending: "descending", descending: "none" };

  function makeSortable(table) {
    const body = table.tBodies[0], written = [...body.rows], heads = [...table.tHead.rows[0].cells];
    heads.forEach((head, column) => {
      const button = Object.assign(document.createElement("button"), { type: "button", title: "Sort" });
      button.append(...head.childNodes);
      head.append(button);
      button.addEventListener("click", () => {
        const order = NEXT[head.getAttribute("aria-sort") ?? "none"]; // the third press restores the order as written
        heads.forEach((other) => other.removeAttribute("aria-sort"));
        if (order !== "none") head.setAttribute("aria-sort", order);
        body.append(...(order === "none" ? written : sorted(written, column, order === "ascending" ? 1 : -1)));
      });
    });
  }

  function sorted(rows, column, sign) {
    const key = ({ cells }) => {
      const { value } = cells[column].dataset, text = cells[column].textContent;
      return value !== undefined ? Number(value) : text === "—" || text.startsWith("nan") ? null : text;
    };
    return [...rows].sort((one, other) => {
      const a = key(one), b = key(other);
      if (a === null || b === null) return (a === null) - (b === null); // what is no number stands last
      return sign * (typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(b, "en", { numeric: true }));
    });
  }

  const dark = matchMedia("(prefers-color-scheme: dark)"), print = matchMedia("print");
  const themes = JSON.parse(document.getElementById("themes").textContent);
  const boxes = [...document.querySelectorAll(".arms input")];
  const figures = [...document.querySelectorAll("figure")].map((figure) => ({
    plot: figure.querySelector(".plot"),
    select: figure.querySelector("select"),
    spec: JSON.parse(figure.querySelector("script").textContent),
  }));

  // Traces and layout in a theme; hidden arms stay in the legend, and paper shows every arm.
  function themed({ spec, select }, { arms, paper, ink, rule, raised }) {
    const data = spec.data.map((trace) => {
      const color = arms[trace.meta.arm % arms.length], off = !boxes[trace.meta.arm].checked && !print.matches;
      const visible = select && trace.meta.weight !== select.value ? false : off ? "legendonly" : true;
      return { ...trace, visible, line: { ...trace.line, color }, marker: { ...trace.marker, color }, fillcolor: `${color}2e` };
    });
    // plotly writes NaN into axes that have no trace at all
    data.push({ x: [null], y: [null], hoverinfo: "skip", showlegend: false });
    const axis = { gridcolor: rule, linecolor: rule, zeroline: false, automargin: true };
    const layout = {
      font: { color: ink, size: 12, family: "system-ui, sans-serif" }, paper_bgcolor: paper, plot_bgcolor: paper,
      height: 320 + 21 * new Set(spec.data.map(({ meta }) => meta.arm)).size, // a line of the legend each, where names are long
      hoverlabel: { bgcolor: raised, font: { color: ink } }, hovermode: "x unified", hoverdistance: 100, margin: { l: 10, r: 10, t: 30, b: 10 },
      legend: { orientation: "h", yref: "container", y: 0, yanchor: "bottom", maxheight: 0.7 },
      uirevision: "kept", modebar: { color: ink, activecolor: ink, bgcolor: paper },
      xaxis: { ...axis, title: { text: spec.x }, exponentformat: "SI", nticks: 6 },
      yaxis: { ...axis, title: { text: spec.y }, exponentformat: "power", type: spec.log ? "log" : "linear" },
    };
    return { data, layout: print.matches ? { ...layout, width: 620 } : layout };
  }

  function draw(figure) {
    const { data, layout } = themed(figure, themes[dark.matches && !print.matches ? "dark" : "light"]);
    const save = (format, icon) => ({
      name: `Download as ${format.toUpperCase()}`, icon,
      click: (plot) => Plotly.downloadImage(themed(figure, themes.light), {
        format, filename: figure.spec.name, width: plot.clientWidth, height: plot.clientHeight, scale: format === "png" ? 2 : 1 }),
    });
    return Plotly.react(figure.plot, data, layout, {
      // a list, and not plotly's own: that would have a button which sends the figure to a server
      modeBarButtons: [["zoom2d", "pan2d", "resetScale2d"], [save("png", Plotly.Icons.camera), save("svg", Plotly.Icons.disk)]],
      responsive: true, displaylogo: false, displayModeBar: true, showSendToCloud: false, plotlyServerURL: "",
    });
  }

  function update() {
    for (const box of boxes) {
      document.querySelectorAll(`tr[data-arm="${box.dataset.arm}"]`).forEach((row) => row.classList.toggle("off", !box.checked));
    }
    return Promise.all(figures.map(draw));
  }

  document.querySelectorAll("table").forEach(makeSortable);
  const packed = Uint8Array.from(atob(document.getElementById("plotly").textContent), (letter) => letter.charCodeAt(0));
  const unpacked = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  document.head.append(Object.assign(document.createElement("script"), { text: await new Response(unpacked).text() }));
  for (const figure of figures) {
    figure.plot.replaceChildren();
    figure.select?.addEventListener("change", () => draw(figure));
  }
  boxes.forEach((box) => box.addEventListener("change", update));
  await update();
  for (const { plot } of figures) {
    plot.on("plotly_legendclick", ({ data, curveNumber }) => { boxes[data[curveNumber].meta.arm].click(); return false; });
    plot.on("plotly_legenddoubleclick", () => false);
  }
  [dark, print].forEach((media) => media.addEventListener("change", update));
  document.querySelectorAll(".arms, .weight").forEach((choice) => { choice.hidden = false; });
  document.body.dataset.drawn = "true";
})();
