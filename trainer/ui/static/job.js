// Curves of one run, from the points of its stream. The server sends each line of metrics.jsonl once.
"use strict";
(() => {
  const COLUMNS = ["step", "loss", "validation_loss", "learning_rate", "grad_norm", "seconds_per_step", "device_memory_reserved_bytes"];
  const source = document.getElementById("job");
  const points = studio.points = [];
  const charts = [];
  let drawing = 0;

  const colour = (element) => getComputedStyle(element).color;
  const short = (value) => value == null ? "" : value && Math.abs(value) < 1e-3 ? value.toExponential(1) : String(Number(value.toPrecision(3)));

  function column(name, scale) {
    const place = COLUMNS.indexOf(name);
    return points.map((row) => row[place] == null ? null : row[place] * scale);
  }

  function data(figure) {
    const { columns, line } = figure.dataset;
    const scale = "gib" in figure.dataset ? 2 ** -30 : 1;
    const series = columns.split(" ").map((name) => column(name, scale));
    const shared = [points.map((row) => row[0]), ...series];
    return line ? [...shared, points.map(() => line * scale)] : shared;
  }

  // whether the scale is logarithmic, for losses fall by orders of magnitude, and whether each point is a dot
  function manner(figure) {
    const values = data(figure).slice(1).flat().filter((value) => value != null);
    // 150,000 arguments are too many for a function
    const [least, most] = [Math.min, Math.max].map((one) => values.reduce((a, b) => one(a, b), values[0]));
    const far = figure.classList.contains("wide") && least > 0 && most > 20 * least;
    return [far, points.length < 3];
  }

  function chart(figure) {
    const keys = [...figure.querySelectorAll(".key")].map(colour);
    const style = getComputedStyle(document.body);
    const soft = colour(figure.querySelector("figcaption"));
    const grid = getComputedStyle(figure.closest(".card")).borderTopColor;
    const axis = { stroke: soft, grid: { stroke: grid, width: 1 }, ticks: { stroke: grid, width: 1 }, font: `12px ${style.fontFamily}` };
    const [far, few] = manner(figure);
    const series = keys.map((stroke, place) => ({
      stroke, width: 2, spanGaps: true,
      dash: place && figure.dataset.line && place === keys.length - 1 ? [6, 6] : undefined,
      // held-out losses are few; a dot for each value of the predicted line took a minute of a long run
      points: { show: (place === 1 && !figure.dataset.line) || few, size: 7, fill: stroke },
    }));
    return new uPlot({
      width: figure.clientWidth, height: figure.classList.contains("wide") ? 260 : 180,
      scales: { x: { time: false }, y: far ? { distr: 3 } : {} },
      legend: { show: false },
      cursor: { sync: { key: "steps" }, y: false },
      axes: [axis, { ...axis, size: 62, values: (u, all) => all.map(short) }],
      series: [{}, ...series],
      hooks: { setCursor: [(u) => told(figure, u)] },
    }, data(figure), figure);
  }

  // the value below the pointer, in the caption
  function told(figure, u) {
    const place = u.cursor.idx;
    const caption = figure.querySelector("figcaption");
    let output = caption.querySelector("output");
    if (!output) caption.append(output = document.createElement("output"));
    output.textContent = place == null ? "" :
      `step ${u.data[0][place]}: ${u.data.slice(1).map((one) => short(one[place])).filter(Boolean).join(", ")}`;
  }

  function draw() {
    drawing = 0;
    const box = source.querySelector(".charts");
    box.hidden = !points.length;
    source.querySelector(".needs-script").hidden = true;
    if (!points.length) return;
    for (const figure of box.querySelectorAll(".chart")) {
      const some = figure.dataset.columns.split(" ").some((name) => column(name, 1).some((value) => value));
      figure.hidden = !some;
      if (!some) continue;
      const old = charts.find((one) => one.figure === figure), now = String(manner(figure));
      if (old?.manner === now) old.plot.setData(data(figure));
      else {
        if (old) charts.splice(charts.indexOf(old), 1)[0].plot.destroy();
        charts.push({ figure, manner: now, plot: chart(figure) });
      }
    }
  }

  // one prompt's previews by step: those of the table, one at a time
  function slide() {
    const box = document.getElementById("slide");
    if (!box) return;
    const [prompt, step, told, picture] = box.querySelectorAll("select, input, output, img");
    const shown = [...source.querySelectorAll(".strip tbody tr")[prompt.value].querySelectorAll("img")];
    const newest = step.value === step.max;
    step.max = shown.length - 1;
    if (newest) step.value = step.max;
    picture.src = shown[step.value].closest("a").href;
    picture.alt = step.ariaValueText = told.textContent = shown[step.value].alt;
    box.hidden = false;
  }
  slide();
  source.addEventListener("input", slide);
  document.addEventListener("htmx:after:swap", slide);

  // the log's end stays in sight while it is
  let end = true;
  const follow = () => {
    const log = document.getElementById("log");
    if (log && end) log.scrollTop = log.scrollHeight;
  };
  source.addEventListener("scroll", ({ target }) => {
    if (target.id === "log") end = target.scrollHeight - target.scrollTop - target.clientHeight < 20;
  }, true);
  document.addEventListener("htmx:after:swap", follow);
  follow();
  draw();

  function soon() {
    if (!drawing) drawing = requestAnimationFrame(draw);
  }

  function anew() {
    for (const { plot } of charts.splice(0)) plot.destroy();
    soon();
  }

  source.addEventListener("points", (event) => {
    for (const row of JSON.parse(event.detail.data)) points.push(row);
    soon();
  });
  source.addEventListener("anew", () => {
    points.length = 0;
    studio.say("The run was resumed: its curves begin anew");
    anew();
  });
  new ResizeObserver(() => {
    for (const { figure, plot } of charts) {
      if (figure.clientWidth !== plot.width) plot.setSize({ width: figure.clientWidth, height: plot.height });
    }
  }).observe(source);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", anew);
})();
