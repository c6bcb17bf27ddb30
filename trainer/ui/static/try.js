// The slider between the picture without the LoRA and the one with it; without this file they are side by side.
"use strict";
(() => {
  document.documentElement.classList.add("wipes");

  document.addEventListener("input", (event) => {
    const slider = event.target.closest(".wiper input");
    if (slider) slider.closest(".viewer").querySelector("[data-wipe]").style.setProperty("--at", `${slider.value}%`);
  });
})();
