"use strict";
// One tooltip for every mark. It follows the pointer's mark or the focused one; Escape hides it.
const halTooltip = (() => {
  const tip = document.getElementById("tip");
  let shown = null;
  const hide = () => {
    tip.hidden = true;
    if (shown) shown.removeAttribute("aria-describedby");
    shown = null;
  };
  const show = (mark) => {
    const text = mark.dataset.tip;
    if (!text) return;
    tip.textContent = text;
    tip.hidden = false;
    shown = mark;
    const box = mark.getBoundingClientRect();
    const left = Math.min(Math.max(8, box.left + box.width / 2 - tip.offsetWidth / 2),
      document.documentElement.clientWidth - tip.offsetWidth - 8);
    const above = box.top - tip.offsetHeight - 8;
    tip.style.left = `${Math.max(8, left)}px`;
    tip.style.top = `${above > 4 ? above : box.bottom + 8}px`;
  };
  const markOf = (target) => (target instanceof Element ? target.closest("[data-tip]") : null);
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape") hide();
  });
  document.addEventListener("scroll", hide, { passive: true, capture: true });
  return {
    // Moves what `title` says to the tooltip and to the mark's accessible name.
    adopt(mark, text) {
      mark.dataset.tip = text;
      mark.setAttribute("aria-label", text.replaceAll("\n", "; "));
    },
    watch(container) {
      container.addEventListener("pointerover", (event) => {
        const mark = markOf(event.target);
        if (mark) show(mark);
      });
      container.addEventListener("pointerout", (event) => {
        if (markOf(event.target) === shown) hide();
      });
      container.addEventListener("focusin", (event) => {
        const mark = markOf(event.target);
        // After the browser scrolled the mark into view, which would hide the tooltip again.
        if (mark) requestAnimationFrame(() => requestAnimationFrame(() => {
          if (document.activeElement === mark) show(mark);
        }));
      });
      container.addEventListener("focusout", hide);
    },
    hide,
  };
})();
