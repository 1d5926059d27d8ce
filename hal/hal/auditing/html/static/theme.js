"use strict";
// Runs in the head, so that a chosen theme is there before anything is drawn.
const halTheme = (() => {
  const KEY = "halstack-theme";
  const CHOICES = ["auto", "light", "dark"];
  const stored = () => {
    try {
      return localStorage.getItem(KEY);
    } catch (error) {
      return null; // a file opened from disk may have no storage: the choice lasts for the visit
    }
  };
  const apply = (choice) => {
    if (choice === "auto") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = choice;
  };
  let current = CHOICES.includes(stored()) ? stored() : "auto";
  apply(current);
  const describe = (button) => {
    const next = CHOICES[(CHOICES.indexOf(current) + 1) % CHOICES.length];
    button.textContent = `Theme: ${current}`;
    button.setAttribute("aria-label", `Theme: ${current}. Switch to ${next}`);
  };
  return {
    start(button) {
      button.hidden = false;
      describe(button);
      button.addEventListener("click", () => {
        current = CHOICES[(CHOICES.indexOf(current) + 1) % CHOICES.length];
        apply(current);
        describe(button);
        try {
          localStorage.setItem(KEY, current);
        } catch (error) {
          // see above
        }
      });
    },
  };
})();
