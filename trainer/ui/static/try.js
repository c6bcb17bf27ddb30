// The slider between the picture without the LoRA and the one with it; without this file they are side by side.
"use strict";
(() => {
  document.documentElement.classList.add("wipes");
  const state = () => document.querySelector("#try .state")?.textContent.trim();
  let at = null, said = state();

  function wipe(slider) {
    slider.closest(".viewer").querySelector("[data-wipe]").style.setProperty("--at", `${slider.value}%`);
  }

  document.addEventListener("input", (event) => {
    if (!event.target.matches(".wiper")) return;
    at = event.target.value;
    wipe(event.target);
  });

  // while a try is drawn the page follows: the slider stays where it is, and a new state is said
  new MutationObserver(() => {
    const slider = document.querySelector(".wiper"), word = state();
    if (slider && at !== null && slider.value !== at) { slider.value = at; wipe(slider); }
    if (word !== said) studio.say(word);
    said = word;
  }).observe(document.getElementById("content"), { childList: true, subtree: true });
})();
