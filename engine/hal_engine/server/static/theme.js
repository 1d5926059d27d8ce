// The colour theme: the system's, light or dark. Runs before the page is drawn, so that it does
// not flash; this is the only thing that the page keeps beyond the tab.
"use strict";

(() => {
  const NEXT = { auto: "light", light: "dark", dark: "auto" };
  const SPOKEN = { auto: "as the system", light: "light", dark: "dark" };
  const NAME = "halstack.theme";
  const root = document.documentElement;

  function stored() {
    try {
      const theme = localStorage.getItem(NAME);
      return theme in NEXT ? theme : "auto";
    } catch {
      return "auto"; // a browser that keeps nothing
    }
  }

  function show(theme) {
    root.dataset.theme = theme;
    const button = document.getElementById("theme");
    if (button !== null) {
      button.textContent = `◐ ${theme}`;
      button.setAttribute("aria-label", `Colour theme: ${SPOKEN[theme]}`);
    }
  }

  show(stored());
  document.addEventListener("DOMContentLoaded", () => {
    show(root.dataset.theme);
    document.getElementById("theme").addEventListener("click", () => {
      const theme = NEXT[root.dataset.theme];
      show(theme);
      try {
        localStorage.setItem(NAME, theme);
      } catch {
        return; // it holds for this page then
      }
    });
  });
})();
