// The slider between the picture without the LoRA and the one with it; without this file they are side by side.
"use strict";
(() => {
  document.documentElement.classList.add("wipes");
  const state = () => document.querySelector("#try .state")?.textContent.trim();
  let said = state();

  // on the root, which a page that follows leaves as it is
  document.addEventListener("input", (event) => {
    if (event.target.matches(".wiper")) document.documentElement.style.setProperty("--at", `${event.target.value}%`);
  });

  // while a try is drawn the page follows: a new state is said
  new MutationObserver(() => {
    const word = state();
    if (word !== said) studio.say(word);
    said = word;
  }).observe(document.getElementById("content"), { childList: true, subtree: true, characterData: true });
})();
