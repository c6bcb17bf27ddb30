// Data sets: captions saved on leaving the field or by Ctrl-S, uploads in parts with their progress.
"use strict";
(() => {
  const PART_FILES = 40, PART_BYTES = 200 * 1024 * 1024;

  document.addEventListener("change", (event) => {
    if (event.target.matches(".caption textarea")) event.target.form.requestSubmit();
  });
  document.addEventListener("keydown", (event) => {
    if (event.key !== "s" || !(event.ctrlKey || event.metaKey)) return;
    const field = event.target.closest(".caption textarea");
    if (field) { event.preventDefault(); field.form.requestSubmit(); }
  });

  const form = document.getElementById("upload");
  if (!form) return;
  const input = form.elements.files, bar = document.getElementById("upload-bar");
  const state = document.getElementById("upload-state"), told = document.getElementById("told");

  // a picture and its caption have one stem, and must come in one part
  function parts(files) {
    const stem = (file) => file.name.replace(/\.[^.]*$/, "");
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

  async function send(files) {
    const all = parts(files);
    let done = 0, bad = 0;
    told.replaceChildren();
    form.querySelector("button").disabled = true;
    bar.hidden = false;
    bar.max = files.length;
    for (const part of all) {
      bar.value = done;
      state.textContent = `${done} of ${files.length}`;
      const body = new FormData();
      body.append("csrf", form.elements.csrf.value);
      body.append("existing", form.elements.existing.value);
      for (const file of part) body.append("files", file, file.name);
      const answer = await fetch(form.action, { method: "POST", body, headers: { "HX-Request": "true" } })
        .catch((error) => ({ ok: false, text: async () => String(error) }));
      const page = new DOMParser().parseFromString(await answer.text(), "text/html");
      if (!answer.ok) {
        const why = page.querySelector("main") || page.body;
        state.textContent = `Stopped after ${done} of ${files.length}: ${why.textContent.replace(/\s+/g, " ").trim()}`;
        break;
      }
      const rows = [...page.querySelectorAll("li")];
      bad += rows.filter((row) => row.className === "bad").length;
      // faults first: they are what has to be read
      for (const row of rows) row.className === "bad" ? told.prepend(row) : told.append(row);
      done += part.length;
    }
    bar.value = done;
    if (done === files.length) {
      state.textContent = `${done - bad} stored, ${bad} not. `;
      const link = document.createElement("a");
      link.href = location.pathname;
      link.textContent = "Show them";
      state.append(link);
    }
    window.studio.say(state.textContent);
    form.querySelector("button").disabled = false;
    form.reset();
  }

  form.addEventListener("submit", (event) => {
    event.preventDefault();
    if (input.files.length) send(input.files);
  });
  form.addEventListener("dragover", (event) => { event.preventDefault(); form.classList.add("over"); });
  form.addEventListener("dragleave", () => form.classList.remove("over"));
  form.addEventListener("drop", (event) => {
    event.preventDefault();
    form.classList.remove("over");
    if (event.dataTransfer.files.length) send(event.dataTransfer.files);
  });
})();
