// New run: notes beside fields, files that are dropped, starts that load the page anew. Works without.
"use strict";
(() => {
  const form = document.getElementById("new");
  let shown = null, lastSaid = "";

  function note(key, [below, origin, decided, reason, problems]) {
    const field = form.querySelector(`[data-field="${CSS.escape(key)}"]`);
    if (!field) return;
    const input = field.querySelector("input, select, textarea");
    const single = input.type !== "radio" && input.type !== "checkbox";
    const typed = single ? input.value : [...field.querySelectorAll("input:checked")].some((one) => one.value);
    if (single && input.tagName !== "SELECT") input.placeholder = below;
    else field.querySelector(".value").textContent = typed ? "" : below;
    field.querySelector(".origin").textContent = origin;
    const chosen = field.querySelector(".decided");
    chosen.textContent = decided ? `→ ${decided}` : "";
    chosen.title = reason;
    field.querySelector(".wrong-text").textContent = problems.join(" ");
    field.classList.toggle("wrong", problems.length > 0);
    for (const one of field.querySelectorAll("input, select, textarea")) {
      if (problems.length) one.setAttribute("aria-invalid", "true"); else one.removeAttribute("aria-invalid");
    }
  }

  // a number that the browser cannot read is an empty value to it, and to all that it sends
  const unread = () => [...form.querySelectorAll("input[type=number]")].filter((one) => one.validity.badInput);
  const BROKEN = "This is no number. Correct it or empty the field";

  function markUnread() {
    const broken = unread();
    for (const input of broken) {
      const field = input.closest("[data-field]");
      field.querySelector(".wrong-text").textContent = BROKEN;
      field.classList.add("wrong");
      input.setAttribute("aria-invalid", "true");
      if (shown) delete shown[field.dataset.field];  // its note is written anew by the next plan
    }
    if (broken.length) {
      form.classList.add("failed");
      if (lastSaid !== BROKEN) window.studio.say(BROKEN);
      lastSaid = BROKEN;
    }
    return broken;
  }

  function apply() {
    const element = document.getElementById("notes");
    const next = JSON.parse(element.dataset.notes);
    for (const [key, value] of Object.entries(next)) {
      if (!shown || JSON.stringify(shown[key]) !== JSON.stringify(value)) note(key, value);
    }
    shown = next;
    form.classList.remove("failed");
    const wrong = Object.values(next).flatMap((value) => value[4]);
    const text = wrong.length ? wrong.join(" ") : element.dataset.say;
    if (text !== lastSaid) window.studio.say(text);
    lastSaid = text;
    markUnread();  // an answer to an older question
  }

  // keys whose name, label or help has all the words; without scripts the browser's own search finds them
  const find = document.getElementById("find"), keys = [...form.querySelectorAll("[data-field]")];
  const texts = keys.map((one) => [one.dataset.field, ...[...one.querySelectorAll("legend, label[for], .help")]
    .map((part) => part.textContent)].join(" ").toLowerCase());

  function narrow() {
    const words = find.value.toLowerCase().split(/\s+/).filter(Boolean);
    keys.forEach((one, place) => { one.hidden = !words.every((word) => texts[place].includes(word)); });
    const left = keys.filter((one) => !one.hidden);
    find.parentElement.querySelector("output").textContent = words.length ? `${left.length} of ${keys.length} keys` : "";
    if (!words.length) return;
    form.querySelector('[name="depth"][value="all"]').checked = true;
    for (const one of left) one.closest(".set")?.setAttribute("open", "");
  }
  find.parentElement.hidden = false;
  find.addEventListener("keydown", (event) => { if (event.key === "Enter") event.preventDefault(); });

  form.noValidate = true;  // the plan says what is wrong, and without scripts the browser
  document.addEventListener("htmx:before:request", (event) => {
    if (event.target === form && markUnread().length) event.preventDefault();
  });
  form.addEventListener("submit", (event) => {
    const [first] = markUnread();
    if (!first) return;
    event.preventDefault();
    first.focus();
  });
  document.addEventListener("htmx:after:swap", () => { if (document.getElementById("notes")) apply(); });
  // of these fields no plan depends
  for (const name of ["input", "change"]) {
    form.addEventListener(name, (event) => {
      if (event.target === find) narrow();
      if (event.target.closest("[data-quiet]")) event.stopPropagation();
      else if (name === "change" && event.target.closest("[data-reload]")) form.requestSubmit();
    }, true);
  }
  // what was typed before the scripts were there
  const typed = (one) => one.options ? one.selectedIndex !== Math.max(0, [...one.options].findIndex((option) => option.defaultSelected))
    : one.value !== one.defaultValue || !!one.checked !== !!one.defaultChecked;
  addEventListener("load", () => {
    if (find.value) narrow();
    if ([...form.querySelectorAll("[name]:is(input, select, textarea)")].some(typed)) form.dispatchEvent(new Event("again"));
  });
  // what is typed is nowhere else: who leaves by a link, the theme or a key is asked
  let sends = false;
  form.addEventListener("submit", (event) => {
    if (event.defaultPrevented) return;
    sends = true;
    setTimeout(() => { sends = false; }, 2000);  // after a download the page stays
  });
  addEventListener("beforeunload", (event) => {
    if (sends) return;
    const some = [...form.querySelectorAll("[name]:is(input, select, textarea)")].some((one) => !one.closest("[data-quiet]") && typed(one));
    if (some || "typed" in form.dataset) event.preventDefault();
  });
  form.addEventListener("dragover", (event) => { if (event.target.closest("[data-drop]")) event.preventDefault(); });
  form.addEventListener("drop", async (event) => {
    const field = event.target.closest("[data-drop]"), file = event.dataTransfer.files[0];
    if (!field || !file) return;
    event.preventDefault();
    field.value = await file.text();
    field.dispatchEvent(new Event("input", {bubbles: true}));
  });
})();
