"use strict";
// The page as a whole: what scripts add is shown, long lists get pages, paper gets everything.
(() => {
  const source = document.getElementById("report");
  const report = JSON.parse(source.textContent);
  document.documentElement.classList.add("scripted-on");
  for (const element of document.querySelectorAll(".scripted")) element.hidden = false;
  halTheme.start(document.getElementById("theme"));
  halMarks.startMap(halRows.find);
  halMarks.startPlot();
  halRows.start(report);

  for (const list of document.querySelectorAll("[data-page]")) {
    const size = Number(list.dataset.page);
    const cards = [...list.children];
    if (cards.length <= size) continue;
    const more = document.createElement("button");
    more.type = "button";
    more.className = "tool";
    let limit = size;
    const update = () => {
      cards.forEach((card, index) => card.classList.toggle("later", index >= limit));
      more.hidden = limit >= cards.length;
      more.textContent = `Show ${(Math.min(size, cards.length - limit)).toLocaleString("en")} more of ${cards.length.toLocaleString("en")}`;
    };
    more.addEventListener("click", () => { limit += size; update(); });
    list.after(more);
    update();
    // A link may lead to a card that is on a later page.
    addEventListener("hashchange", () => {
      const index = cards.findIndex((card) => `#${card.id}` === location.hash);
      if (index < limit) return;
      limit = index + 1;
      update();
      cards[index].scrollIntoView();
    });
  }

  const opened = [];
  addEventListener("beforeprint", () => {
    for (const part of document.querySelectorAll("details:not([open])")) {
      part.open = true;
      opened.push(part);
    }
  });
  addEventListener("afterprint", () => {
    for (const part of opened.splice(0)) part.open = false;
  });

  const links = new Map([...document.querySelectorAll(".top nav a")].map((link) => [link.hash.slice(1), link]));
  const observer = new IntersectionObserver((entries) => {
    for (const entry of entries) {
      if (!entry.isIntersecting) continue;
      for (const [id, link] of links) {
        if (id === entry.target.id) link.setAttribute("aria-current", "true");
        else link.removeAttribute("aria-current");
      }
    }
  }, { rootMargin: "-10% 0px -80% 0px" });
  for (const id of links.keys()) {
    const section = document.getElementById(id);
    if (section) observer.observe(section);
  }

  const save = document.getElementById("save");
  save.hidden = false;
  save.addEventListener("click", () => {
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([source.textContent], { type: "application/json" }));
    link.download = "audit.json";
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 10000);
  });
})();
