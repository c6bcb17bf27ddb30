// Keys, and the one live region. Every page works without this file.
"use strict";
(() => {
  const typing = (element) => element.closest("input, textarea, select, [contenteditable], dialog");
  const rows = () => [...document.querySelectorAll("[data-row]")];
  let first = "";

  function step(by) {
    const all = rows();
    if (!all.length) return;
    const here = all.indexOf(document.activeElement);
    all[Math.min(all.length - 1, Math.max(0, here < 0 ? 0 : here + by))].focus();
  }

  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || typing(event.target)) return;
    const key = event.key, was = first;
    first = key === "g" ? key : "";
    if (was) {
      const link = document.querySelector(`[data-keys="g ${CSS.escape(key)}"]`);
      if (link) location.assign(link.href);
    } else if (key === "j" || key === "k") {
      step(key === "j" ? 1 : -1);
    } else if (key === "/") {
      const search = document.querySelector("[data-search]");
      if (search) { event.preventDefault(); search.focus(); }
    } else if (key === "?") {
      document.getElementById("keys")?.showModal();
    }
  });

  // a request that failed twice is told of; until one succeeds the page is an old one
  const away = document.getElementById("away"), pause = () => new Promise((done) => setTimeout(done, 1000));
  let failures = 0;
  function told(status) {
    failures = status < 400 ? 0 : failures + 1;
    const was = away.hidden;
    away.hidden = failures < 2;
    if (!failures) return;
    away.textContent = `The studio ${status ? `answered ${status}` : "does not answer"}: this page shows what was. ` +
      (status ? "Load it again." : "Runs go on without it.");
    if (was && !away.hidden) window.studio.say(away.textContent);
  }
  // streams and what is asked for every few seconds are asked for anew by themselves, others by `again`
  function failed({ target, detail }) {
    const status = detail.status ?? detail.ctx?.response?.status;
    if (target.matches(".caption")) return;  // it says so itself
    told(status);
    target.classList.add("failed");
    if (!(status < 500)) target.dispatchEvent(new Event("again"));
  }
  for (const name of ["htmx:error", "htmx:response:error", "htmx:sse:error"]) document.addEventListener(name, failed);
  document.addEventListener("htmx:sse:after:connection", () => told(200));
  document.addEventListener("htmx:after:request", ({ detail }) => { if (detail.ctx.response.status < 400) told(200); });

  // a picture too, also one that failed before this script was there
  const tries = new WeakMap();
  async function fetched(image) {
    const count = tries.get(image) ?? 0;
    if (image.tagName !== "IMG" || count === 5) return;
    tries.set(image, count + 1);
    await pause();
    image.src = image.src;
  }
  document.addEventListener("error", ({ target }) => { fetched(target); }, true);
  for (const one of document.images) if (one.complete && !one.naturalWidth) fetched(one);

  // the stream of a hidden tab is closed, and opened anew when it is shown; one that only lost the focus rests
  if (document.querySelector("[hx-sse\\:connect]")) {
    addEventListener("focus", () => { fetch("/look").catch(() => {}); });  // without an answer its stream says so
  }

  // a second press while the answer is on its way would do it twice: two runs, two tries
  const pressed = new WeakSet();
  addEventListener("submit", (event) => {
    const button = event.submitter;
    // a field may be named `method`, and stand for the property of its form; scripts send for themselves
    if (!button || event.defaultPrevented || event.target.getAttribute("method") !== "post") return;
    if (pressed.has(button)) { event.preventDefault(); return; }
    pressed.add(button);
    setTimeout(() => pressed.delete(button), 5000);  // after a download the page stays
  });

  // what was opened is open again when the page was loaded anew
  const opened = new Set((sessionStorage.getItem("opened") ?? "").split(" "));
  for (const one of document.querySelectorAll("details[id]")) one.open ||= opened.has(one.id);
  document.addEventListener("toggle", ({ target }) => {
    if (!target.matches("details[id]")) return;
    opened[target.open ? "add" : "delete"](target.id);
    sessionStorage.setItem("opened", [...opened].join(" "));
  }, true);

  window.studio = {
    // for screen readers, in the page's one live region
    say(text) { document.getElementById("live").textContent = text; },
    // the answer to a request, which is sent again while none comes; null after so many tries
    async ask(address, options, most = Infinity) {
      for (let count = 1; ; count++) {
        const answer = await fetch(address, options).catch(() => null);
        told(answer ? 200 : undefined);
        if (answer || count === most) return answer;
        await pause();
      }
    },
  };
})();
