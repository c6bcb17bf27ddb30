// Curves of the runs that are compared; without this file the page has them as a still drawing.
"use strict";
(async () => {
  const figure = document.getElementById("compared");
  if (!figure) return;
  const answer = await studio.ask(figure.dataset.curves);
  if (!answer.ok) return;
  const { x, loss, held_out: heldOut } = await answer.json();
  const still = figure.querySelector("svg.curves"), output = figure.querySelector("output");
  const marks = [...document.querySelectorAll(".legend .mark")];
  const short = (value) => value == null ? "" : String(Number(value.toPrecision(3)));
  const all = [...loss, ...heldOut].flat().filter((value) => value != null);
  const far = Math.min(...all) > 0 && Math.max(...all) > 20 * Math.min(...all);
  const hours = figure.dataset.over === "hours";
  const along = hours ? short : String;
  let plot = null;

  // the value below the pointer, in the caption
  function told(u) {
    const place = u.cursor.idx;
    const values = place == null ? [] : marks.map((_, run) => [run, u.data[1 + run][place]]).filter(([, value]) => value != null);
    output.textContent = values.length ? `${hours ? "hour" : "step"} ${along(u.data[0][place])}: ${values.map(([run, value]) => `${"ABCDEF"[run]} ${short(value)}`).join(", ")}` : "";
  }

  function draw() {
    if (plot) plot.destroy();
    const soft = getComputedStyle(figure.querySelector("figcaption")).color;
    const line = getComputedStyle(figure.closest(".card")).borderTopColor;
    const font = `12px ${getComputedStyle(document.body).fontFamily}`;
    const axis = { stroke: soft, grid: { stroke: line, width: 1 }, ticks: { stroke: line, width: 1 }, font };
    const styles = marks.map((mark) => getComputedStyle(mark));
    const dashes = styles.map((style) => style.strokeDasharray === "none" ? undefined : style.strokeDasharray.split(/[ ,]+/).map(parseFloat));
    plot = new uPlot({
      width: figure.clientWidth, height: 320, legend: { show: false }, cursor: { y: false },
      scales: { x: { time: false }, y: far ? { distr: 3 } : {} },
      axes: [{ ...axis, values: (u, some) => some.map(along) }, { ...axis, size: 62, values: (u, some) => some.map(short) }],
      series: [
        {},
        ...styles.map((style, run) => ({ stroke: style.color, width: 2, dash: dashes[run], spanGaps: true, points: { show: false } })),
        ...styles.map((style) => ({ stroke: style.color, width: 0, spanGaps: false, points: { show: true, size: 8, fill: style.color } })),
      ],
      hooks: { setCursor: [told] },
    }, [x, ...loss, ...heldOut], figure);
    still.remove();
  }

  draw();
  new ResizeObserver(() => {
    if (figure.clientWidth !== plot.width) plot.setSize({ width: figure.clientWidth, height: 320 });
  }).observe(figure);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
})();
