"use strict";
// The tier map and the roofline: one stop of Tab each, arrow keys inside.
const halMarks = (() => {
  let current = new Map(); // container: its one mark that Tab reaches
  const enter = (container, mark, isFocused) => {
    const before = current.get(container);
    if (before) before.setAttribute("tabindex", "-1");
    mark.setAttribute("tabindex", "0");
    current.set(container, mark);
    if (isFocused) mark.focus();
  };

  const startMap = (onChosen) => {
    const map = document.getElementById("heat");
    if (!map) return;
    const lines = [...map.rows].map((row) => [...row.querySelectorAll(".cell")]).filter((cells) => cells.length);
    if (!lines.length) return;
    map.setAttribute("role", "grid");
    for (const cells of lines) {
      for (const cell of cells) {
        halTooltip.adopt(cell, cell.title);
        cell.removeAttribute("title");
        cell.setAttribute("tabindex", "-1");
      }
    }
    const column = (cell) => Number(cell.dataset.c);
    const last = (cell) => column(cell) + cell.colSpan - 1;
    const nearest = (cells, wanted) => cells.reduce((best, cell) => {
      const off = (one) => Math.max(column(one) - wanted, wanted - last(one), 0);
      return off(cell) < off(best) ? cell : best;
    });
    let wanted = 0; // the column that up and down keep, also through cells over several columns
    const moved = (cell, key, isWhole) => {
      const at = lines.findIndex((cells) => cells.includes(cell));
      const cells = lines[at];
      const index = cells.indexOf(cell);
      if (key === "ArrowRight") return cells[index + 1];
      if (key === "ArrowLeft") return cells[index - 1];
      if (key === "ArrowDown") return lines[at + 1] && nearest(lines[at + 1], wanted);
      if (key === "ArrowUp") return lines[at - 1] && nearest(lines[at - 1], wanted);
      if (key === "Home") return isWhole ? lines[0][0] : cells[0];
      if (key === "End") return isWhole ? lines.at(-1).at(-1) : cells.at(-1);
      return undefined;
    };
    map.addEventListener("keydown", (event) => {
      const cell = event.target.closest(".cell");
      if (!cell) return;
      if (event.key === "Enter" || event.key === " ") {
        event.preventDefault();
        onChosen(cell.dataset.find);
        return;
      }
      const next = moved(cell, event.key, event.ctrlKey);
      if (event.key.startsWith("Arrow") || event.key === "Home" || event.key === "End") event.preventDefault();
      if (!next) return;
      if (!["ArrowUp", "ArrowDown"].includes(event.key)) wanted = column(next);
      enter(map, next, true);
    });
    let tapped = null; // a finger has no pointer to rest on a cell: the first tap only explains it
    map.addEventListener("click", (event) => {
      const cell = event.target.closest(".cell");
      if (!cell) return;
      if (matchMedia("(pointer: coarse)").matches && tapped !== cell) {
        tapped = cell;
        enter(map, cell, true);
        return;
      }
      onChosen(cell.dataset.find);
    });
    enter(map, lines[0][0], false);
    halTooltip.watch(map);
  };

  const startPlot = () => {
    const plot = document.getElementById("plot");
    const points = plot ? [...plot.querySelectorAll(".point")] : [];
    if (!points.length) return;
    for (const point of points) {
      const title = point.querySelector("title");
      halTooltip.adopt(point, title.textContent);
      title.remove();
      point.setAttribute("role", "img");
      point.setAttribute("tabindex", "-1");
    }
    plot.addEventListener("keydown", (event) => {
      const index = points.indexOf(event.target.closest(".point"));
      if (index < 0) return;
      const next = {
        ArrowRight: points[index + 1], ArrowDown: points[index + 1],
        ArrowLeft: points[index - 1], ArrowUp: points[index - 1],
        Home: points[0], End: points.at(-1),
      };
      if (!(event.key in next)) return;
      event.preventDefault();
      if (next[event.key]) enter(plot, next[event.key], true);
    });
    enter(plot, points[0], false);
    halTooltip.watch(plot.parentElement); // an svg that listens for focus would be a stop of Tab itself
  };

  return { startMap, startPlot };
})();
