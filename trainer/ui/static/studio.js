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

  // a stream that broke is tried again; until it is there the page is an old one
  const away = (is) => () => { document.getElementById("away").hidden = !is; };
  document.addEventListener("htmx:sse:error", away(true));
  document.addEventListener("htmx:sse:after:connection", away(false));

  // the stream of a hidden tab is closed, and opened anew when it is shown; one that only lost the focus rests
  if (document.querySelector("[hx-sse\\:connect]")) {
    addEventListener("focus", () => { fetch("/look").catch(() => {}); });  // without an answer its stream says so
  }

  // what was opened is open again when the page was loaded anew
  const opened = new Set((sessionStorage.getItem("opened") ?? "").split(" "));
  for (const one of document.querySelectorAll("details[id]")) one.open ||= opened.has(one.id);
  document.addEventListener("toggle", ({ target }) => {
    if (!target.matches("details[id]")) return;
    opened[target.open ? "add" : "delete"](target.id);
    sessionStorage.setItem("opened", [...opened].join(" "));
  }, true);

  // say(text): for screen readers, in the page's one live region
  window.studio = {
    say(text) { document.getElementById("live").textContent = text; },
  };
})();
