// Data sets: captions saved on leaving the field or by Ctrl-S, uploads in parts with their progress.
"use strict";
(() => {
  const PART_FILES = 40, PART_BYTES = 200 * 1024 * 1024;

  // leaving a field sends it, unless a key or its button did
  const sent = new WeakMap(), saving = new Set(), again = new Set();
  document.addEventListener("submit", (event) => {
    const form = event.target, field = form.matches(".caption") && form.elements.caption;
    if (!field) return;
    if (saving.has(form)) {  // the answer that is on its way brings the ETag that this one has to send
      event.preventDefault();
      event.stopImmediatePropagation();
      again.add(form);
      return;
    }
    saving.add(form);
    sent.set(field, field.value);
  }, true);
  document.addEventListener("htmx:finally:request", ({ target: form }) => {
    saving.delete(form);
    if (again.delete(form) && form.querySelector(".saved") && !form.querySelector(".problem")) form.requestSubmit();
  });
  document.addEventListener("change", (event) => {
    const field = event.target;
    if (field.matches(".caption textarea") && sent.get(field) !== field.value) field.form.requestSubmit();
  });
  document.addEventListener("keydown", (event) => {
    if (event.key !== "s" || !(event.ctrlKey || event.metaKey)) return;
    const field = event.target.closest(".caption textarea");
    if (field) { event.preventDefault(); if (!field.readOnly) field.form.requestSubmit(); }
  });
  // leaving the page is leaving its field: what is sent arrives, what is not is asked about
  document.addEventListener("htmx:config:request", ({ target, detail }) => {
    // of a longer text a browser would refuse it
    if (target.matches(".caption")) detail.ctx.request.keepalive = target.elements.caption.value.length < 6000;
  });
  addEventListener("beforeunload", (event) => {
    if (document.querySelector("#upload button.main:disabled, #upload-state button")) event.preventDefault();
    const unsaved = (field) => field.value !== field.defaultValue && sent.get(field) !== field.value;
    if ([...document.querySelectorAll(".caption textarea")].some((one) => unsaved(one) || one.form.querySelector(".problem"))) event.preventDefault();
  });
  // what was typed stays, and leaving the field sends it again
  for (const name of ["htmx:error", "htmx:response:error"]) document.addEventListener(name, (event) => {
    const form = event.target.closest(".caption"), status = event.detail.ctx?.response?.status;
    if (!form) return;
    sent.delete(form.elements.caption);
    const told = form.querySelector(".unsaved") || form.appendChild(document.createElement("p"));
    told.className = "problem unsaved";
    told.setAttribute("role", "alert");
    told.textContent = `Not saved: the studio ${status ? `answered ${status}` : "does not answer"}.` +
      (status === 401 || status === 403 ? " Copy your text, then load the page again." : "");
  });

  // a look that the page waited for is done: show it, unless that would throw away what someone does here
  let sending = false;
  const dirty = () => [...document.querySelectorAll("textarea, input")].some((one) => one === document.activeElement ||
    (one.type === "checkbox" ? one.checked : one.type === "file" ? one.files.length : one.type !== "hidden" && one.value !== one.defaultValue));
  const look = document.getElementById("look")?.parentElement;
  if (look) new MutationObserver(() => {
    if (!look.querySelector("[data-reload]") || sending || dirty()) return;
    document.getElementById("content").inert = true;  // until the new page is there nobody can type into this one
    location.reload();
  }).observe(look, { childList: true });

  // what the look after a change finds takes the place of what the page says, around what someone does here
  let changed = false, waiting = false;
  async function refresh() {
    changed = true;
    if (waiting) return;
    waiting = true;
    const page = async (address) => {
      const answer = await studio.ask(address);
      return answer.ok ? new DOMParser().parseFromString(await answer.text(), "text/html") : null;
    };
    const progress = `${location.pathname.split("/").slice(0, 3).join("/")}/progress`;
    let now = null;
    while (changed) {
      changed = false;
      while ((await page(progress))?.querySelector("[data-looking]")) await new Promise((done) => setTimeout(done, 500));
      now = await page(location.href);
    }
    waiting = false;
    if (now) for (const one of document.querySelectorAll("[data-found]")) {
      const found = now.getElementById(one.id);
      if (one.contains(document.activeElement)) continue;
      if (found) one.innerHTML = found.innerHTML;
      // the filter that shows it is no longer true of it
      else if (one.closest(".tile")?.querySelector(".saved")) one.replaceChildren();
    }
  }
  document.addEventListener("htmx:after:swap", (event) => { if (event.target.closest?.(".caption")) refresh(); });

  const form = document.getElementById("upload");
  if (!form) return;
  const input = form.elements.files, bar = document.getElementById("upload-bar");
  const state = document.getElementById("upload-state"), told = document.getElementById("told");
  const button = form.querySelector("button.main");
  const more = document.createElement("button"), found = document.createElement("a");
  more.type = "button";
  more.textContent = "Go on";
  more.addEventListener("click", go);
  found.href = `${location.pathname}?wait=1`;
  found.textContent = "Show them";
  let left = [], total = 0, done = 0, bad = 0;

  // a picture and its caption have one stem, and must come in one part; metadata comes before what it names
  function parts(files) {
    const stem = (file) => (/^metadata\.(jsonl|csv)$/.test(file.name) ? "" : file.name.replace(/\.[^.]*$/, ""));
    const sorted = [...files].sort((a, b) => (stem(a) < stem(b) ? -1 : stem(a) > stem(b) ? 1 : 0));
    const found = [];
    let bytes = 0, last = null;
    for (const file of sorted) {
      const now = found.at(-1);
      if (!now || ((now.length >= PART_FILES || bytes > PART_BYTES) && stem(file) !== last)) { found.push([file]); bytes = 0; }
      else now.push(file);
      bytes += file.size;
      last = stem(file);
    }
    return found;
  }

  // folders are dropped as the files in them
  async function dropped(items) {
    const found = [], waiting = [...items].map((one) => one.webkitGetAsEntry?.() || one.getAsFile()).filter(Boolean);
    while (waiting.length) {
      const one = waiting.pop();
      if (one instanceof File) found.push(one);
      else if (one.isFile) found.push(await new Promise((done, failed) => one.file(done, failed)));
      else {
        const reader = one.createReader();
        for (let some; (some = await new Promise((done, failed) => reader.readEntries(done, failed))).length;) waiting.push(...some);
      }
    }
    return found;
  }

  // what is dropped meanwhile comes after it
  function send(files) {
    if (!left.length) { total = done = bad = 0; told.replaceChildren(); }
    for (const part of parts(files)) left.push([part, form.elements.existing.value]);
    bar.hidden = false;
    bar.max = total += files.length;
    if (!button.disabled) go();
  }

  // from the part that was not taken on; what of it arrived all the same is found to be there
  async function go() {
    sending = button.disabled = true;
    while (left.length && await taken(left[0])) left.shift();
    bar.value = done;
    if (!left.length) state.textContent = `${done - bad} stored, ${bad} not. `;
    window.studio.say(state.textContent);
    state.append(left.length ? more : found);
    refresh();
    button.disabled = false;
    if (!left.length) form.reset();
    sending = left.length > 0 || told.children.length > 0;  // which are to be read
  }

  async function taken([part, existing]) {
    bar.value = done;
    state.textContent = `${done} of ${total}`;
    const body = new FormData();
    body.append("csrf", form.elements.csrf.value);
    body.append("existing", existing);
    for (const file of part) body.append("files", file, file.name);
    const answer = await studio.ask(form.action, { method: "POST", body, headers: { "HX-Request": "true" } }, 10);
    const text = await answer?.text() ?? "the studio does not answer, or a file is no longer there.";
    const page = new DOMParser().parseFromString(text, "text/html");
    if (!answer?.ok) {
      const why = page.querySelector("main") || page.body;
      state.textContent = `Stopped after ${done} of ${total}: ${why.textContent.replace(/\s+/g, " ").trim()} `;
      return false;
    }
    const rows = [...page.querySelectorAll("li")];
    bad += rows.filter((row) => row.className === "bad").length;
    // faults first: they are what has to be read
    for (const row of rows) row.className === "bad" ? told.prepend(row) : told.append(row);
    done += part.length;
    return true;
  }

  form.addEventListener("submit", (event) => {
    event.preventDefault();
    left = [];  // what was not taken is among them, or not wanted any more
    if (input.files.length) send(input.files);
  });
  // what is dropped beside it must not take the place of the page
  document.addEventListener("dragover", (event) => event.preventDefault());
  document.addEventListener("drop", (event) => event.preventDefault());
  form.addEventListener("dragover", (event) => { event.preventDefault(); form.classList.add("over"); });
  form.addEventListener("dragleave", () => form.classList.remove("over"));
  form.addEventListener("drop", async (event) => {
    event.preventDefault();
    form.classList.remove("over");
    const files = await dropped(event.dataTransfer.items);
    if (files.length) send(files);
  });
})();
